"""Stored actions in the policy's tokens: what it would have sampled after the prompt, and what a server says of it."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.errors import TeacherError
from composer_prime.teachers.served import ServedModel
from composer_prime.traces.states import Message, Tool

CUT = "[cut]"
"""Stands for the result of a tool that a sample has no place for."""


@dataclass(frozen=True)
class Action:
    """An assistant's message after what it saw, as the policy's renderer writes it.

    token_ids  of the prompt and of the message
    mask       True on what the policy would have sampled
    """

    token_ids: list[int]
    mask: list[bool]

    @property
    def num_tokens(self) -> int:
        """Tokens of the message."""
        return sum(self.mask)


class Encoder:
    """Writes stored actions in the policy's tokens."""

    def __init__(self, renderer: Any, seq_len: int) -> None:
        self._renderer = renderer
        self._seq_len = seq_len

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool], action: Message) -> Action | None:
        """None where it is longer than a sample may be, or nothing in it is the policy's to say."""
        from renderers import build_training_sample

        whole = [*map(dict, messages), {name: value for name, value in action.items() if name != "reasoning_content"}]
        sample = build_training_sample(
            self._renderer,
            whole,  # type: ignore[arg-type]
            tools=list(tools) or None,  # type: ignore[arg-type]
            message_loss_mask=[0] * len(messages) + [1],
            ensure_final_stop=True,
        )
        prompt = self._renderer.render_ids(whole[:-1], tools=list(tools) or None, add_generation_prompt=True)
        start = num_equal(prompt, sample.token_ids)  # a template may begin the answer itself
        ours = [place for place, is_ours in enumerate(sample.loss_mask) if is_ours and place >= start]
        if not ours or ours[-1] >= self._seq_len:
            return None
        token_ids, places = list(map(int, sample.token_ids[: ours[-1] + 1])), frozenset(ours)
        return Action(token_ids, [place in places for place in range(len(token_ids))])

    def fit_all(
        self, messages: Sequence[Message], tools: Sequence[Tool], actions: Sequence[Message], *, may_cut: bool
    ) -> tuple[list[Action] | None, int]:
        """Actions at one point, with so many of the oldest tool results cut as it takes until all fit, and that number;
        None where cutting isn't enough."""
        most = sum(message["role"] == "tool" for message in messages) if may_cut else 0
        if (found := self._encode_all(messages, tools, actions)) is not None or not most:
            return found, 0

        def fits(count: int) -> list[Action] | None:
            return self._encode_all(cut_oldest(messages, count), tools, actions)

        if fits(most) is None:
            return None, 0
        fewest = bisect_left(range(most), True, lo=1, key=lambda count: fits(count) is not None)
        return fits(fewest), fewest

    def _encode_all(
        self, messages: Sequence[Message], tools: Sequence[Tool], actions: Sequence[Message]
    ) -> list[Action] | None:
        encoded: list[Action] = []
        for action in actions:
            if (one := self.encode(messages, tools, action)) is None:
                return None
            encoded.append(one)
        return encoded


def cut_oldest(messages: Sequence[Message], count: int) -> list[Message]:
    """The messages, so many of the oldest tool results cut."""
    places = [place for place, message in enumerate(messages) if message["role"] == "tool"][:count]
    return [{**message, "content": CUT} if place in places else message for place, message in enumerate(messages)]


async def scores(server: ServedModel, action: Action) -> list[float]:
    """Logprobs in nats of an action's own tokens. Raises TeacherError when one is missing."""
    given = (await server.scores(action.token_ids)).logprobs
    found = [logprob for logprob, is_ours in zip(given, action.mask, strict=True) if is_ours]
    if not all(map(math.isfinite, found)):
        raise TeacherError(f"{server.base_url} gave no logprob for some tokens: look for NaN in the weights")
    return found


def num_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
