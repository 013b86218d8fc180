"""Whether hints' teacher still knows better: it is played with a hint in its prompt, and what comes of it is watched.

A teacher that moves may fall with the policy that it teaches while every other number looks healthy: each goes on to
agree with the other, and where nothing is called any more no call fails. What it does itself tells.
"""

from collections import deque
from contextvars import ContextVar
from typing import Any

from composer_prime.metrics import HINTS_TEACHER_HEEDS, read_tape

NUM_PROBES = 8
"""Rollouts of the hinted teacher a training step, and of how many last hints."""
WINDOW = 5
"""Steps that are taken together."""
LEAST = 0.1
"""A share that shows that the teacher knows something; one that never had it can't lose it."""
LOST = 1 / 3
"""The part of its best share below which the teacher has collapsed."""

PROBING: ContextVar[bool] = ContextVar("probing", default=False)
"""True where the teacher is played: nothing is stamped on such a rollout."""


class CollapseAlarm:
    """Goes off when the share of hints that the teacher heeds falls below LOST times the best there was.

    best, mean  shares over WINDOW steps: the highest one, and the last one
    """

    def __init__(self) -> None:
        self.best = self.mean = 0.0
        self.has_gone_off = False
        self._shares: deque[float] = deque(maxlen=WINDOW)

    @classmethod
    def from_tape(cls, path: Any) -> "CollapseAlarm":
        """As an orchestrator's tape left it: one that has gone off stays so after a resume."""
        alarm = cls()
        for record in read_tape(path):
            if HINTS_TEACHER_HEEDS in record:
                alarm.add(record[HINTS_TEACHER_HEEDS])
        return alarm

    def add(self, share: float) -> None:
        """Take in one step's probes."""
        self._shares.append(share)
        if len(self._shares) == WINDOW:
            self.mean = sum(self._shares) / WINDOW
            self.best = max(self.best, self.mean)
            self.has_gone_off |= self.best >= LEAST and self.mean < LOST * self.best

    def __str__(self) -> str:
        return (
            f"the hinted teacher's own first calls succeeded in a share of {self.mean:.3f} over {WINDOW} steps, below "
            f"a third of its best ({self.best:.3f}): it has collapsed, and hints teach no more in this run; begin anew "
            'with hints.teacher = "frozen"'
        )


def hinted_prompt(prompt: Any, hint: str) -> Any:
    """A task's prompt, text or messages, with the hint at its end; None where its end is no text."""
    if isinstance(prompt, str):
        return prompt + hint
    if not prompt or not isinstance(prompt[-1].content, str):
        return None
    return [*prompt[:-1], prompt[-1].model_copy(update={"content": prompt[-1].content + hint})]
