"""The orchestrator against real environments, the fake inference server and a trainer that only publishes."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_prime.config import SitePaths, SiteSettings
from composer_prime.errors import SiteError
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.batches import TrainingSample, read_batch, read_num_drawn
from composer_prime.sites.embedded.checkpoints import save_checkpoint
from composer_prime.sites.embedded.orchestrator import MAX_DRAWS, serve
from tests.patience import PATIENCE_S, wait_until
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites.letters_site import letters_site

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*(socket|_SelectorTransport):pytest.PytestUnraisableExceptionWarning"
)
"""verifiers leaves the connections of rollouts that are cancelled at a site's end to the garbage collector."""

OUTER = {"inner_steps": 4, "fragments": 2}

Run = Callable[..., SiteSettings]
Trainer = Callable[[SiteSettings], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, tokenizer_dir: Path, run_async: Callable[..., Any]) -> Run:
    """`run(policy, trainer)` runs the orchestrator until the trainer, given the site's settings, returns."""

    async def both(settings: SiteSettings, trainer: Trainer) -> None:
        work, training = asyncio.create_task(serve(settings)), asyncio.create_task(trainer(settings))
        done, _ = await asyncio.wait({work, training}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, training):
            task.cancel()
        await asyncio.gather(work, training, return_exceptions=True)
        assert done, f"neither the trainer nor the orchestrator came to an end in {PATIENCE_S} s"
        for task in done:
            task.result()

    def start(policy: FakePolicy, trainer: Trainer, **settings: Any) -> SiteSettings:
        with serving(policy) as port:
            site = letters_site(tmp_path, port=port, model_dir=tokenizer_dir, **settings)
            run_async(both(site, trainer))
        return site

    return start


async def until(holds: Callable[[], Any]) -> None:
    """Return once `holds()`; the run's own deadline bounds it."""
    while not holds():
        await asyncio.sleep(0.01)


async def batch_of(paths: SitePaths, step: int) -> list[TrainingSample]:
    """The batch of a step, once it stands."""
    await until(lambda: read_batch(paths.rollouts, step) is not None)
    samples = read_batch(paths.rollouts, step)
    assert samples is not None
    return samples


def publish(paths: SitePaths, version: int) -> None:
    """Do as a trainer that has taken `version` steps."""
    folder = paths.broadcast(version)
    folder.mkdir(parents=True)
    (folder / "STABLE").touch()


def tape(settings: SiteSettings) -> list[dict[str, float]]:
    return read_tape(settings.paths.tape("orchestrator"))


def takes_batches(count: int) -> Trainer:
    """A trainer that publishes after each of `count` batches."""

    async def trainer(settings: SiteSettings) -> None:
        for step in range(count):
            await batch_of(settings.paths, step)
            publish(settings.paths, step + 1)
        await until(lambda: len(tape(settings)) >= count)

    return trainer


def test_the_next_batch_is_made_while_the_trainer_still_trains_on_this_one(run: Run) -> None:
    async def trainer(settings: SiteSettings) -> None:
        await batch_of(settings.paths, 0)
        await batch_of(settings.paths, 1)  # the training of step 0 hasn't ended: nothing is published yet
        trained.append(time.time())
        publish(settings.paths, 1)

    trained: list[float] = []
    first, second = tape(run(FakePolicy(), trainer))[:2]
    assert first["rollout/ended"] <= second["rollout/began"] < second["rollout/ended"] < trained[0]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_batch_is_never_older_than_the_bound_and_waits_for_newer_weights(run: Run, bound: int) -> None:
    async def trainer(settings: SiteSettings) -> None:
        for step in range(5):
            samples = await batch_of(settings.paths, step)
            assert min(sample.policy_version for sample in samples) >= step - bound
            await batch_of(settings.paths, step + bound)  # as far ahead as it may run without newer weights
            await asyncio.sleep(0.2)  # time to run further, for an orchestrator that would
            assert read_batch(settings.paths.rollouts, step + bound + 1) is None
            publish(settings.paths, step + 1)

    settings = run(FakePolicy(), trainer, orchestrator={"max_off_policy_steps": bound})
    lags = [record["rollout/off_policy_steps"] for record in tape(settings)]
    assert lags[: bound + 1] == list(range(bound + 1))
    assert max(lags) == bound


def test_samples_carry_the_version_that_the_server_held(run: Run) -> None:
    async def trainer(settings: SiteSettings) -> None:
        publish(settings.paths, 3)
        await until(lambda: policy.version == 3)
        await batch_of(settings.paths, 2)
        assert {sample.policy_version for sample in await batch_of(settings.paths, 4)} == {3}

    policy = FakePolicy()
    settings = run(policy, trainer)
    assert policy.updates == [(3, str(settings.paths.broadcast(3)))]


