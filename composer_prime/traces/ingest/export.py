"""Sessions out of a store: as the files that they came from, or as ATIF.

ATIF knows no tree: a session's branches become one file each. What an earlier branch has told is context there.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.formats import atif, claude_code, codex
from composer_prime.traces.ingest.records import number_or_none
from composer_prime.traces.ingest.session import Node, Session, arguments_of, path_of
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.states import calls_of, digest

ATIF_VERSION = "ATIF-v1.7"
_COUNTS = {
    "prompt_tokens": ("input_tokens", "prompt_tokens"),
    "completion_tokens": ("output_tokens", "completion_tokens"),
    "cached_tokens": ("cached_input_tokens", "cached_tokens", "cache_read_input_tokens"),
}
"""ATIF's names with those that APIs have for them; a later one counts."""
_LOGS = (claude_code.FORMAT.name, codex.FORMAT.name)


def export(store: TraceStore, folder: Path, kind: str) -> int:
    """Write all sessions into a folder that isn't there or is empty; how many files.

    kind  original: what was kept, byte for byte but for secrets; atif: ATIF 1.7

    Raises BadInput for another kind, or a folder that holds something.
    """
    if kind not in KINDS:
        raise BadInput(f"sessions can't be exported as {kind!r}: give one of {', '.join(KINDS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} holds something already: give a new folder")
    written: set[str] = set()
    num_files = 0
    for session in store.sessions():
        files = KINDS[kind](session)
        same = digest(sorted(files.values()))
        if kind == "original" and same in written:  # another session of the same record
            continue
        written.add(same)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            num_files += 1
    return num_files


def original_files(session: Session) -> dict[str, str]:
    """What was kept of a session, by path; laid out so that ingestion finds what belongs together."""
    main, *beside = session.original
    is_line = session.format in _LOGS or "\n" not in main.text.strip()
    is_trial = session.format == atif.FORMAT.name and bool(beside)
    name = f"{session.id}/agent/trajectory.json" if is_trial else f"{session.id}.json{'l' if is_line else ''}"
    folder = f"{session.id}/{'verifier' if is_trial else 'subagents'}"
    return {name: main.text} | {f"{folder}/{Path(part.name).name}": part.text for part in beside}


def atif_files(session: Session) -> dict[str, str]:
    """One trajectory a branch. Steps that an earlier one holds are copied context."""
    return {
        f"{session.id}-{number}.json": json.dumps(_trajectory(session, number, path, told), indent=1)
        for number, (path, told) in enumerate(_branches(session))
    }


KINDS: Mapping[str, Callable[[Session], dict[str, str]]] = {"original": original_files, "atif": atif_files}


def _branches(session: Session) -> Iterator[tuple[list[int], set[int]]]:
    """The paths to the leaves, each with those of its nodes that earlier paths hold."""
    parents = {node.parent for node in session.nodes}
    seen: set[int] = set()
    for leaf in range(len(session.nodes)):
        if leaf not in parents:
            path = path_of(session.nodes, leaf)
            yield path, seen & set(path)
            seen |= set(path)


def _trajectory(session: Session, number: int, path: list[int], told: set[int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for place in path:
        node = session.nodes[place]
        if node.message["role"] == "tool" and _observe(steps, node):
            continue
        steps.append(_step(node, place in told or node.is_copied))
    models = [node.author for node in session.nodes if node.author]
    model = {"model_name": models[0]} if models else {}
    reward = {} if session.reward is None else {"extra": {"reward": session.reward}}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session.name or session.id,
        "trajectory_id": f"{session.id}-{number}",
        "agent": {"name": session.format, "version": "unknown", **model, "tool_definitions": list(session.tools)},
        "steps": [{"step_id": step_id, **step} for step_id, step in enumerate(steps, start=1)],
        **reward,
    }


def _step(node: Node, is_copied: bool) -> dict[str, Any]:
    message = node.message
    step = {"source": "agent" if node.is_turn else "user", "message": message["content"]}
    if message["role"] == "system":
        step["source"] = "system"
    calls = [
        {
            "tool_call_id": call["id"],
            "function_name": call["function"]["name"],
            "arguments": _arguments(call["function"]["arguments"]),
        }
        for call in calls_of(message)
    ]
    more = {
        "model_name": node.author,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": calls,
        "metrics": _metrics(node.usage or {}),
        "is_copied_context": is_copied,
    }
    step |= {name: value for name, value in more.items() if value}
    return step | ({"llm_call_count": 0} if node.is_synthetic else {})


def _observe(steps: list[dict[str, Any]], node: Node) -> bool:
    """Put a tool's result into the last step, if that called it; a request may show results without their calls."""
    call_id = node.message["tool_call_id"]
    if not steps or call_id not in [call["tool_call_id"] for call in steps[-1].get("tool_calls", [])]:
        return False
    results = steps[-1].setdefault("observation", {"results": []})["results"]
    results.append({"source_call_id": call_id, "content": node.message["content"]})
    return True


def _arguments(text: str) -> Mapping[str, Any]:
    """ATIF has objects only: arguments that are none are put into one."""
    return arguments_of(text) or ({"input": text} if text.strip(" {}") else {})


def _metrics(usage: Mapping[str, Any]) -> dict[str, int]:
    """ATIF's counts, whose prompt holds the tokens that were read from a cache."""
    numbers = {name: int(number) for name in usage if (number := number_or_none(usage[name])) is not None}
    found = {kind: numbers[name] for kind, names in _COUNTS.items() for name in names if name in numbers}
    if "cache_read_input_tokens" in usage:  # Anthropic's input excludes what a cache gave or took
        cached = (numbers.get(f"cache_{did}_input_tokens", 0) for did in ("read", "creation"))
        found["prompt_tokens"] = found.get("prompt_tokens", 0) + sum(cached)
    return found
