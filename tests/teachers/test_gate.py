"""When a teacher is heard: rollouts and probes are drawn from known chances, so that what is right is known too."""

import json
import logging
import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from composer_prime.teachers.gate import FEWEST, MOST_FIRST, PROBE_SHARE, Gate

GROUP, BATCH, STEPS = 8, 64, 60

Chance = Callable[[int], float]


def run(
    seed: int,
    policy: Chance,
    teacher: Chance,
    *,
    steps: int = STEPS,
    reward: Callable[[bool], float] = float,
    failing_only: bool = True,
    gate: Gate | None = None,
) -> tuple[Gate, list[float]]:
    """A run: by step the chances that the policy and the teacher earn the reward; the weight after each step.

    failing_only   the teacher has a turn in those rollouts alone that failed, as hints do
    """
    draw = random.Random(seed)
    gate = gate or Gate("t", planned=steps * BATCH)
    weights = []
    for step in range(steps):
        for task in range(step * GROUP, (step + 1) * GROUP):
            easier = draw.choice((-1, 1)) * min(policy(step), 1 - policy(step)) / 2  # tasks differ
            for _ in range(BATCH // GROUP):
                succeeded = draw.random() < policy(step) + easier
                is_taught = not (succeeded and failing_only)
                gate.saw(task, reward(succeeded), is_taught=is_taught)
                if is_taught and gate.may_probe():
                    chance = teacher(step) if teacher(step) in (0, 1) else teacher(step) + easier
                    gate.played(reward(draw.random() < chance))
        weights.append(gate.weight)
    return gate, weights


def test_a_teacher_that_is_better_is_heard_from_the_first_step_on() -> None:
    for seed in range(20):
        _, weights = run(seed, lambda step: 0.05, lambda step: 0.6)
        assert min(weights[:5]) > 0.5, seed


def test_hints_of_a_teacher_that_is_not_heard_are_wanted_where_a_probe_is_due_and_hardly_else() -> None:
    gate, draw = Gate("t", planned=STEPS * BATCH), random.Random(0)
    wanted, probed = 0, 0
    for rollout in range(STEPS * BATCH):
        wants = gate.wants_hints()
        is_taught = draw.random() < 0.5
        gate.saw(rollout // GROUP, float(not is_taught), is_taught=is_taught)
        wanted += wants and is_taught
        if is_taught and gate.may_probe():
            assert wants or gate.num_probes <= MOST_FIRST, rollout
            gate.played(0.0)
            probed += 1
    assert gate.weight == 0 and probed > 100 and wanted <= 1.2 * probed


def test_one_that_is_worse_is_never_heard() -> None:
    for seed in range(50):
        _, weights = run(seed, lambda step: 0.8, lambda step: 0.15)
        assert max(weights) == 0, seed
        _, weights = run(seed, lambda step: 0.1, lambda step: 0)
        assert max(weights) == 0, seed


def test_one_that_is_as_good_is_hardly_heard_though_its_tasks_are_chosen_by_the_policys_failures() -> None:
    """The mean weight over the run is below a hundredth where no difference is, at any level."""
    for level in (0.2, 0.5, 0.8):
        chance = partial(lambda level, step: level, level)
        runs = [run(seed, chance, chance) for seed in range(40)]
        assert sum(sum(weights) / STEPS for _, weights in runs) / len(runs) < 0.01
        better = [gate.better for gate, _ in runs]
        assert abs(sum(better) / len(better)) < 0.06, "the rollout that was chosen counts on no side"


def test_it_lets_go_as_the_policy_catches_up_and_comes_back_when_it_falls() -> None:
    for seed in range(10):
        _, weights = run(seed, lambda step: min(step / 20, 0.95) if step < 40 else 0.1, lambda step: 0.9)
        assert min(weights[2:6]) > 0.5 and max(weights[22:40]) < 0.2 and weights[50] > 0.5, seed
        assert sum(weights[22:40]) / 18 < 0.02


def test_nobody_is_heard_before_enough_probes_were_played() -> None:
    gate = Gate("t", planned=10_000)
    for _ in range(FEWEST - 1):
        gate.saw(0, 0.0)
        assert gate.may_probe()
        gate.played(1.0)
    assert gate.weight == 0 and math.isnan(gate.better)
    gate.saw(0, 0.0)
    gate.played(1.0)
    assert gate.weight == 1 and gate.better == 1


def test_without_any_reward_it_is_heard_and_says_that_it_can_not_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, weights = run(0, lambda step: 0, lambda step: 0)
        assert set(weights) == {1.0}
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("teacher=t can't be compared yet, since every reward is 0: weight=1.00 probes=3")


def test_a_run_too_short_to_compare_is_taught_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gate = Gate("t", planned=128)
        gate.saw(0, 1.0)
        assert gate.weight == 1 and "5% of 128 rollouts are too few" in caplog.text


@pytest.mark.parametrize("planned", [0, STEPS * BATCH, 100 * BATCH * STEPS])
def test_probes_are_at_most_a_twentieth_of_the_rollouts_and_half_of_that_before_the_first_step(planned: int) -> None:
    gate = Gate("t", planned)
    steps = STEPS if planned else 2 * STEPS
    before = sum(gate.may_probe() for _ in range(1000))
    assert before <= min(planned * PROBE_SHARE / 2, MOST_FIRST)
    for _ in range(steps * BATCH):
        gate.saw(0, 0.0)
        while gate.may_probe():
            pass
    assert gate.num_probes <= PROBE_SHARE * max(planned, steps * BATCH)
    if planned != 100 * BATCH * STEPS:
        assert gate.num_probes >= 0.95 * PROBE_SHARE * steps * BATCH, "what is allowed is used"


def test_rewards_of_another_scale_give_the_same_verdicts() -> None:
    plain, scaled = (
        run(3, lambda step: step / 80, lambda step: 0.7, reward=reward)
        for reward in (float, lambda succeeded: 1e3 * succeeded - 7)
    )
    assert plain[1] == scaled[1] and len(set(plain[1])) > 3


def test_a_teacher_that_can_not_play_is_judged_by_what_it_gives_to_what_earned_a_reward() -> None:
    for sign, expected in ((1, 1.0), (-1, 0.0), (0, 0.0)):
        gate, draw = Gate("t", planned=10_000), random.Random(0)
        gate.can_play = False
        for step in range(160):
            earned = float(draw.random() < 0.5)
            gate.saw(step // 8, earned, margin=draw.gauss(sign * earned, 0.5))
        assert gate.weight == expected and not gate.may_probe()


def test_a_weight_is_that_share_of_its_turns() -> None:
    runs = (run(seed, lambda step: 0.5, lambda step: 0.85, steps=20)[0] for seed in range(50))
    gate = next(gate for gate in runs if 0.1 < gate.weight < 0.9)
    heard = [gate.is_heard() for _ in range(100)]
    assert abs(sum(heard) - 100 * gate.weight) <= 1 and abs(sum(heard[:50]) - 50 * gate.weight) <= 1


def test_a_resumed_gate_goes_on_with_its_probes_and_what_they_cost() -> None:
    gate, _ = run(1, lambda step: 0.1, lambda step: 0.9, steps=30, gate=Gate("t", STEPS * BATCH))
    again = Gate("t", STEPS * BATCH)
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.num_probes == gate.num_probes > MOST_FIRST
    run(2, lambda step: 0.1, lambda step: 0.9, steps=30, gate=again)
    assert again.num_probes <= PROBE_SHARE * STEPS * BATCH
    again.saw(0, 0.0)
    again.saw(0, 0.0)
    assert again.weight > 0.9
