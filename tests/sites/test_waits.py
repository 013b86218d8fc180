"""What an embedded site's roles wait for: on the site's line, and through its trainer in `composer-prime status`."""

import asyncio
import threading

import pytest
from rich.console import Console

from composer_prime import waiting
from composer_prime.config import SiteSettings
from composer_prime.sites.embedded import orchestrator
from composer_prime.sites.embedded.local_run import _View
from composer_prime.sites.embedded.progress import draw_line, draw_table
from composer_prime.sites.embedded.supervisor import SiteState, SiteSupervisor
from composer_prime.sites.embedded.trainer import Trainer
from composer_prime.store import open_store
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.waiting import WAIT_S, Waits, read_waiting
from composer_prime.watch.status import look
from tests.patience import PATIENCE_S, wait_until
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites import fake_site
from tests.sites.letters_site import letters_site
from tests.sites.test_trainer import settle
from tests.sites.tiny_policy import random_policy


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits count after a fraction of a second."""
    monkeypatch.setattr(waiting, "WAIT_S", 0.2)
    monkeypatch.setattr(orchestrator, "WAITS_POLL_S", 0.05)


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_cause_of_several_is_told_once_it_has_lasted_and_what_it_hides_after_it(tmp_path):
    clock, told = HandClock(), []
    waits = Waits(tmp_path / "waits.json", clock, clock)
    waits.listener = told.append
    waits.say("round", "the others")
    clock.now = 10.0
    waits.say("store", "it refuses")
    for clock.now in (WAIT_S - 1, WAIT_S, WAIT_S + 1, WAIT_S + 10, WAIT_S + 11):
        waits.say("round", "the others")
        waits.say("store", "it refuses")
    waits.say("store", None)
    waits.say("round", None)
    waits.say("round", None)
    assert [(each.cause, each.since, each.until) for each in told] == [
        ("the others", 0.0, None),
        ("it refuses", 10.0, None),
        ("the others", 0.0, None),
        ("the others", 0.0, WAIT_S + 11),
    ]
    assert read_waiting(tmp_path / "waits.json") is None


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (FakePolicy(status="paused", is_open=False), "the inference engine, which is paused"),
        (FakePolicy(is_open=False), "16 rollouts, none ends: see the environment"),
    ],
    ids=["a paused engine", "an environment that never answers"],
)
def test_rollouts_that_do_not_come_are_told_until_they_come(tmp_path, tokenizer_dir, run_async, soon, policy, cause):
    async def holds(site: SiteSettings) -> None:
        path = site.paths.waiting("orchestrator")
        work = asyncio.create_task(orchestrator.serve(site))
        async with asyncio.timeout(PATIENCE_S):
            while (told := read_waiting(path)) is None:
                assert not work.done()
                await asyncio.sleep(0.01)
            assert told.cause.startswith(cause)
            policy.is_open, policy.status = True, "ready"
            while read_waiting(path) is not None:
                await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    with serving(policy) as port:
        run_async(holds(letters_site(tmp_path, port=port, model_dir=tokenizer_dir)))


def test_a_trainer_without_a_batch_says_what_its_orchestrator_waits_for_and_status_shows_it(tmp_path, soon):
    settings = settle(tmp_path, outer=True)
    paths, clock = settings.paths, HandClock()
    theirs = Waits(paths.waiting("orchestrator"), clock, clock)
    theirs.say("engine", "the inference engine, which is paused")
    clock.now = WAIT_S
    trainer = Trainer(settings, random_policy(0), OuterLoop.from_settings(settings))
    trainer.start()
    training = threading.Thread(target=trainer.train, daemon=True)
    training.start()
    try:
        wait_until(lambda: read_waiting(paths.waiting("trainer")) is not None, "the trainer says that it waits")
        told = read_waiting(paths.waiting("trainer"))
        assert told is not None and told.cause == "a batch of the orchestrator, see its log"
        theirs.say("engine", "the inference engine, which is paused")
        assert settings.run_uri is not None
        store = open_store(settings.run_uri)

        def waits() -> waiting.Waiting | None:
            return look(store).sites[0].waits

        def is_told() -> bool:
            found = waits()
            return found is not None and found.until is None and found.cause == "the inference engine, which is paused"

        wait_until(is_told, "status shows the engine's pause")
    finally:
        trainer.interrupt()
        training.join(PATIENCE_S)
        trainer.close()


def test_the_line_of_a_site_that_waits_says_the_cause_and_since_when(tmp_path):
    site = SiteSupervisor(fake_site.settle(tmp_path))
    site.state, view, clock = SiteState.RUNNING, _View([site]), HandClock()
    assert view.look()["a"][0] == "starting"
    waits = Waits(site.paths.waiting("trainer"), clock, clock)
    waits.say("store", "put failed: \x1b[2JRead-only file system")
    clock.now = WAIT_S
    waits.say("store", "put failed: \x1b[2JRead-only file system")
    state, numbers = view.look()["a"]
    line = draw_line("a", state, numbers, 8)
    assert "state=waiting" in line and 'waits="since 1970-01-01T00:00:00Z: put failed: ' in line
    console = Console(width=160)
    with console.capture() as captured:
        console.print(draw_table(view.look(), 8))
    assert "a waits since 1970-01-01T00:00:00Z: put failed: " in captured.get() and "\x1b[2J" not in captured.get()
    waits.say("store", None)
    assert view.look()["a"][0] == "starting"
