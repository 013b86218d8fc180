"""Files into a store: which are sessions, what each gave, and what was dropped."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.formats import FORMATS, atif, check_known, claude_code, detect, harbor
from composer_prime.traces.ingest.messages import tools_of
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import Part, entries_of, parse
from composer_prime.traces.ingest.secret_patterns import SecretCutter
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.states import Tool, calls_of

SUFFIXES = (".json", ".jsonl", ".traj")
SUBAGENTS = "subagents"
UNSAYABLE = "a part of the action isn't text"
MAX_FILE_BYTES = 2**30
"""Of one file of traces, which is read whole."""


@dataclass
class FileReport:
    """What one file gave.

    format       None: it is of no known format, and nothing was read
    num_new      sessions that the store didn't hold
    num_states   decision points of all its sessions that can be used
    left_out     decision points that can't, by reason
    num_copies   usable ones that other sessions hold, too
    dropped      records by reason; with `num_used` they sum to `num_records`
    secrets      cut out of the file, by kind
    remarks      what a person should know, one line each
    """

    path: Path
    format: str | None = None
    num_sessions: int = 0
    num_new: int = 0
    num_states: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    num_copies: int = 0
    num_records: int = 0
    num_used: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    secrets: Mapping[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What scripts read of it."""
        num_points = self.num_states + sum(self.left_out.values())
        return {
            "file": str(self.path), "format": self.format, "decision_points": num_points, "usable": self.num_states,
            "left_out": self.left_out, "records": self.num_records, "used": self.num_used, "dropped": self.dropped,
            "secrets": self.secrets, "remarks": self.remarks,
        }  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What a harness's logs lack: the tools that all sessions had, and their system message."""

    tools: tuple[Tool, ...] = ()
    system: str | None = None

    @classmethod
    def of(cls, tools: Path | None, system: Path | None) -> "Given | None":
        """Read from files: tools as an API lists them, in JSON; a text. Raises BadInput where a file says none."""
        if tools is None and system is None:
            return None
        found: tuple[Tool, ...] = ()
        if tools is not None:
            with suppress(ValueError, RecursionError):
                found = tuple(tools_of(parse(_bytes(tools).decode())))
            if not found:
                raise BadInput(
                    f"--tools ({tools}) lists no tool: give a JSON list as OpenAI's or Anthropic's API takes it"
                )
        return cls(found, None if system is None else _bytes(system).decode(errors="replace"))

    def to(self, session: Session) -> Session:
        """The session with it; tools that the log lists stay. Raises BadInput where it calls a tool that is lacking."""
        if session.tools or not self.tools:
            return replace(session, system=self.system)
        names = {tool["function"]["name"] for tool in self.tools}
        called = {call["function"]["name"] for node in session.nodes for call in calls_of(node.message)}
        if lacking := ", ".join(sorted(called - names)[:5]):
            raise BadInput(
                f"session {session.name or session.id[:16]} calls {lacking}, which --tools doesn't list: "
                "add them to the file, or ingest other harnesses' logs by themselves"
            )
        return replace(session, tools=self.tools, system=self.system)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are, and of folders what may be a session: subagents' files come with their session's.

    Raises BadInput for a path where nothing is.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        elif path.exists():
            found.append(path)
        else:
            raise BadInput(f"{path} isn't there: give files, or folders that hold some")
    named = set(paths)
    return [path for path in dict.fromkeys(found) if path in named or not _is_beside(path)]


def read_file(
    path: Path, format: str | None = None, harbor_python: Path | None = None
) -> tuple[str, Reading, SecretCutter]:
    """A session's file and those beside it that belong to it: the format, what they gave, the secrets that were cut.

    harbor_python  has Harbor, which converts the file first; `format` is then one of `harbor.AGENTS`

    Raises BadInput if it can't be read or is of no known format, or the format that is given isn't known.
    """
    secrets = SecretCutter(os.environ)
    if harbor_python is not None:
        converted = entries_of(harbor.to_atif(path, harbor_python, format or "unnamed"), secrets)
        return atif.FORMAT.name, atif.FORMAT.read([Part("", converted)]), secrets
    main = Part("", tuple(entry for file in _events(path) for entry in entries_of(_bytes(file), secrets)))
    subagents = sorted((path.with_suffix("") / SUBAGENTS).glob("agent-*.jsonl"))
    beside = {claude_code.FORMAT.name: subagents, atif.FORMAT.name: _rewards(path)}
    if format is not None:
        check_known(format)
    elif subagents and not main.entries:
        format = claude_code.FORMAT.name
    else:
        format = detect(main.entries, str(path))
    parts = [
        Part(f"{file.parent.name}/{file.name}", entries_of(_bytes(file), secrets)) for file in beside.get(format, ())
    ]
    return format, FORMATS[format].read([main, *parts]), secrets


