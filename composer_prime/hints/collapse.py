"""Whether hints' teacher still knows better: it is played with a hint in its prompt, and its first call is looked at.

A teacher that moves may fall with the policy that it teaches while every other number looks healthy. Each goes on to
agree with the other, and a policy that calls no tool has no call that fails.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from composer_prime.metrics import HINTS_PROBES, HINTS_TEACHER_FIRST_CALL

NUM_PROBES = 8
"""Tasks at which the teacher is played each training step: the first ones whose first turn failed, so that one step
compares with another."""
WINDOW = 64
"""Rollouts that are judged together."""
LEAST = 0.5
"""The best share must be at least this: below it a fall is within chance."""
LOST = 0.2
"""The part of its best share below which the teacher has collapsed."""

PROBING: ContextVar[bool] = ContextVar("probing", default=False)
"""True where the teacher is played: nothing is stamped on such a rollout."""


class CollapseAlarm:
    """Goes off when the share of first calls that succeed falls below LOST times the best there was.

    best, share  over WINDOW rollouts: the highest there was, and the last one
    """

    def __init__(self) -> None:
        self.best = self.share = 0.0
        self.has_gone_off = False
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)

    @classmethod
    def from_tape(cls, records: Iterable[Mapping[str, float]]) -> "CollapseAlarm":
        """As an orchestrator's tape left it: one that has gone off stays so. A step that was played again counts as it
        went last."""
        alarm = cls()
        for record in {record["step"]: record for record in records if HINTS_PROBES in record}.values():
            count = int(record[HINTS_PROBES])
            alarm.add(round(record[HINTS_TEACHER_FIRST_CALL] * count), count)
        return alarm

    def add(self, num_succeeded: int, count: int) -> None:
        """Take in one step's probes, `count` in all."""
        self._outcomes.extend([True] * num_succeeded + [False] * (count - num_succeeded))
        if len(self._outcomes) == WINDOW:
            self.share = sum(self._outcomes) / WINDOW
            self.best = max(self.best, self.share)
            self.has_gone_off |= self.best >= LEAST and self.share < LOST * self.best

    def __str__(self) -> str:
        return (
            f"of {WINDOW} rollouts of hints' teacher, played by itself with a hint, a share of {self.share:.3f} began "
            f"with a call that succeeded, below a fifth of its best ({self.best:.3f}): it has collapsed, and hints "
            'teach no more in this run; begin anew with hints.teacher = "frozen"'
        )


def hinted_prompt(prompt: Any, hint: str) -> Any:
    """A task's prompt, text or messages, with the hint at its end; None where its end is no text."""
    if isinstance(prompt, str):
        return prompt + hint
    if not prompt or not isinstance(prompt[-1].content, str):
        return None
    return [*prompt[:-1], prompt[-1].model_copy(update={"content": prompt[-1].content + hint})]
