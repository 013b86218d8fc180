"""Advantages, the zero-advantage filter, samples and task order, against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from composer_prime.sites.embedded.rollouts import Branch, Group, Rollout
from composer_prime.sites.embedded.samples import TaskOrder, group_advantages, has_signal, make_samples


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 0.0], [0.5, -0.5]),
        ([2.0, 1.0, 0.0], [1.0, 0.0, -1.0]),
        ([0.3], [0.0]),
        ([], []),
    ],
)
def test_an_advantage_is_the_reward_minus_the_groups_mean(rewards: list[float], advantages: list[float]) -> None:
    assert group_advantages(rewards) == advantages


def test_equal_rewards_give_exact_zeros_where_their_mean_is_rounded() -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1
    assert group_advantages(rewards) == [0.0] * 3
    assert not has_signal(group_advantages(rewards))
    assert has_signal(group_advantages([0.1, 0.1, 0.2]))


def group(*rewards: float, version: int = 5) -> Group:
    """A group whose rollouts have one branch each: two prompt tokens, two sampled ones."""
    branch = Branch([7, 8, 9, 10], [False, False, True, True], [0.0, 0.0, -0.5, -1.5])
    return Group("letters", version, tuple(Rollout(reward, (branch,)) for reward in rewards), failures=())


def test_a_sample_carries_the_rollouts_numbers_on_its_sampled_tokens() -> None:
    first, second = make_samples([group(1.0, 0.0)], temperature=0.7, filter_zero_advantages=True)
    assert first.token_ids == [7, 8, 9, 10]
    assert first.mask == [False, False, True, True]
    assert first.logprobs == [0.0, 0.0, -0.5, -1.5]
    assert first.temperatures == [0.7] * 4
    assert first.advantages == [0.0, 0.0, 0.5, 0.5]
    assert second.advantages == [0.0, 0.0, -0.5, -0.5]
    assert (first.env_name, first.reward, first.policy_version, first.ref_logprobs) == ("letters", 1.0, 5, None)


def test_groups_that_teach_nothing_are_left_out_only_when_asked() -> None:
    groups = [group(1.0, 1.0), group(0.0, 0.0), group(0.0, 1.0), group(1.0)]
    assert [s.reward for s in make_samples(groups, temperature=1.0, filter_zero_advantages=True)] == [0.0, 1.0]
    assert len(make_samples(groups, temperature=1.0, filter_zero_advantages=False)) == 7


def test_what_a_teacher_has_a_word_on_is_kept_where_rewards_are_equal() -> None:
    candidates = np.ones((4, 2, 8), np.int32)
    plain = group(0.0).rollouts[0]
    (branch,) = plain.branches
    taught = dataclasses.replace(plain, branches=(dataclasses.replace(branch, candidates=candidates), branch))
    groups = [Group("letters", 5, (taught, plain), failures=())]
    (sample,) = make_samples(groups, temperature=1.0, filter_zero_advantages=True)
    assert sample.candidates is candidates and sample.advantages == [0.0] * 4


def test_every_branch_of_a_rollout_becomes_a_sample_with_the_rollouts_advantage() -> None:
    short, long = Branch([1], [True], [-1.0]), Branch([1, 2], [True, True], [-1.0, -2.0], ref_logprobs=[-3.0, -4.0])
    two = Group("letters", 0, (Rollout(1.0, (short, long)), Rollout(0.0, ())), failures=("OSError: gone",))
    samples = make_samples([two], temperature=1.0, filter_zero_advantages=True)
    assert [sample.advantages for sample in samples] == [[0.5], [0.5, 0.5]]
    assert [sample.ref_logprobs for sample in samples] == [None, [-3.0, -4.0]]


def test_sources_take_turns_and_no_task_comes_twice_in_a_pass() -> None:
    drawn = TaskOrder([3, 2], "seed").draw(12)
    assert [source for source, _ in drawn] == [0, 1] * 6
    first, second = ([task for source, task in drawn if source == chosen] for chosen in (0, 1))
    assert sorted(first[:3]) == sorted(first[3:]) == [0, 1, 2]
    assert [sorted(second[i : i + 2]) for i in (0, 2, 4)] == [[0, 1]] * 3


def test_the_order_is_a_function_of_the_seed_however_it_is_drawn() -> None:
    order = TaskOrder([100], "one")
    assert TaskOrder([100], "one").draw(8) == order.draw(3) + order.draw(5)
    assert TaskOrder([100], "one").draw(8) != TaskOrder([100], "two").draw(8)
