"""Whether a teacher is better than the policy where it teaches, and on what share of its turns it is heard.

Both are compared by rewards: of *probes*, rollouts in which the teacher took over at a turn that it would teach, or at
all, with those of the policy's own rollouts of such tasks. What counts is who earns more, not how much, so that
rewards of any scale will do.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

PROBE_SHARE = 0.05
"""Of a run's rollouts, the most that all probes may come to; half of it at the beginning."""
MOST_FIRST = 32
"""Probes before the first taught step, at most."""
FEWEST = 8
"""Probes without which nothing is known."""
FEWEST_KEPT = 16
"""Probes that are compared also where they are old."""
KEPT_ROLLOUTS = 128
PROBE_ROLLOUTS = 640
"""The newest rollouts are compared, and the probes that were played within so many: a teacher's chances move slowly,
the policy's with each step."""
NOISE = 2.0
"""Standard errors by which a teacher must be better."""
HEARD = 0.25
"""By so much of `better` beyond the noise a teacher is heard at all its turns."""


class Share:
    """Takes a share of what comes, evenly."""

    def __init__(self) -> None:
        self._owed = 0.0

    def takes(self, share: float) -> bool:
        """Whether the next one is taken, of which a share from 0 to 1 is wanted now."""
        self._owed += share
        taken = self._owed >= 1
        self._owed -= taken
        return taken


