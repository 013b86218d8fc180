"""Group advantages (GRPO) and the filter for groups that teach nothing. Pure numbers, no verifiers, no torch.

A group is the rollouts of one prompt; its mean reward is the baseline that each of them is measured against.
"""

from collections.abc import Sequence


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
