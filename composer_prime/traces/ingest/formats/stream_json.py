"""What Claude Code prints by `--output-format stream-json`: lines, or a list of them, of a run. Records are the lines.

A run starts with an init line. What the user asked stands there by `--replay-user-messages` only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_prime.traces.ingest.formats import claude_code
from composer_prime.traces.ingest.reading import Document, Log
from composer_prime.traces.ingest.records import each, mapping, name_or_none, objects

START = "the run's first line"


def _marks(value: Any) -> dict[str, bool]:
    lines = objects(each(value))
    told = [line for line in lines if line.get("type") in ("assistant", "user")]
    others = [line for line in told if not {"sessionId", "parentUuid"} & line.keys()]
    return {
        "type user or assistant": bool(told),
        "a message with content": any("content" in mapping(line.get("message")) for line in told),
        "session_id, or lines without names": any("session_id" in line or "uuid" not in line for line in others),
    }


class _Reader(claude_code.Reader):
    def read(self, lines: list[Any], fates: dict[int, str]) -> Document:
        return super().read(_spelled(lines), fates)


def _spelled(lines: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The lines as Claude Code's own sessions have them, each of which names the line before it."""
    spelled: list[Mapping[str, Any]] = []
    latest: dict[str | None, str] = {}
    session: Any = None
    cwd = None
    for number, given in enumerate(map(mapping, lines)):
        kind, agent = given.get("type"), name_or_none(given.get("parent_tool_use_id"))
        is_init = kind == "system" and given.get("subtype") == "init"
        if is_init:
            latest = {None: latest[None]} if session == given.get("session_id") and None in latest else {}
            session, cwd = given.get("session_id"), given.get("cwd")
        parent = latest.get(agent, latest.get(START))
        if kind in ("user", "assistant") or is_init:
            latest |= {agent: str(number)} | ({START: str(number)} if is_init else {})
        line = {**given, "sessionId": session or given.get("session_id"), "cwd": cwd, "uuid": str(number)}
        spelled.append({**line, "parentUuid": parent, "isSidechain": agent is not None, "agentId": agent})
    return spelled


FORMAT = Log("claude-stream-json", _marks, _Reader)