class Gate:
    """One teacher of one environment. It is shut until it knows.

    name       of the teacher
    planned    rollouts of the run in this environment; 0: not known, then probes are paid for by rollouts seen
    share      of the rollouts that its probes may cost: `PROBE_SHARE`, or a part of it where there are more teachers
    can_play   False where it gives no text, or its probes fail: it is then judged by whether it gives more to what
               earned a reward than the policy does, beside what earned less
    """

    def __init__(self, name: str, planned: int = 0, share: float = PROBE_SHARE) -> None:
        self.name, self._planned, self._share = name, planned, share
        self.can_play = True
        self._better, self._weight, self._is_new = math.nan, 0.0, False
        self.num_rollouts = self.num_probes = 0
        self._probes: deque[tuple[int, float]] = deque(maxlen=PROBE_ROLLOUTS)  # when, in rollouts; what it earned
        self._rollouts: deque[_Rollout] = deque(maxlen=KEPT_ROLLOUTS)
        self._rewards = (math.inf, -math.inf)  # the lowest and the highest that there were
        self._said = ""
        self._due, self._heard = 0.0, Share()
        self._num_failed = 0

    def saw(self, task: Hashable, reward: float, *, is_taught: bool = True, margin: float = math.nan) -> None:
        """Take in a rollout of the policy's.

        is_taught   the teacher has a turn in it, or could have
        margin      nats a token that it gives more than the policy to what was said; read where it can't play
        """
        self.num_rollouts += 1
        if not math.isfinite(reward):
            return
        self._rollouts.append(_Rollout(task, reward, is_taught, margin))
        self._take(reward)

    @property
    def weight(self) -> float:
        """The share of its turns at which the teacher is heard, 0 to 1."""
        self._judge()
        return self._weight

    @property
    def better(self) -> float:
        """The share of comparisons that the teacher wins minus that which it loses, -1 to 1; NaN: not known."""
        self._judge()
        return self._better

    def may_probe(self) -> bool:
        """Whether a probe may be played of the rollout that was just seen, in which the teacher has a turn; it then
        counts. Beyond the first ones every so many of such rollouts have one, so that no task is preferred."""
        self._due = self._next_due()
        is_allowed = self._may_play(self._due, self.num_rollouts)
        if is_allowed:
            self._due = max(self._due - 1, 0.0)
        self.num_probes += is_allowed
        return is_allowed

    def wants_hints(self) -> bool:
        """Whether the next rollout's hints can come to anything: the teacher is heard, or a probe may be due."""
        return self._is_short or self.weight > 0 or self._may_play(self._next_due(), self.num_rollouts + 1)

    def is_poor(self, reward: float) -> bool:
        """Whether a rollout earned less than another did, or nothing where none did."""
        return reward < self._rewards[1] or max(reward, self._rewards[1]) <= 0

    def played(self, reward: float) -> None:
        """Take in what a probe earned."""
        self._probes.append((self.num_rollouts, reward))
        self._take(reward)

    def failed(self) -> None:
        """Take in that a probe came to nothing."""
        self._num_failed += 1
        self.can_play &= self._num_failed < FEWEST or bool(self._probes)
        self._is_new = True

    def is_heard(self) -> bool:
        """Whether the teacher is heard at the next of its turns: at a share of `weight` of them, evenly."""
        return self._heard.takes(self.weight)

    def state_dict(self) -> dict[str, Any]:
        """What goes on after a resume, as JSON has it."""
        return {
            "num_rollouts": self.num_rollouts, "num_probes": self.num_probes, "probes": list(self._probes),
            "rewards": list(self._rewards) if self.num_rollouts else None,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.num_rollouts, self.num_probes = state["num_rollouts"], state["num_probes"]
        self._probes.extend((int(at), reward) for at, reward in state["probes"])
        self._rewards = tuple(state["rewards"] or self._rewards)

    def _take(self, reward: float) -> None:
        self._rewards = min(reward, self._rewards[0]), max(reward, self._rewards[1])
        self._is_new = True

    def _judge(self) -> None:
        if not self._is_new:
            return
        self._is_new = False
        if self._is_short:
            self._weight = 1.0
            self._say(f"can't be compared, since {PROBE_SHARE:.0%} of {self._planned} rollouts are too few")
        elif self.can_play and len(self._probes) < FEWEST:
            self._weight = 0.0
        elif self._rewards[0] == self._rewards[1]:
            self._weight = 1.0
            self._say(f"can't be compared yet, since every reward is {self._rewards[0]:g}")
        elif not self.can_play and all(math.isnan(each.margin) for each in self._rollouts):
            self._weight = 1.0
            self._say("can't be compared, since its probes fail")
        elif self.can_play:
            self._weigh(self._compare(), "is better than the policy where it teaches")
        else:
            self._weigh(self._compare_margins(), "gives more than the policy to what earned a reward")

    def _weigh(self, found: tuple[float, float], what: str) -> None:
        self._better, noise = found
        margin = self._better - NOISE * noise
        self._weight = min(max(margin / HEARD, 0.0), 1.0) if margin == margin else 0.0
        self._say(f"{what}: {'yes' if margin > 0 else 'no'} ({self._better:+.2f}, noise {noise:.2f})")

    @property
    def _first(self) -> float:
        """Probes of the beginning."""
        return min(self._share * self._planned / 2, MOST_FIRST)

    @property
    def _later(self) -> float:
        """The share of rollouts that is left for others."""
        return self._share - (self._first / self._planned if self._planned else 0)

    def _next_due(self) -> float:
        taught = sum(each.is_taught for each in self._rollouts) / max(len(self._rollouts), 1)
        return self._due + (min(self._later / taught, 1.0) if taught else 1.0)

    def _may_play(self, due: float, num_rollouts: int) -> bool:
        is_due = self.num_probes < self._first or due >= 1
        is_allowed = self.num_probes + 1 <= self._first + self._later * num_rollouts
        return self.can_play and not self._is_short and is_due and is_allowed

    @property
    def _is_short(self) -> bool:
        return 0 < self._share * self._planned < FEWEST

    def _say(self, what: str) -> None:
        verdict = what.partition("(")[0]
        if verdict != self._said:
            self._said = verdict
            logger.warning("teacher=%s %s: weight=%.2f probes=%d", self.name, what, self._weight, self.num_probes)

    def _compare(self) -> tuple[float, float]:
        """`better`, and its standard error: of probes, and of the policy's tasks, which are drawn in groups."""
        groups = self._groups()
        probes = np.array([reward for _, reward in self._fresh()])
        values = np.concatenate([rewards for rewards, _ in groups])
        weights = np.concatenate([shares for _, shares in groups])
        weights = weights / weights.sum()
        wins = np.sign(probes[:, None] - values[None, :])
        better = float((wins @ weights).mean())
        ends = np.cumsum([0, *(len(rewards) for rewards, _ in groups)])
        by_group = [(weights[a:b] * (wins[:, a:b].mean(0) - better)).sum() for a, b in pairwise(ends)]
        of_groups = float(np.square(by_group).sum()) * len(groups) / max(len(groups) - 1, 1)
        of_probes = float(np.var(wins @ weights, ddof=1)) / len(probes)
        return better, math.sqrt(of_probes + of_groups + 1 / (4 * len(probes) ** 2))

    def _fresh(self) -> list[tuple[int, float]]:
        """The probes that count; of old ones as many as are needed."""
        since = self.num_rollouts - PROBE_ROLLOUTS
        fresh = [probe for probe in self._probes if probe[0] >= since]
        return fresh if len(fresh) >= FEWEST_KEPT else list(self._probes)[-FEWEST_KEPT:]

    def _groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The policy's rewards by task, each with its weight: of the rollouts beside one that the teacher would teach,
        since that one was chosen for what it did. Tasks that were played once stand beside all others."""
        groups = []
        for rollouts in self._by_task():
            taught = np.array([each.is_taught for each in rollouts], float)
            if len(rollouts) > 1 and taught.any():
                shares = (taught.sum() - taught) / (len(rollouts) - 1)
                groups.append((np.array([each.reward for each in rollouts]), shares))
        return groups or [(np.array([each.reward for each in self._rollouts]), np.ones(len(self._rollouts)))]

    def _compare_margins(self) -> tuple[float, float]:
        """The same of a teacher that can't play: in how many of a task's pairs of rollouts that earned more and less it
        gives more to the first. NaN with fewer than FEWEST such tasks."""
        shares = []
        for rollouts in self._by_task():
            rewards, margins = (np.array([each[field] for each in rollouts]) for field in (1, 3))
            signs = np.sign(rewards[:, None] - rewards) * np.sign(margins[:, None] - margins)
            if (rewards != rewards[0]).any() and not np.isnan(margins).any():
                shares.append(float(signs.sum() / np.count_nonzero(rewards[:, None] - rewards)))
        if len(shares) < FEWEST:
            return math.nan, math.nan
        return float(np.mean(shares)), math.sqrt(np.var(shares, ddof=1) / len(shares) + 1 / (4 * len(shares) ** 2))

    def _by_task(self) -> list[list["_Rollout"]]:
        """The rollouts of each task; all together where each task was played once."""
        found: dict[Hashable, list[_Rollout]] = defaultdict(list)
        for each in self._rollouts:
            found[each.task].append(each)
        return [list(self._rollouts)] if len(found) == len(self._rollouts) else list(found.values())


class _Rollout(NamedTuple):
    task: Hashable
    reward: float
    is_taught: bool
    margin: float
