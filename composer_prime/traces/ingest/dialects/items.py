"""Items of OpenAI's Responses, folded into messages: reasoning, text and calls of one response are one message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.messages import ROLES, assistant, content_text, json_text, plain, tool_call
from composer_prime.traces.ingest.records import mapping, string
from composer_prime.traces.ingest.session import ORPHAN_RESULT, Draft

OTHER_ITEM = "item that is no message"
UNFINISHED = "unfinished response"
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")
ITEMS = ("message", "reasoning", *CALLS, *OUTPUTS)


@dataclass
class ItemFold:
    """Adds items to a draft's branch.

    author     model of the calls that come
    is_copied  whether what comes is context that was written elsewhere
    usage      of the response that is being folded
    records    that it came from
    """

    draft: Draft
    author: str | None = None
    is_copied: bool = False
    usage: Mapping[str, Any] | None = None
    records: list[int] = field(default_factory=list)
    _goes_on: bool = False
    _texts: list[str] = field(default_factory=list)
    _thinking: list[str] = field(default_factory=list)
    _calls: list[Mapping[str, Any]] = field(default_factory=list)

    def take(self, item: Any, *records: int) -> str | None:
        """Add an item that came from these records. Why it is dropped, if it is."""
        given = mapping(item)
        kind = given.get("type", "message" if "role" in given else None)
        if kind == "message" and string(given.get("role")) in ROLES:
            return self._take_message(given, records)
        if kind == "reasoning":
            self._thinking += [content_text(given[name]) for name in ("summary", "content") if given.get(name)]
        elif kind in CALLS:
            is_free = kind == "custom_tool_call"
            body = {"input": given.get("input")} if is_free else given.get("arguments", given.get("action"))
            call_id = given.get("call_id", given.get("id"))
            name = given.get("name", "tool_search" if kind == "tool_search_call" else "shell")
            self._calls.append(tool_call(call_id, name, body))
        elif kind in OUTPUTS:
            return self._take_output(given, records)
        else:
            self._goes_on = string(kind).endswith("_call")  # the provider's own tool: the same response follows
            return OTHER_ITEM
        self.records += records
        return None

    def end_turn(self) -> None:
        """End the response that is being folded, if there is one."""
        if self.is_open:
            message = assistant("\n".join(self._texts), self._calls, "\n".join(self._thinking))
            more = {"author": self.author, "is_copied": self.is_copied, "usage": self.usage}
            self.draft.append(message, *self.records, **more)
            self._texts, self._thinking, self._calls, self.records, self.usage = [], [], [], [], None
            self._goes_on = False

    def finish(self, fates: dict[int, str]) -> None:
        """End the last response. Records that belong to none, such as reasoning that nothing followed, get a fate."""
        self.end_turn()
        fates |= dict.fromkeys(self.records, UNFINISHED)

    @property
    def is_open(self) -> bool:
        """Whether a response is being folded."""
        return bool(self._texts or self._thinking or self._calls)

    def _take_message(self, given: Mapping[str, Any], records: Sequence[int]) -> None:
        if given["role"] == "assistant":
            if (self._texts or self._calls) and not self._goes_on:
                self.end_turn()
            self._goes_on = False
            self._texts.append(content_text(given.get("content")))
            self.records += records
            return
        self.end_turn()
        self.draft.append(plain(ROLES[given["role"]], given.get("content")), *records)

    def _take_output(self, given: Mapping[str, Any], records: Sequence[int]) -> str | None:
        call_id, output = string(given.get("call_id")), given.get("output", given.get("tools"))
        said = output.get("content", json_text(output)) if isinstance(output, dict) else output
        if self.is_open and not any(call["id"] == call_id for call in self._calls):
            return ORPHAN_RESULT
        self.end_turn()
        return self.draft.answer(call_id, said, *records)