def ingest(
    files: Sequence[Path],
    store: TraceStore | None,
    *,
    named: Container[Path],
    format: str | None = None,
    given: Given | None = None,
    harbor_python: Path | None = None,
    dry_run: bool = False,
) -> Iterator[FileReport]:
    """Read the files one after the other, and add their sessions to the store unless it is a dry run.

    store  None: there is none yet, which only a dry run can do with
    named  files that were asked for by name: one of no known format is an error, another is passed over
    given  what the logs lack
    harbor_python  as `read_file` has it

    Raises BadInput, and keeps what came before.
    """
    if format is not None and harbor_python is None:
        check_known(format)
    calls = set() if store is None else store.known_calls()
    ids = set() if store is None else set(store.index["sessions"])
    try:
        for path in files:
            try:
                chosen, reading, secrets = read_file(path, format, harbor_python)
                if given is not None:
                    reading.sessions = [given.to(session) for session in reading.sessions]
            except BadInput as error:
                if path in named:
                    raise
                yield FileReport(path, remarks=[f"passed over: {error}"])
                continue
            report = _report(path, chosen, reading, secrets)
            for session in reading.sessions:
                keys = set(session.call_keys().values())
                if session.id not in ids:
                    report.num_new += 1
                    report.num_copies += len(keys & calls)
                ids.add(session.id)
                calls |= keys
                if store is not None and not dry_run:
                    store.add(session)
            if store is not None and not dry_run:
                account = {"num_records": report.num_records, "dropped": report.dropped, "secrets": report.secrets}
                sessions = [session.id for session in reading.sessions]
                store.note_file(path, {"format": chosen, **account, "sessions": sessions})
            yield report
    finally:
        if store is not None and not dry_run:
            store.save_index()


def _report(path: Path, format: str, reading: Reading, secrets: SecretCutter) -> FileReport:
    nodes = [node for session in reading.sessions for node in session.nodes]
    num_states = sum(node.is_decision for node in nodes)
    num_left_out = sum(node.is_action for node in nodes) - num_states
    bare = [session for session in reading.sessions if not session.tools]
    num_silent = sum(not any(calls_of(node.message) for node in session.nodes) for session in bare)
    remarks = []
    if not reading.sessions:
        remarks.append("no decision point of a model: nothing is stored")
    if len(bare) > num_silent:
        remarks.append("lists no tools: at each point those are shown that were called by then; see --tools")
    if num_silent:
        remarks.append(f"{num_silent} of {len(reading.sessions)} sessions have no tools: their actions are text")
    return FileReport(
        path,
        format,
        num_sessions=len(reading.sessions),
        num_states=num_states,
        left_out={UNSAYABLE: num_left_out} if num_left_out else {},
        num_records=reading.num_records,
        num_used=reading.num_used,
        dropped=dict(reading.dropped),
        secrets={kind: count for kind, count in secrets.counts.items() if count},
        remarks=remarks,
    )


def _bytes(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise BadInput(f"{path} has {size} bytes, of {MAX_FILE_BYTES} at most: cut it into several")
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} can't be read: {error.strerror}: give a file of traces") from error


def _rewards(path: Path) -> list[Path]:
    """Of Harbor's trial folder, in which the trajectory is `agent/trajectory.json`."""
    found = [path.parent.parent / name for name in atif.REWARD_FILES]
    return [file for file in found if file.is_file()] if path.parent.name == "agent" else []


def _events(path: Path) -> list[Path]:
    """Of OpenHands' folder of events, one a file; the first is the session's main file."""
    return sorted(path.parent.glob("event-*.json")) if path.match("event-*.json") else [path]


def _is_beside(path: Path) -> bool:
    folder = path.parent
    if path != _events(path)[0]:
        return True
    is_subagent = folder.name == SUBAGENTS and folder.parent.with_name(folder.parent.name + ".jsonl").is_file()
    return is_subagent or f"{folder.name}/{path.name}" in atif.REWARD_FILES
