"""Logs of requests that repeat their history: what two requests share is one path of the tree."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_prime.traces.ingest.session import Draft
from composer_prime.traces.states import Message, digest


@dataclass
class RequestTree:
    """Adds requests and what came of them to a draft."""

    draft: Draft
    _places: dict[tuple[int | None, str], int] = field(default_factory=dict)

    def follow(self, messages: Iterable[Message], record: int) -> int | None:
        """The node at the end of a request's messages. Those that are new are added, assistant's ones as copies."""
        at: int | None = None
        for message in messages:
            key = (at, _key(message))
            if key not in self._places:
                self._places[key] = self.draft.add(message, at, [record], is_copied=message["role"] == "assistant")
            at = self._places[key]
        return at

    def act(self, message: Message, at: int | None, record: int, **more: Any) -> int:
        """Add what a model answered after the node `at`; later requests find it there."""
        node = self.draft.add(message, at, [record], **more)
        self._places.setdefault((at, _key(message)), node)
        return node


def _key(message: Message) -> str:
    """Requests may show a message without its thinking."""
    return digest({name: value for name, value in message.items() if name != "reasoning_content"})
