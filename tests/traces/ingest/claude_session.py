"""A synthetic session of Claude Code with every oddity that its files have, and what must come of it.

`write(folder)` writes one of 200 turns. The agent repairs numbered modules: it reads one, edits it and runs its test,
so that a turn's right action follows from what it saw.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SESSION = "8f14e45f-ceea-467f-a8c2-3f1d2b7c9a10"
MODEL = "claude-sonnet-4-5"
SECRET = "sk-ant-api03-" + "Zx9" * 12
"""Stands in a tool's result; no store may hold it."""


@dataclass
class ClaudeSession:
    """A session's files and what must come of them.

    main       bytes of <session>.jsonl
    subagents  bytes by name below <session>/subagents
    turns      decision points, as (text, names of tools called), in the order of the files
    dropped    records by reason
    """

    main: bytes
    subagents: dict[str, bytes]
    turns: list[tuple[str, list[str]]]
    dropped: Counter[str]

    @property
    def num_records(self) -> int:
        return sum(data.rstrip(b"\n").count(b"\n") + 1 for data in [self.main, *self.subagents.values()])


def write(folder: Path, num_turns: int = 200, seed: int = 0) -> Path:
    """Write a session's files; the path of its main one."""
    session = claude_session(num_turns, seed)
    main = folder / f"{SESSION}.jsonl"
    (folder / SESSION / "subagents").mkdir(parents=True)
    main.write_bytes(session.main)
    for name, data in session.subagents.items():
        (folder / SESSION / "subagents" / name).write_bytes(data)
    return main


