"""Claude Code's sessions: JSON lines, with subagents in files of their own or among the lines.

One model call is several lines, which share the message's id and the request's. Lines name the line before them in
`parentUuid`; some of those say nothing to the model, and are stored as links. Attachments do: files, queued messages,
memory, hooks. After compaction lines are replayed: a replay of the same line is dropped, one in another tree is context
there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.dialects.parts import part_messages
from composer_prime.traces.ingest.messages import json_text, plain, result
from composer_prime.traces.ingest.reading import LineReader, Log
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, string
from composer_prime.traces.states import Message

SKIPPED = (
    "system", "summary", "progress", "ai-title", "queue-operation", "file-history-snapshot",
    "last-prompt", "permission-mode", "pr-link",
)  # fmt: skip
"""Types of lines that hold no message."""
SYNTHETIC = "<synthetic>"
DUPLICATE_LINE = "duplicate uuid"
API_ERROR = "API error message"
EMPTY = "message without content"
SILENT = "attachment without a text"
SHOWN = ("content", "prompt", "text", "snippet", "banner", "blockingError", "addedLines", "addedBlocks", "skills")
"""Fields of an attachment whose texts the model is shown."""
NAMED = ("displayPath", "filename", "path", "newDate")
REPLAYED = ("parentUuid", "message", "attachment")
"""Fields that a replay of the same line has equal."""


def _marks(value: Any) -> dict[str, bool]:
    line = mapping(value)
    return {
        "type user or assistant": line.get("type") in ("user", "assistant"),
        "a message with content": "content" in mapping(line.get("message")),
        "uuid": isinstance(line.get("uuid"), str),
        "sessionId or parentUuid": isinstance(line.get("sessionId"), str) or "parentUuid" in line,
    }


@dataclass(frozen=True)
class _Place:
    """Where a line stands: after which node, in the tree of which name, through which other lines."""

    node: int | None
    root: str
    links: list[int]


@dataclass
class _Call:
    """One model call while its lines come in: its node, the last node of what the model was shown after it, and what
    it wrote."""

    node: int
    tip: int
    blocks: list[Mapping[str, Any]] = field(default_factory=list)


class Reader(LineReader):
    """Reads a session's lines, its subagents' among them.

    _known    lines by uuid
    _nodes    by line the last node that it made
    _latest   the last node of each agent
    _roots    of each node the name of its tree
    _calls    by name, and by the tree that they stand in
    _call_of  the call of a node: of the model's own, and of what it was shown after it
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, int] = {}
        self._nodes: dict[int | None, int] = {}
        self._latest: dict[tuple[bool, str], int] = {}
        self._roots: list[str] = []
        self._calls: dict[str, dict[str, _Call]] = {}
        self._call_of: dict[int | None, _Call] = {}

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        made = self._take(number, line)
        uuid = name_or_none(line.get("uuid"))
        if uuid and (isinstance(made, int) or self._known.get(uuid) not in self._nodes):
            self._known[uuid] = number
        if isinstance(made, str):
            return made
        self._nodes[number] = self._latest[_agent(line)] = made
        self.draft.name = self.draft.name or name_or_none(line.get("sessionId"))
        self.draft.cwd = self.draft.cwd or name_or_none(line.get("cwd"))
        return None

    def _take(self, number: int, line: Mapping[str, Any]) -> str | int:
        """Add what a line says: the last node that it made, or why it is dropped."""
        kind = line.get("type")
        message = mapping(line.get("message"))
        if kind == "attachment":
            message = _attached(mapping(line.get("attachment")))
        elif kind not in ("user", "assistant"):
            return f"{kind} line" if kind in SKIPPED else "line of an unknown type"
        if not isinstance(message.get("content"), str | list) or not message["content"]:
            return SILENT if kind == "attachment" else EMPTY
        if line.get("isApiErrorMessage") is True:
            return API_ERROR
        known = self._known.get(string(line.get("uuid")))
        is_same = known is not None and all(self.lines[known].get(name) == line.get(name) for name in REPLAYED)
        if is_same and known in self._nodes:
            return DUPLICATE_LINE
        place = self._place(number, line)
        if kind == "attachment":
            return self._show(plain("user", message["content"]), number, place, self._call_of.get(place.node))
        if kind == "assistant":
            return self._add_assistant(number, string(line.get("requestId")), message, place)
        return self._add_user(number, message["content"], place)

    def _place(self, number: int, line: Mapping[str, Any]) -> _Place:
        """Up the parents to a message. If the file lacks one of them, the agent's message before stands in."""
        links: list[int] = []
        root, parent = f"record {number}", _parent(line)
        while parent is not None:
            known = self._known.get(parent)
            if known is None or known in self._nodes or known in links:
                node = self._nodes.get(known, self._latest.get(_agent(line)))
                return _Place(node, root if node is None else self._roots[node], links)
            links.append(known)
            root, parent = f"link {parent}", _parent(self.lines[known])
        return _Place(None, root, links)

    def _add_assistant(self, number: int, request: str, message: Mapping[str, Any], place: _Place) -> int:
        content, model = message["content"], message.get("model")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content)
        name = f"{message['id']}:{request}" if name_or_none(message.get("id")) else None
        calls = self._calls.setdefault(name or f"record {number}", {})
        if place.root not in calls:
            author = None if model == SYNTHETIC else name_or_none(model)
            more = {"author": author, "is_copied": bool(calls), "is_synthetic": model == SYNTHETIC, "call": name}
            node = self.draft.add({"role": "assistant"}, self._tip(place.node), (), **more)
            self._roots.append(place.root)
            calls[place.root] = self._call_of[node] = _Call(node, node)
        call = calls[place.root]
        _merge(call.blocks, blocks)
        old = self.draft.nodes[call.node]
        said = part_messages({"role": "assistant", "content": call.blocks})[0]
        usage = mapping(message.get("usage")) or old.usage
        self.draft.replace(call.node, number, message=said, usage=usage, links=(*old.links, *place.links))
        return call.node

    def _add_user(self, number: int, content: str | list[Any], place: _Place) -> int | str:
        blocks = [] if isinstance(content, str) else content
        answers = [block for block in objects(blocks) if block.get("type") == "tool_result"]
        rest = content if isinstance(content, str) else [block for block in blocks if block not in answers]
        made: int | str = EMPTY
        for block in answers:
            call_id = string(block.get("tool_use_id"))
            call = self._call_of.get(self.draft.caller(place.node, call_id))
            refusal = self.draft.refusal(call.tip if call else None, call_id)
            if refusal is None:
                made = self._show(result(call_id, block.get("content")), number, place, call)
            elif isinstance(made, str):
                made = refusal
        if rest:
            after = self._tip(place.node) if isinstance(made, str) else made
            made = self._add(plain("user", rest), after, number, place)
        return made

    def _show(self, message: Message, number: int, place: _Place, call: _Call | None) -> int:
        """Add what the model is shown after a call, or after another message."""
        node = self._add(message, call.tip if call else place.node, number, place)
        if call is not None:
            call.tip, self._call_of[node] = node, call
        return node

    def _tip(self, node: int | None) -> int | None:
        """Where a line that names `node` continues: after all that was shown after its call, whichever is named."""
        return self._call_of[node].tip if node in self._call_of else node

    def _add(self, message: Message, parent: int | None, number: int, place: _Place) -> int:
        self._roots.append(place.root)
        return self.draft.add(message, parent, [number], links=tuple(place.links))


