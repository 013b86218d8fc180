"""A real launch of the demo recipe on each platform's loopback: one replica loses its machine, the run ends right."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from composer_prime.executors.base import JobState
from composer_prime.launch.records import LaunchBook, open_launch
from composer_prime.store import keys, open_store
from composer_prime.sync.records import Close, Commit, Manifest, Offer
from tests.executors.platforms import LoopbackPlatform
from tests.executors.registry import LOOPBACKS, reachable
from tests.integration.local_runs import REPEATABLE, command, run_paths, started, trained, wait_until
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.s3]
SITES = ("r0", "r1")
PLATFORMS = [pytest.param(name, id=name, marks=() if name == "local" else pytest.mark.long) for name in LOOPBACKS]
"""Minutes each: the others with `-m long`. What differs between them is the contract's, which always runs."""
KEEPS_DISK = "ssh"
"""Where a job's next attempt finds the folders of the last: the host is still there. Elsewhere the site's folder goes
with its machine, as a container's disk does, so that the next attempt has nothing but the bucket."""


@pytest.fixture(params=PLATFORMS)
def platform(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackPlatform]:
    with reachable(request.param, tmp_path / "platform", monkeypatch) as opened:
        yield opened


def composer_prime(*arguments: str) -> str:
    """What a command prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "composer_prime.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_launched_run_survives_a_preemption_and_ends_with_equal_masters(
    platform: LoopbackPlatform, tmp_path: Path, store_uri: Callable[[str], str]
) -> None:
    uri = store_uri("seaweed")
    paths, log = run_paths(tmp_path / "out"), tmp_path / "launch.log"
    options = ("--on", platform.launch_option(), "--replicas", "2", "--poll-s", "0.5")
    # With a quorum of both no site ends the run alone, however late the other starts.
    changes: dict[str, object] = {"outer.store": uri, "outer.quorum": 2, "max_steps": 24}
    arguments = command("launch", tmp_path / "out", *options, "--image", "any", "--yes", "--no-limit", **changes)
    with started(arguments, log) as launcher:
        wait_until(lambda: all(trained(paths.site(site)) >= 2 for site in SITES), launcher, log)
        own = paths.site("r1")
        wait_until(lambda: any(own.checkpoints.glob("step_*")), launcher, log)
        with closing(open_store(f"{uri}/two-sites")) as store:
            book = open_launch(store)
        victim = book.attempts("r1")[0].job
        assert victim is not None
        with standing_still(launcher):  # or attempt 2 could find what is about to go
            platform.preempt(victim)
            if platform.name != KEEPS_DISK:
                shutil.rmtree(own.root)
        wait_until(lambda: "r1 attempt 2: running" in log.read_text(), launcher, log)
        rows = [json.loads(line) for line in composer_prime("ps", book.store.uri, "--json").splitlines()]
        assert ("r1", 1, "preempted") in {(row["site"], row["attempt"], row["state"]) for row in rows}
        assert launcher.wait(PATIENCE_S) == 0, log.read_text()
    first, second = (json.loads(paths.site(site).result.read_text())["master_sha256"] for site in SITES)
    assert first == second
    assert max(offer.incarnation for offer in taken_of("r1", f"{uri}/two-sites")) > 0, "attempt 2's work was merged"
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 0 and "started as" not in again.stdout, again.stdout + again.stderr
    check_ended(platform, f"{uri}/two-sites", book)


@contextmanager
def standing_still(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop a process meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def taken_of(site: str, run_uri: str) -> list[Offer]:
    """The offers of a site that hold work and that rounds of a closed run took."""
    with closing(open_store(run_uri)) as store:
        closed = Close.from_bytes(store.get(keys.close()), keys.close())
        places = [keys.commit(fragment, each) for fragment, last in enumerate(closed.versions) for each in range(last)]
        commits = [Commit.from_bytes(store.get(key), key) for key in places]
    offers = [taken.offer for commit in commits for taken in commit.taken]
    return [offer for offer in offers if offer.site == site and offer.tokens > 0]


@pytest.mark.long
def test_a_launched_run_has_the_masters_of_a_local_run_bit_for_bit(
    platform: LoopbackPlatform, tmp_path: Path, store_uri: Callable[[str], str]
) -> None:
    uri = store_uri("seaweed")
    options = ("--on", platform.launch_option(), "--poll-s", "0.5", "--image", "any")
    commands = {
        "run": command("run", tmp_path / "run", **REPEATABLE),
        "launch": command("launch", tmp_path / "launch", *options, **REPEATABLE, **{"outer.store": uri}),
    }
    masters = {}
    for name, arguments in commands.items():
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        results = [json.loads(run_paths(tmp_path / name).site(site).result.read_text()) for site in ("a", "b")]
        assert all(result["steps"] == REPEATABLE["max_steps"] for result in results)
        masters[name] = [result["master_sha256"] for result in results]
    assert masters["launch"] == masters["run"] and masters["run"][0] == masters["run"][1]
    with closing(open_store(f"{uri}/two-sites")) as store:
        first = Manifest.from_bytes(store.get(keys.manifest()), keys.manifest()).masters
    assert [master["sha256"] for master in masters["launch"][0].values()] != list(first), "something was learned"


def check_ended(platform: LoopbackPlatform, run_uri: str, book: LaunchBook) -> None:
    """The run is closed, every attempt has its end, what was said can be read, and nothing is left running."""
    with closing(open_store(run_uri)) as store:
        Close.from_bytes(store.get(keys.close()), keys.close())
        ends = {(each.site, each.number): each.ended for each in open_launch(store).attempts()}
    states = {place: ended.state for place, ended in ends.items() if ended is not None}
    assert states == {("r0", 1): "succeeded", ("r1", 1): "preempted", ("r1", 2): "succeeded"}
    printed = composer_prime("logs", run_uri)
    assert {line.partition(" | ")[0] for line in printed.splitlines()} >= set(SITES)
    assert "masters" in printed
    with closing(platform.executor()) as executor:
        jobs = executor.find(book.name)
        assert len(jobs) == 3 and all(executor.poll(job).state.final for job in jobs)
        assert not [pid for job in jobs for pid in platform.pids(job)]
        assert {executor.poll(job).state for job in jobs} == {JobState.SUCCEEDED, JobState.PREEMPTED}
    assert "nothing of" in composer_prime("cancel", run_uri)
