"""A session: a tree of messages, the records that made them, and its decision points.

Branches stay branches: a node names the node before it, which comes earlier in the list. What a call saw is the path
from the root to it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from composer_prime.traces.ingest.context import in_order, stands_in
from composer_prime.traces.ingest.messages import result, tool
from composer_prime.traces.states import Message, Tool, TraceState, calls_of, digest, text_of


@dataclass(frozen=True)
class Node:
    """One message of a session.

    parent        index of the node before it; None: a branch's first
    message       with an assistant's thinking in `reasoning_content`
    records       numbers of the records that made it: stored lines of a log, or items of a document
    links         numbers of those that only say where it stands
    author        model that wrote it; None: unknown, or no model did
    is_copied     context that another call, another session or another model wrote: gives no decision point
    is_synthetic  an assistant's message that the harness wrote: gives no decision point
    usage         tokens as the format counts them
    call          the provider's name for the call; equal in every session that holds it
    """

    parent: int | None
    message: Message
    records: tuple[int, ...]
    links: tuple[int, ...] = ()
    author: str | None = None
    is_copied: bool = False
    is_synthetic: bool = False
    usage: Mapping[str, Any] | None = None
    call: str | None = None

    @property
    def is_turn(self) -> bool:
        """Whether it is an assistant's message."""
        return self.message["role"] == "assistant"

    def has_call(self, call_id: str) -> bool:
        """Whether it made the call."""
        return any(call["id"] == call_id for call in calls_of(self.message))

    @property
    def is_action(self) -> bool:
        """Whether a model did something here."""
        did = bool(text_of(self.message) or calls_of(self.message))
        return self.is_turn and did and not (self.is_copied or self.is_synthetic)

    @property
    def is_decision(self) -> bool:
        """Whether a model did something here that can be said."""
        return self.is_action and not stands_in(self.message)


@dataclass(frozen=True)
class Original:
    """Records that were kept, verbatim but for secrets: one after the other as they stand in the file `name`."""

    name: str
    text: str