def claude_session(num_turns: int = 200, seed: int = 0) -> ClaudeSession:
    """A session with that many decision points, of which the subagent has two and a sidechain one; at least 30."""
    made = _Writer(random.Random(seed))
    made.skipped("summary", summary="Repair the modules", leafUuid="x")
    made.skipped("file-history-snapshot", snapshot={})
    made.skipped("permission-mode", mode="default")
    made.user("Caveat: what follows comes of local commands.", isMeta=True)
    made.user("Repair all modules. Read, edit, then run the test.")
    oddities = [
        made.progress_between, made.api_error, made.duplicate_line, made.growing_prefix, made.sidechain, made.orphan,
        made.rewind, made.synthetic, made.secret, made.image, made.broken_lines, made.parallel, made.compaction,
        made.cut_line, made.parallel, made.growing_prefix,
    ]  # fmt: skip
    subagent = _Writer(random.Random(seed + 1), agent="agent-7c1")
    subagent.user("Find the callers of module 3.")
    subagent.call("Searching.", [("Grep", {"pattern": "module_3"})])
    subagent.call("Two callers.", [])
    between = max(1, (num_turns - 24) // len(oddities))
    while len(made.turns) + len(subagent.turns) < num_turns - 1:
        made.repair_turn()
        if oddities and len(made.turns) % between == 0:
            oddities.pop(0)()
    made.call("All modules are repaired.", [])
    made.truncated_last()
    return ClaudeSession(
        made.data(), {"agent-7c1.jsonl": subagent.data()}, made.turns + subagent.turns, made.dropped + subagent.dropped
    )


@dataclass
class _Writer:
    rng: random.Random
    agent: str = ""
    lines: list[bytes] = field(default_factory=list)
    turns: list[tuple[str, list[str]]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    last: str | None = None
    step: int = 0

    def data(self) -> bytes:
        return b"".join(self.lines)

    def uuid(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def line(self, kind: str, *, dropped: str | None = None, **fields: Any) -> str:
        """Add a line behind the last, and make it the last unless it is told what is before it."""
        uuid = self.uuid()
        moves = "parentUuid" not in fields
        envelope = {
            "parentUuid": self.last,
            "isSidechain": bool(self.agent),
            "userType": "external",
            "cwd": "/home/dev/modules",
            "sessionId": SESSION,
            "version": "2.1.4",
            "gitBranch": "main",
            "type": kind,
            "uuid": uuid,
            "timestamp": f"2026-11-20T10:{len(self.lines) // 60 % 60:02}:{len(self.lines) % 60:02}.000Z",
        }
        if self.agent:
            envelope["agentId"] = self.agent
        self.lines.append(json.dumps({**envelope, **fields}, ensure_ascii=False).encode() + b"\n")
        if moves:
            self.last = uuid
        if dropped:
            self.dropped[dropped] += 1
        return uuid

    def skipped(self, kind: str, **fields: Any) -> None:
        """A line without a place in the tree."""
        self.lines.append(json.dumps({"type": kind, **fields}).encode() + b"\n")
        self.dropped[f"{kind} line"] += 1

    def user(self, content: Any, **fields: Any) -> str:
        return self.line("user", message={"role": "user", "content": content}, **fields)

    def block(self, message_id: str, block: dict[str, Any], usage: Any, **fields: Any) -> str:
        """One content block of a call, as a line of its own."""
        message = {"id": message_id, "type": "message", "role": "assistant", "model": MODEL}
        message |= {"content": [block], "stop_reason": None, "usage": usage}
        return self.line("assistant", message=message, requestId=f"req_{message_id[4:]}", **fields)

    def call(
        self, text: str, calls: list[tuple[str, dict[str, Any]]], *, answer: bool = True, **first: Any
    ) -> list[str]:
        """A call of the model, a line a block, and its tools' results; the ids of the tool calls."""
        message_id = f"msg_{self.uuid()}"
        usage = {"input_tokens": 12, "cache_read_input_tokens": 900, "output_tokens": 3}
        self.block(message_id, {"type": "thinking", "thinking": f"Next: {text}", "signature": "c2ln"}, usage)
        self.block(message_id, {"type": "text", "text": text}, usage)
        ids = []
        for name, given in calls:
            ids.append(f"toolu_{self.uuid()}")
            last_usage = {**usage, "output_tokens": 40 + len(ids)}
            self.block(message_id, {"type": "tool_use", "id": ids[-1], "name": name, "input": given}, last_usage)
        self.turns.append((text, [name for name, _ in calls]))
        for call_id in ids if answer else []:
            self.result(call_id, "ok")
        return ids

    def result(self, call_id: str, content: Any, **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        return self.user([block], toolUseResult={"stdout": "ok", "stderr": "", "exitCode": 0}, **fields)

    def repair_turn(self) -> None:
        module, phase = divmod(self.step, 3)
        file = f"module_{module}.py"
        name, given = [
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "x = 0", "new_string": f"x = {module}"}),
            ("Bash", {"command": f"pytest -q test_{module}.py"}),
        ][phase]
        self.call(f"Step {self.step}: {name} {file}.", [(name, given)])
        self.step += 1

    def progress_between(self) -> None:
        """A progress line in the chain of parents, which is stored as a link and counts as dropped."""
        ids = self.call("Running in the background.", [("Bash", {"command": "make"})], answer=False)
        self.line("progress", dropped="progress line", data={"type": "bash_progress", "output": "half"})
        self.result(ids[0], "made")

    def api_error(self) -> None:
        content = [{"type": "text", "text": "API Error: 529 overloaded"}]
        message = {"id": self.uuid(), "role": "assistant", "model": "<synthetic>", "content": content}
        parent = self.last
        self.line("assistant", message=message, isApiErrorMessage=True, dropped="API error message", parentUuid=parent)

    def duplicate_line(self) -> None:
        self.repair_turn()
        self.lines.append(self.lines[-1])
        self.dropped["duplicate uuid"] += 1

    def growing_prefix(self) -> None:
        """Growing prefixes of one message, each under a uuid of its own and after the same line."""
        text = f"Step {self.step} was long, and here is why it took so many words."
        parent, message_id = self.last, f"msg_{self.uuid()}"
        for stop in (10, 25, len(text)):
            usage = {"input_tokens": 5, "output_tokens": stop}
            uuid = self.block(message_id, {"type": "text", "text": text[:stop]}, usage, parentUuid=parent)
        self.last = uuid
        self.turns.append((text, []))
        self.user("Go on.")

    def sidechain(self) -> None:
        """A subagent of an older version, among the lines."""
        before = self.last
        self.last = None
        self.user("Count the modules.", isSidechain=True)
        message_id = f"msg_{self.uuid()}"
        self.block(message_id, {"type": "text", "text": "There are many."}, None, isSidechain=True)
        self.turns.append(("There are many.", []))
        self.last = before

    def orphan(self) -> None:
        self.result("toolu_gone", "left over", dropped="tool result without a call", parentUuid=self.last)

    def rewind(self) -> None:
        """Two tries from the same place: the first is a branch that ends."""
        fork = self.last
        self.user("Try it with sed.")
        self.call("Using sed.", [("Bash", {"command": "sed -i s/0/1/ module_0.py"})])
        self.last = fork
        self.user("No: with the editor.")

    def synthetic(self) -> None:
        """A message that the harness wrote after the user stopped a call."""
        content = [{"type": "text", "text": "No response requested."}]
        message = {"id": self.uuid(), "role": "assistant", "model": "<synthetic>", "content": content}
        self.line("assistant", message=message)
        self.user("Continue.")

    def secret(self) -> None:
        ids = self.call("Looking at the settings.", [("Read", {"file_path": ".env"})], answer=False)
        self.result(ids[0], f"ANTHROPIC_API_KEY={SECRET}\nDEBUG=1")

    def image(self) -> None:
        ids = self.call("Looking at the plot.", [("Read", {"file_path": "plot.png"})], answer=False)
        source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        self.result(ids[0], [{"type": "image", "source": source}])

    def broken_lines(self) -> None:
        self.lines += [b"\n", b'{"type": "user", "message": \n', b'{"type": "\xff"}\n', b'"a text"\n']
        self.dropped += Counter(["blank line", "malformed line", "not UTF-8", "line of an unknown type"])

    def cut_line(self) -> None:
        """A message's line is broken: who follows it is put after the message before."""
        self.user("This line will be broken.")
        self.lines[-1] = self.lines[-1][:80] + b"\n"
        self.dropped["malformed line"] += 1

    def parallel(self) -> None:
        """Two tools at once: each result names its own line of the call, and the next line names the last result."""
        message_id = f"msg_{self.uuid()}"
        places, ids = [], []
        for module in (1, 2):
            ids.append(f"toolu_{self.uuid()}")
            block = {"type": "tool_use", "id": ids[-1], "name": "Read", "input": {"file_path": f"module_{module}.py"}}
            places.append(self.block(message_id, block, {"input_tokens": 7, "output_tokens": 9}))
        self.turns.append(("", ["Read", "Read"]))
        for call_id, place in zip(ids, places, strict=True):
            last = self.result(call_id, "x = 0  # \u2028 caf\u00e9", parentUuid=place)
        self.last = last

    def compaction(self) -> None:
        """What was said is replaced by a summary, and the last call is replayed behind it under new uuids."""
        ids = self.call("Before compaction.", [("Bash", {"command": "git status"})])
        replayed = [json.loads(line) for line in self.lines[-4:]]
        self.last = None
        self.line(
            "system",
            dropped="system line",
            subtype="compact_boundary",
            content="Conversation compacted",
            compactMetadata={},
        )
        self.user("Summary: modules are being repaired.", isCompactSummary=True)
        for line in replayed:
            line |= {"uuid": self.uuid(), "parentUuid": self.last}
            self.last = line["uuid"]
            self.lines.append(json.dumps(line).encode() + b"\n")
        self.result(ids[0], "ok", dropped="duplicate tool result", parentUuid=self.last)

    def truncated_last(self) -> None:
        self.lines.append(b'{"parentUuid": "x", "type": "user", "message": {"role": "user", "con')
        self.dropped["truncated last line"] += 1