def test_with_an_outer_loop_no_rollout_is_played_before_the_trainer_has_its_masters(run: Run) -> None:
    async def trainer(settings: SiteSettings) -> None:
        await asyncio.sleep(1.0)  # time to start too early, for an orchestrator that would
        assert policy.words == []
        publish(settings.paths, 0)
        assert {sample.policy_version for sample in await batch_of(settings.paths, 0)} == {0}
        assert policy.updates == [(0, str(settings.paths.broadcast(0)))]

    policy = FakePolicy()
    run(policy, trainer, outer=OUTER)


def test_the_reward_is_the_mean_over_all_rollouts_also_those_that_are_filtered(run: Run) -> None:
    def accuracy(word: str) -> float:
        return 0.5 if word[0] in "abc" else 0.0

    policy = FakePolicy(accuracy=accuracy)
    settings = run(policy, takes_batches(1), max_steps=1)
    (record,) = tape(settings)
    samples = read_batch(settings.paths.rollouts, 0)
    assert samples is not None
    assert record["rollout/count"] == len(policy.words)
    assert record["rollout/reward"] == pytest.approx(policy.num_right / len(policy.words))
    assert 0 < len(samples) == record["rollout/samples"] < record["rollout/count"]
    assert len(samples) % 4 == 0
    assert all(any(advantage != 0.0 for advantage in sample.advantages) for sample in samples)


def test_a_step_that_teaches_nothing_is_drawn_again_and_then_left_empty(run: Run) -> None:
    settings = run(FakePolicy(accuracy=lambda word: 1.0), takes_batches(1), max_steps=1)
    (record,) = tape(settings)
    assert read_batch(settings.paths.rollouts, 0) == []
    assert (record["rollout/count"], record["rollout/reward"]) == (16 * MAX_DRAWS, 1.0)


def test_without_the_filter_every_rollout_is_a_sample(run: Run) -> None:
    everything = {"train": {"filter_zero_advantages": False}}
    settings = run(FakePolicy(accuracy=lambda word: 1.0), takes_batches(1), max_steps=1, orchestrator=everything)
    assert len(read_batch(settings.paths.rollouts, 0) or []) == 16


def test_failed_rollouts_are_counted_and_left_out(run: Run) -> None:
    policy = FakePolicy(failing=0.3)
    settings = run(policy, takes_batches(1), max_steps=1)
    (record,) = tape(settings)
    assert 0 < record["rollout/failed"] == policy.num_failed
    assert record["rollout/count"] == len(policy.words) - policy.num_failed
    assert record["rollout/samples"] <= record["rollout/count"]


def test_a_site_ends_with_the_cause_when_all_rollouts_keep_failing(run: Run) -> None:
    policy = FakePolicy(failing=1.0)
    with pytest.raises(SiteError, match=r"all 16 rollouts failed, 3 times in a row; .*the dice said so.*: repair"):
        run(policy, takes_batches(1))
    assert len(policy.words) == 3 * 16


def test_without_an_outer_loop_there_are_max_steps_batches(run: Run) -> None:
    async def trainer(settings: SiteSettings) -> None:
        await takes_batches(2)(settings)
        publish(settings.paths, 3)
        await until(lambda: policy.version == 3)  # weights are still passed on after the last batch
        await asyncio.sleep(0.5)  # time to make one more batch, for an orchestrator that would
        assert read_batch(settings.paths.rollouts, 2) is None

    policy = FakePolicy()
    run(policy, trainer, max_steps=2)


def test_with_an_outer_loop_nothing_beyond_max_steps_is_played_until_it_is_needed(run: Run) -> None:
    async def trainer(settings: SiteSettings) -> None:
        publish(settings.paths, 0)
        await batch_of(settings.paths, 2)  # as far ahead as it may run
        publish(settings.paths, 2)
        await asyncio.sleep(0.5)  # time to make one more batch, for an orchestrator that would
        assert read_batch(settings.paths.rollouts, 3) is None
        publish(settings.paths, 3)
        await batch_of(settings.paths, 3)
        await asyncio.sleep(0.5)
        assert read_batch(settings.paths.rollouts, 4) is None

    outer = {"inner_steps": 1, "fragments": 1, "sync_delay": 0}
    run(FakePolicy(), trainer, max_steps=3, outer=outer, orchestrator={"max_off_policy_steps": 4})