def _agent(line: Mapping[str, Any]) -> tuple[bool, str]:
    return line.get("isSidechain") is True, string(line.get("agentId"))


def _parent(line: Mapping[str, Any]) -> str | None:
    return name_or_none(line.get("parentUuid"))


def _attached(attachment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an attachment shows the model: a queued message as it is, all else as the harness's reminder."""
    kind = string(attachment.get("type"))
    if kind == "queued_command":
        return {"content": attachment.get("prompt")}
    texts = [text for name in SHOWN for text in _texts(attachment.get(name))]
    name = name_or_none(*(attachment.get(name) for name in NAMED))
    if not texts and name is None:
        return {}
    head = kind if name is None else f"{kind} {name}"
    return {"content": "\n".join(["<system-reminder>", head, *texts, "</system-reminder>"])}


def _texts(value: Any) -> list[str]:
    """All texts in a value, but for what only says which kind it is of."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() if name != "type" for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) and value.strip() else []


def _merge(blocks: list[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> None:
    """Add blocks of the same message. A prefix of a text gives way to the longer one; so does a repeated call."""
    for block in added:
        place = next((place for place, known in enumerate(blocks) if _is_same(known, block)), None)
        if place is None:
            blocks.append(block)
        elif len(_body(block)) > len(_body(blocks[place])):
            blocks[place] = block


def _is_same(known: Mapping[str, Any], block: Mapping[str, Any]) -> bool:
    if known.get("type") != block.get("type"):
        return False
    if block.get("type") == "tool_use":
        return known.get("id") == block.get("id")
    return _body(known).startswith(_body(block)) or _body(block).startswith(_body(known))


def _body(block: Mapping[str, Any]) -> str:
    is_call = block.get("type") == "tool_use"
    return json_text(block.get("input") if is_call else block.get("thinking", block.get("text")))


FORMAT = Log("claude-code", _marks, Reader)