@dataclass(frozen=True)
class Session:
    """One session as it is stored.

    format    name of the format that it was read from
    name      what the format calls it; None: nothing
    number    its place among the sessions of the same record
    original  what it was read from
    tools     as the format lists them, or as ingestion was given them; none: they are inferred from the calls
    system    message that ingestion was given, for a harness whose logs lack it
    reward    of the whole session; None: unknown
    cwd       its working folder, an absolute path
    """

    format: str
    name: str | None
    number: int
    original: tuple[Original, ...]
    nodes: tuple[Node, ...]
    tools: tuple[Tool, ...]
    reward: float | None = None
    system: str | None = None
    cwd: str | None = None

    @cached_property
    def id(self) -> str:
        """sha256 of what is kept, in hex; spaces around records don't count."""
        kept = [[part.name, [line.strip() for line in part.text.strip().split("\n")]] for part in self.original]
        return digest([self.format, self.number, kept])

    def states(self) -> Iterator[TraceState]:
        """The decision points, in the order of the file."""
        return (state for _, state in self.numbered_states())

    def numbered_states(self) -> Iterator[tuple[int, TraceState]]:
        """The decision points, each with the index of its node."""
        places = [index for index, node in enumerate(self.nodes) if node.is_turn]
        turns = {index: turn for turn, index in enumerate(places)}
        seen = [_seen(node) for node in self.nodes]
        inferred = InferredTools()
        for index, node in enumerate(self.nodes):
            inferred.add(node)
            if node.is_decision:
                path = path_of(self.nodes, node.parent)
                shown = in_order([message for place in path if (message := seen[place]) is not None])
                if self.system is not None and not any(message["role"] == "system" for message in shown):
                    shown = [{"role": "system", "content": self.system}, *shown]
                parent = next((turns[place] for place in reversed(path) if place in turns), None)
                tools = self.tools or inferred.tools
                about = (node.author, self.reward, bool(self.tools), self.cwd)
                yield index, TraceState(self.id, turns[index], parent, tuple(shown), tools, node.message, *about)

    def call_keys(self) -> dict[int, str]:
        """Of each decision point that has a name, by node: a key that copies of the call in other sessions share.

        The name is the provider's; without one it is the session's own with what was seen, so that a call that had
        been cut off is the same call.
        """
        chains: list[str] = []
        keys = {}
        for index, node in enumerate(self.nodes):
            seen = "" if node.parent is None else chains[node.parent]
            chains.append(digest([seen, node.message]))
            if node.is_decision and (node.call or self.name):
                keys[index] = digest(node.call or [self.name, seen])[:16]
        return keys

    def to_json(self) -> dict[str, Any]:
        """As plain values; `Session.of` reads them back."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Session":
        """The session that `to_json` wrote. Raises KeyError or TypeError where it is none."""
        original = tuple(Original(**part) for part in data["original"])
        tuples = ({name: tuple(node[name]) for name in ("records", "links")} for node in data["nodes"])
        nodes = tuple(Node(**{**node, **own}) for node, own in zip(data["nodes"], tuples, strict=True))
        return cls(**{**data, "original": original, "nodes": nodes, "tools": tuple(data["tools"])})


@dataclass
class Draft:
    """A session while a reader makes it; the format's driver adds what it was read from.

    at  the end of the branch that grows; None: the next message begins one
    """

    name: str | None = None
    nodes: list[Node] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    reward: float | None = None
    cwd: str | None = None
    at: int | None = None

    def add(self, message: Message, parent: int | None, records: Sequence[int], **more: Any) -> int:
        """Add a node, and return its index. `more` are fields of Node."""
        self.nodes.append(Node(parent, message, tuple(records), **more))
        return len(self.nodes) - 1

    def append(self, message: Message, *records: int, **more: Any) -> None:
        """Add a node at the branch's end. `more` are fields of Node."""
        self.at = self.add(message, self.at, records, **more)

    def answer(self, call_id: str, content: Any, *records: int) -> str | None:
        """Add a tool's result at the branch's end; why it can't stand there, if it can't."""
        refusal = self.refusal(self.at, call_id)
        return refusal or self.append(result(call_id, content), *records)

    def replace(self, index: int, *records: int, **fields: Any) -> None:
        """Change fields of a node, of which these records tell, too."""
        old = self.nodes[index]
        self.nodes[index] = replace(old, records=tuple(dict.fromkeys((*old.records, *records))), **fields)

    def caller(self, at: int | None, call_id: str) -> int | None:
        """The nearest node at or before `at` on its branch that made the call; None: there is none."""
        return next((place for place in _upward(self.nodes, at) if self.nodes[place].has_call(call_id)), None)

    def refusal(self, at: int | None, call_id: str) -> str | None:
        """Why a tool's result after the node `at` can't stand there; None: it answers a call of its branch."""
        for place in _upward(self.nodes, at):
            if self.nodes[place].message.get("tool_call_id") == call_id:
                return DUPLICATE_RESULT
            if self.nodes[place].has_call(call_id):
                return None
        return ORPHAN_RESULT


def _upward(nodes: Sequence[Node], at: int | None) -> Iterator[int]:
    while at is not None:
        yield at
        at = nodes[at].parent


def path_of(nodes: Sequence[Node], at: int | None) -> list[int]:
    """The nodes from the root to the node `at`, which is the last; none where it is None."""
    return list(_upward(nodes, at))[::-1]


ORPHAN_RESULT = "tool result without a call"
DUPLICATE_RESULT = "duplicate tool result"


class InferredTools:
    """The tools that calls have named so far, in order of first use, with the arguments given and their types."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, set[str]]] = {}
        self.tools: tuple[Tool, ...] = ()

    def add(self, node: Node) -> None:
        """Take in the calls of a session's next node."""
        has_new = False
        for call in calls_of(node.message):
            name = call["function"]["name"]
            has_new |= name not in self._seen
            types = self._seen.setdefault(name, {})
            for argument, value in arguments_of(call["function"]["arguments"]).items():
                kind = _JSON_TYPES.get(type(value), "null")
                has_new |= kind not in types.get(argument, ())
                types.setdefault(argument, set()).add(kind)
        if has_new:
            self.tools = tuple(_tool(name, arguments) for name, arguments in self._seen.items())


def _tool(name: str, arguments: Mapping[str, set[str]]) -> Tool:
    kinds = {argument: sorted(types) for argument, types in arguments.items()}
    properties = {argument: {"type": found[0] if len(found) == 1 else found} for argument, found in kinds.items()}
    return tool(name, "", {"type": "object", "properties": properties})


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def arguments_of(text: str) -> Mapping[str, Any]:
    """A call's arguments as an object; none where the text isn't one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _seen(node: Node) -> Message | None:
    """A message as later calls see it: without thinking; None where it holds nothing else."""
    if node.is_turn and not text_of(node.message) and not calls_of(node.message):
        return None
    return {name: value for name, value in node.message.items() if name != "reasoning_content"}
