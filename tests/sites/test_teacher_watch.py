"""What watching hints' teacher does to a site: a scripted player stands in for environments and servers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from composer_prime.config import RunPaths, SiteSettings
from composer_prime.hints.collapse import LOST, NUM_PROBES, WINDOW
from composer_prime.metrics import (
    HINTS_TEACHER_FIRST_CALL,
    HINTS_TEACHER_REWARD,
    ROLLOUT_COUNT,
    ROLLOUT_REWARD,
    read_tape,
)
from composer_prime.sites.embedded.batches import read_batch
from composer_prime.sites.embedded.inference_client import InferenceClient
from composer_prime.sites.embedded.orchestrator import Orchestrator
from composer_prime.sites.embedded.rollouts import Branch, Group, Rollout, RolloutPlayer
from composer_prime.sites.embedded.stored import load_stored
from composer_prime.sites.embedded.summary import write_summary
from composer_prime.sites.embedded.teacher_watch import TeacherWatch
from composer_prime.sites.embedded.weights import WeightsWatcher
from tests.sites.letters_site import letters_site

STEPS = WINDOW // NUM_PROBES
TEACHERS = {"frozen": {}, "ema": {"teacher": "ema"}, "live": {"teacher": "live", "allow_live": True}}


class ScriptedPlayer:
    """Students' rollouts that earn 0 and 1, and a teacher whose first calls succeed, or don't.

    shares  of those that succeed, by step; the last one stays. None: nothing is played; a text: all fail with it
    """

    def __init__(self, shares: Sequence[float | str | None] = (1.0,)) -> None:
        self.shares = list(shares)
        self.env = SimpleNamespace(is_hinting=True)
        self.sources = [SimpleNamespace(name="letters", env=self.env, tasks=[None] * 4)]
        self.asked: list[str] = []
        self.was_hinting: list[bool] = []

    async def play_group(self, source: int, task: int, size: int, policy_version: int) -> Group:
        self.was_hinting.append(self.env.is_hinting)
        branch = Branch(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -1.0])
        return Group("letters", policy_version, tuple(Rollout(float(each % 2), (branch,)) for each in range(size)), ())

    async def play_hinted(self, model: str) -> list[Rollout | str]:
        self.asked.append(model)
        share = self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]
        if not isinstance(share, float):
            return [] if share is None else [str(share)]
        branch = Branch(token_ids=[7, 8], mask=[False, True], logprobs=[0.0, -1.0])
        succeed = [float(number < share * NUM_PROBES) for number in range(NUM_PROBES)]
        return [Rollout(0.25, (branch,), {HINTS_TEACHER_FIRST_CALL: each}) for each in succeed]


def run(site: SiteSettings, player: ScriptedPlayer) -> list[dict[str, float]]:
    """Make the site's batches; the orchestrator's tape."""

    async def at_least(version: int) -> None:
        pass

    given = cast(RolloutPlayer, player)
    weights = cast(WeightsWatcher, SimpleNamespace(version=0, at_least=at_least))
    watch = TeacherWatch(site, given, "policy")
    orchestrator = Orchestrator(
        site, given, weights, cast(InferenceClient, None), watch, load_stored(site, "http://unused", "policy")
    )
    asyncio.run(orchestrator.make_batches())
    return read_tape(site.paths.tape("orchestrator"))


@pytest.fixture
def site_of(tmp_path: Path) -> Callable[..., SiteSettings]:
    def make(teacher: str, max_steps: int = 3, **settings: Any) -> SiteSettings:
        return letters_site(tmp_path, max_steps=max_steps, hints=TEACHERS[teacher], **settings)

    return make


@pytest.mark.parametrize(("teacher", "model"), [("ema", "policy@ema"), ("live", "policy")])
def test_a_teacher_that_moves_is_played_each_step(site_of: Any, teacher: str, model: str) -> None:
    player = ScriptedPlayer([1.0, 0.5, 0.0])
    tape = run(site_of(teacher), player)
    assert [(record[HINTS_TEACHER_FIRST_CALL], record[HINTS_TEACHER_REWARD]) for record in tape] == [
        (1.0, 0.25), (0.5, 0.25), (0.0, 0.25),
    ]  # fmt: skip
    assert player.asked == [model] * 3


def test_a_frozen_teacher_isnt_played(site_of: Any) -> None:
    player = ScriptedPlayer()
    assert all(HINTS_TEACHER_FIRST_CALL not in record for record in run(site_of("frozen"), player))
    assert player.asked == []


def test_without_hints_nothing_is_played(tmp_path: Path) -> None:
    player = ScriptedPlayer()
    run(letters_site(tmp_path, max_steps=2), player)
    assert player.asked == []


def test_a_step_whose_played_teacher_failed_says_so_and_goes_on(site_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    tape = run(site_of("live"), ScriptedPlayer([None, "ProviderError: gone", 1.0]))
    assert [HINTS_TEACHER_FIRST_CALL in record for record in tape] == [False, False, True]
    assert "failed=1 of=1 last='ProviderError: gone'" in caplog.text


def test_what_the_teacher_plays_is_no_sample_and_no_rollout(site_of: Any) -> None:
    site = site_of("ema")
    for step, record in enumerate(run(site, ScriptedPlayer())):
        samples = read_batch(site.paths.rollouts, step)
        assert samples is not None and len(samples) == record[ROLLOUT_COUNT] == 16
        assert {tuple(sample.token_ids) for sample in samples} == {(1, 2)}
        assert record[ROLLOUT_REWARD] == 0.5


def test_a_teacher_that_collapses_teaches_no_more_also_after_a_resume_and_a_person_is_told(
    site_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    site, player = site_of("live", max_steps=4 * STEPS), ScriptedPlayer([1.0] * STEPS + [0.0])
    tape = run(site, player)
    last = STEPS + int((1 - LOST) * STEPS)
    assert [HINTS_TEACHER_FIRST_CALL in record for record in tape] == [step <= last for step in range(4 * STEPS)]
    assert all(player.was_hinting[: 4 * last]) and not any(player.was_hinting[4 * (last + 1) :])
    assert caplog.text.count("it has collapsed") == 1
    assert "it has collapsed" in write_summary(RunPaths.of(site.recipe))["sites"]["a"]["hints_stopped"]
    again = ScriptedPlayer()
    TeacherWatch(site_of("live", resume=True), cast(RolloutPlayer, again), "policy")
    assert not again.env.is_hinting


def test_hints_go_on_after_a_resume_where_nothing_collapsed(site_of: Any) -> None:
    site, player = site_of("live"), ScriptedPlayer()
    run(site, player)
    TeacherWatch(site, cast(RolloutPlayer, player), "policy")
    assert player.env.is_hinting
    assert "hints_stopped" not in write_summary(RunPaths.of(site.recipe))["sites"]["a"]
