"""From tasks to the trainer's samples: the order of tasks, group advantages, the filter, one sample a branch.

Pure: the same seed gives the same order, the same groups the same samples. A group is the rollouts of one prompt; its
mean reward is the baseline that each of them is measured against.
"""

import random
from collections.abc import Iterable, Sequence

from composer_prime.sites.embedded.batches import TrainingSample
from composer_prime.sites.embedded.rollouts import Group


class TaskOrder:
    """An endless sequence of (source, task) indices: every source in turn, each in seeded shuffles.

    Within one pass over a source no task comes twice; after it the source is shuffled anew.

    sizes  number of tasks of every source, each at least 1.
    seed   the order is a pure function of it and of `sizes`.
    begin  how many of it were drawn before: it goes on after them.
    """

    def __init__(self, sizes: Sequence[int], seed: str, begin: int = 0) -> None:
        self._sizes = list(sizes)
        self._random = random.Random(seed)
        self._left: list[list[int]] = [[] for _ in sizes]
        self.num_drawn = 0
        self.draw(begin)

    def draw(self, count: int) -> list[tuple[int, int]]:
        """The next `count` pairs of a source's index and the index of one of its tasks."""
        return [self._next() for _ in range(count)]

    def _next(self) -> tuple[int, int]:
        source = self.num_drawn % len(self._sizes)
        self.num_drawn += 1
        if not self._left[source]:
            self._left[source] = self._random.sample(range(self._sizes[source]), self._sizes[source])
        return source, self._left[source].pop()


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the group's mean, in the same order; empty for an empty group.

    Rewards that are all equal give exact zeros, whatever rounding does to their mean.
    Source: PRIME-RL's `grpo` (no division by the standard deviation, as in Dr. GRPO, arXiv:2503.20783).
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def has_signal(advantages: Sequence[float]) -> bool:
    """Whether a group moves the policy: some advantage isn't zero."""
    return any(advantage != 0.0 for advantage in advantages)


def make_samples(groups: Iterable[Group], *, temperature: float, filter_zero_advantages: bool) -> list[TrainingSample]:
    """One sample for every branch of every rollout, groups and rollouts in the order given.

    temperature             what all tokens were sampled at.
    filter_zero_advantages  of groups whose rewards are all equal (or whose other rollouts all failed), leave out what
                            no teacher has a word on.
    """
    samples = []
    for group in groups:
        advantages = group_advantages([rollout.reward for rollout in group.rollouts])
        is_taught_alone = filter_zero_advantages and not has_signal(advantages)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            samples += [
                TrainingSample(
                    token_ids=branch.token_ids,
                    mask=branch.mask,
                    logprobs=branch.logprobs,
                    temperatures=[temperature] * len(branch.token_ids),
                    advantages=[advantage if sampled else 0.0 for sampled in branch.mask],
                    env_name=group.source,
                    reward=rollout.reward,
                    policy_version=group.policy_version,
                    ref_logprobs=branch.ref_logprobs,
                    candidates=branch.candidates,
                )
                for branch in rollout.branches
                if not is_taught_alone or branch.is_taught
            ]
    return samples
