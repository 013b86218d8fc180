"""From groups of rollouts to the trainer's samples: advantages, the zero-advantage filter, one sample a branch.

Pure: the same groups always give the same samples.
"""

from collections.abc import Iterable

from composer_prime.sites.embedded.advantages import group_advantages, has_signal
from composer_prime.sites.embedded.batches import TrainingSample
from composer_prime.sites.embedded.rollouts import Branch, Group, Rollout


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
                _sample(group, rollout, branch, advantage, temperature)
                for branch in rollout.branches
                if not is_taught_alone or branch.is_taught
            ]
    return samples


def _sample(group: Group, rollout: Rollout, branch: Branch, advantage: float, temperature: float) -> TrainingSample:
    return TrainingSample(
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