def test_on_resume_it_goes_on_at_the_checkpoint_with_fresh_batches_and_weights(run: Run, tmp_path: Path) -> None:
    async def trainer(settings: SiteSettings) -> None:
        await asyncio.sleep(1.0)  # time to take what was left over, for an orchestrator that would
        assert policy.updates == []
        assert [folder.name for folder in settings.paths.rollouts.iterdir()] == ["step_3"]
        publish(settings.paths, 4)
        assert {sample.policy_version for sample in await batch_of(settings.paths, 4)} == {4}

    before = letters_site(tmp_path).paths
    for step in (3, 4, 5, 12):
        (before.rollouts / f"step_{step}").mkdir(parents=True)
    for step in (2, 4):
        save_checkpoint(before.checkpoints, step, {})
    publish(before, 12)
    os.utime(before.broadcast(12) / "STABLE", (1.0, 1.0))
    policy = FakePolicy()
    settings = run(policy, trainer, resume=True)
    assert policy.updates[0] == (4, str(settings.paths.broadcast(4)))
    assert tape(settings)[0]["step"] == 4


def test_after_a_resume_tasks_come_in_the_order_there_would_have_been(run: Run) -> None:
    """Draws that teach nothing count, too; what was played beyond the checkpoint comes again."""

    def drops_batches_until(count: int, saved: int) -> Trainer:
        async def trainer(settings: SiteSettings) -> None:
            paths = settings.paths
            if settings.resume:
                shutil.rmtree(paths.broadcast(saved))
                publish(paths, saved)
            for step in range(saved, count):
                await batch_of(paths, step)
                publish(paths, step + 1)
            save_checkpoint(paths.checkpoints, count, {}, read_num_drawn(paths.rollouts, count - 1))
            await batch_of(paths, count)

        return trainer

    easy = FakePolicy(accuracy=lambda word: 0.5 * (word[0] < "d"))  # many groups are all wrong: draws are repeated
    whole, again = replace(easy), replace(easy, words=[])
    settings = run(whole, drops_batches_until(6, 0))
    drawn = read_num_drawn(settings.paths.rollouts, 5)
    assert drawn > 6 * 4, "some step took more than one draw"
    shutil.rmtree(settings.paths.root)
    settings = run(again, drops_batches_until(3, 0))
    cut = 4 * read_num_drawn(settings.paths.rollouts, 2)
    assert sorted(again.words[:cut]) == sorted(whole.words[:cut])
    again.words.clear()
    settings = run(again, drops_batches_until(6, 3), resume=True)
    assert read_num_drawn(settings.paths.rollouts, 5) == drawn
    assert sorted(again.words[: 4 * drawn - cut]) == sorted(whole.words[cut : 4 * drawn])


@contextmanager
def process(settings: SiteSettings, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The orchestrator as a process of its own."""
    command = [sys.executable, "-m", "composer_prime.sites.embedded.orchestrator", str(settings.paths.root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as child:
        try:
            yield child
        finally:
            child.kill()


def ended(child: subprocess.Popen[str]) -> int:
    child.communicate(timeout=PATIENCE_S)
    return child.returncode


def test_the_process_ends_with_the_trainers_result_and_never_loads_torch(tmp_path: Path, tokenizer_dir: Path) -> None:
    with serving(FakePolicy()) as port:
        settings = letters_site(tmp_path, port=port, model_dir=tokenizer_dir)
        with process(settings, HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9") as child:
            wait_until(lambda: read_batch(settings.paths.rollouts, 0) is not None)
            loaded = {mapping.path for mapping in psutil.Process(child.pid).memory_maps()}
            settings.paths.result.write_text("{}")
            assert ended(child) == 0
    assert not [path for path in loaded if "torch" in path]


def test_the_process_ends_on_sigterm_though_rollouts_in_flight_never_end(tmp_path: Path, tokenizer_dir: Path) -> None:
    policy = FakePolicy(is_open=False)
    with serving(policy) as port:
        settings = letters_site(tmp_path, port=port, model_dir=tokenizer_dir)
        with process(settings) as child:
            wait_until(lambda: len(policy.words) == 16)
            child.send_signal(signal.SIGTERM)
            assert ended(child) == 0


def test_the_process_says_in_its_last_line_what_is_wrong_with_an_environment(tmp_path: Path) -> None:
    settings = letters_site(tmp_path, taskset={"id": "no-such-env"})
    with process(settings) as child:
        _, printed = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 2
    assert printed.splitlines()[-1].startswith("error: environment 'no-such-env' isn't installed")
    assert "Traceback" not in printed
