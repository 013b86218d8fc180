"""Claude Code's sessions: JSON lines, with subagents in files of their own or among the lines.

One model call is several lines, which share the message's id and the request's. Lines name the line before them in
`parentUuid`; some of those say nothing to the model, and are stored as links. Attachments do: files, queued messages,
memory, hooks. After compaction lines are replayed: a replay of the same line is dropped, one in another tree is context
there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_prime.traces.ingest.dialects.parts import part_messages
from composer_prime.traces.ingest.messages import json_text, plain, result
from composer_prime.traces.ingest.reading import LineReader, Log
from composer_prime.traces.ingest.records import mapping, name_or_none, objects, string
from composer_prime.traces.ingest.session import DUPLICATE_RESULT, ORPHAN_RESULT
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


def _marks(value: Any) -> dict[str, bool]:
    line = mapping(value)
    return {
        "type user or assistant": line.get("type") in ("user", "assistant"),
        "a message with content": "content" in mapping(line.get("message")),
        "uuid": isinstance(line.get("uuid"), str),
        "sessionId or parentUuid": isinstance(line.get("sessionId"), str) or "parentUuid" in line,
    }


@dataclass(frozen=True)
class _Line:
    """A line that others may name as the one before them; `node` is the last that it made, None if it made none."""

    record: int
    parent: str | None
    node: int | None = None
    message: Any = None


@dataclass
class _Place:
    """Where a line stands: after which node, in the tree of which name, through which other lines."""

    node: int | None
    root: str
    links: list[int]


@dataclass
class _Call:
    """One model call while its lines come in: its node's index, what it wrote, which of its tool calls are answered,
    and the last node of what the model was shown after it."""

    node: int
    tip: int
    blocks: list[Mapping[str, Any]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)


class Reader(LineReader):
    """Reads a session's lines, its subagents' among them."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[str, _Line] = {}
        self._links: dict[str, _Line] = {}
        self._latest: dict[tuple[Any, ...], int] = {}
        self._roots: list[str] = []
        self._calls: dict[tuple[str, str], _Call] = {}
        self._call_at: dict[int, _Call] = {}
        self._known: set[str] = set()
        self._beside: set[int] = set()

    def take(self, number: int, line: Mapping[str, Any]) -> str | None:
        fate = self._take(number, line)
        if fate is not None:
            self._links[string(line.get("uuid"))] = _Line(number, _parent(line))
        return fate

    def _take(self, record: int, line: Mapping[str, Any]) -> str | None:
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
        uuid = string(line.get("uuid"))
        known = self._messages.get(uuid)
        if known and known.parent == _parent(line) and known.message == message:
            return DUPLICATE_LINE
        agent = (line.get("isSidechain") is True, string(line.get("agentId")))
        place = self._place(record, line, agent)
        if kind == "attachment":
            node: int | str = self._add_after(plain("user", message["content"]), record, place)
        else:
            add = self._add_assistant if kind == "assistant" else self._add_user
            node = add(record, line, message, place)
        if isinstance(node, str):
            return node
        self._latest[agent] = node
        self.draft.name = self.draft.name or name_or_none(line.get("sessionId"))
        self.draft.cwd = self.draft.cwd or name_or_none(line.get("cwd"))
        if uuid:
            self._messages[uuid] = _Line(record, _parent(line), node, message)
        return None

    def _place(self, record: int, line: Mapping[str, Any], agent: tuple[Any, ...]) -> _Place:
        """Up the parents to a message. If the file lacks one of them, the agent's message before stands in."""
        links: list[int] = []
        seen: set[str] = set()
        root, parent = f"record {record}", _parent(line)
        while parent is not None:
            if parent in self._messages:
                node = self._messages[parent].node
                return _Place(node, self._roots[node or 0], links)
            link = self._links.get(parent)
            if link is None or parent in seen:
                node = self._latest.get(agent)
                return _Place(node, root if node is None else self._roots[node], links)
            seen.add(parent)
            links.append(link.record)
            root, parent = f"link {parent}", link.parent
        return _Place(None, root, links)

    def _add_assistant(self, record: int, line: Mapping[str, Any], message: Mapping[str, Any], place: _Place) -> int:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content)
        name = string(message.get("id"))
        call_name = f"{name}:{string(line.get('requestId'))}" if name else None
        call = self._calls.get((call_name or f"record {record}", place.root))
        if call is None:
            node = self._add(
                {"role": "assistant"},
                self._tip(place.node),
                (),
                replace(place, links=[]),
                author=None if message.get("model") == SYNTHETIC else name_or_none(message.get("model")),
                is_copied=call_name in self._known,
                is_synthetic=message.get("model") == SYNTHETIC,
                call=call_name,
            )
            call = self._calls[call_name or f"record {record}", place.root] = _Call(node, node)
            self._call_at[node] = call
            self._known |= {call_name} if call_name else set()
        _merge(call.blocks, blocks)
        old = self.draft.nodes[call.node]
        usage = mapping(message.get("usage")) or old.usage
        self.draft.replace(
            call.node,
            message=part_messages({"role": "assistant", "content": call.blocks})[0],
            usage=usage,
            records=(*old.records, record),
            links=(*old.links, *place.links),
        )
        return call.node

    def _add_user(self, record: int, line: Mapping[str, Any], message: Mapping[str, Any], place: _Place) -> int | str:
        content = message["content"]
        blocks = [] if isinstance(content, str) else list(content)
        answers = [block for block in objects(blocks) if block.get("type") == "tool_result"]
        rest = content if isinstance(content, str) else [block for block in blocks if block not in answers]
        node: int | None = None
        fate = EMPTY
        for block in answers:
            call_id = string(block.get("tool_use_id"))
            caller = self.draft.caller(place.node, call_id)
            if caller is None:
                fate = ORPHAN_RESULT
            elif call_id in self._call_at[caller].answered:
                fate = DUPLICATE_RESULT
            else:
                call = self._call_at[caller]
                call.answered.add(call_id)
                node = call.tip = self._add(result(call_id, block.get("content")), call.tip, [record], place)
        if rest:
            after = self._tip(place.node) if node is None else node
            node = self._add(plain("user", rest), after, [record], place)
        return fate if node is None else node

    def _add_after(self, message: Message, record: int, place: _Place) -> int:
        """Add what the model is shown beside the answers to a call, or after another message."""
        call = self._call_before(place.node)
        node = self._add(message, self._tip(place.node), [record], place)
        self._beside.add(node)
        if call is not None:
            call.tip = node
        return node

    def _add(self, message: Message, parent: int | None, records: Sequence[int], place: _Place, **more: Any) -> int:
        self._roots.append(place.root)
        return self.draft.add(message, parent, records, links=tuple(place.links), **more)

    def _tip(self, node: int | None) -> int | None:
        """Where a line that names `node` continues: after all answers to a call's tools, whichever is named."""
        call = self._call_before(node)
        return call.tip if call else node

    def _call_before(self, node: int | None) -> _Call | None:
        """The call whose answers, or what is shown beside them, end with the node."""
        at = node
        while at is not None and (self.draft.nodes[at].message["role"] == "tool" or at in self._beside):
            at = self.draft.nodes[at].parent
        return None if at is None else self._call_at.get(at)


def _parent(line: Mapping[str, Any]) -> str | None:
    return name_or_none(line.get("parentUuid"))


def _attached(attachment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an attachment shows the model: a queued message as it is, all else as the harness's reminder."""
    kind = string(attachment.get("type"))
    if kind == "queued_command":
        return {"content": attachment.get("prompt")}
    texts = [text for name in SHOWN for text in _texts(attachment.get(name))]
    names = [name for name in (string(attachment.get(name)) for name in NAMED) if name]
    if not texts and not names:
        return {}
    head = " ".join([kind, *names[:1]])
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
