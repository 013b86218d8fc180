"""Sites that stop, go on, join, die and come back, over a real S3 server: one run, in which all of it happens."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from composer_prime.config.paths import RunPaths
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from tests.integration.local_runs import command, role_processes, run_paths, started, trained, wait_until
from tests.patience import PATIENCE_S
from tests.servers import S3Server
from tests.servers.weed import BUCKET

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(1500)]
NUM_STEPS = 32


@dataclass(frozen=True)
class Story:
    """What the run came to. First it was interrupted; resumed, it lost site b, which came back while c joined."""

    paths: RunPaths
    uri: str
    interrupted: int
    """The exit code of the run that was interrupted."""
    said: str
    """All that it had said by then."""
    steps: tuple[int, int]
    """What site a had trained when the run was interrupted, and when b was killed."""
    ends: tuple[int, ...]
    """The exit codes of b, of c, and of the resumed run."""
    printed: list[str]

    @property
    def sites(self) -> dict[str, Any]:
        return json.loads(self.paths.summary.read_text())["sites"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, seaweed: S3Server) -> Story:
    folder = tmp_path_factory.mktemp("comings-and-goings")
    out, logs = folder / "out", [folder / f"{name}.log" for name in ("run", "resumed", "b", "c")]
    paths, uri = run_paths(out), f"s3://{BUCKET}/comings-and-goings"
    # With a quorum of two site a doesn't end the run alone, however late the others start.
    settings = {"outer__store": uri, "outer__quorum": 2, "max_steps": NUM_STEPS}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed.environment().items():
            patch.setenv(name, value)
        with started(command("run", out, **settings), logs[0]) as run:
            wait_until(lambda: trained(paths.site("a")) >= 4, run, logs[0])
            run.send_signal(signal.SIGINT)
            interrupted = run.wait(PATIENCE_S)
        said, before = logs[0].read_text(), {site: trained(paths.site(site)) for site in "ab"}
        with started(command("run", out, "--resume", **settings), logs[1]) as run:
            goes_on = [paths.site(site) for site in "ab"]
            wait_until(lambda: all(trained(s) >= before[s.root.name] + 3 for s in goes_on), run, logs[1])
            role_processes(run)["b", "trainer"].send_signal(signal.SIGKILL)
            killed = trained(paths.site("a"))
            back = command("site", out, "--site", "b", "--resume", **settings)
            join = command("site", out, "--site", "c", **settings)
            wait_until(lambda: "site b failed" in logs[1].read_text(), run, logs[1])
            with started(back, logs[2]) as returned, started(join, logs[3]) as joined:
                ends = tuple(process.wait(PATIENCE_S) for process in (returned, joined, run))
    steps, printed = (before["a"], killed), [log.read_text() for log in logs]
    return Story(paths, uri, interrupted, said, steps, ends, printed)


@pytest.fixture
def store(story: Story, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    opened = open_store(f"{story.uri}/two-sites")
    yield opened
    opened.close()


def merged_by(store: Store, site: str) -> set[int]:
    """The incarnations of a site of which anything was merged."""
    lines = [line for key in store.list(keys.tape_prefix(site)) for line in store.get(key).decode().splitlines()]
    return {event["incarnation"] for event in map(json.loads, lines) if event["event"] == "merged"}


def test_ctrl_c_ends_a_run_cleanly_and_says_how_to_go_on(story: Story) -> None:
    assert story.interrupted == 130, story.said
    assert "--resume" in story.said and "Traceback" not in story.said


def test_a_resumed_run_goes_on_and_outlives_a_killed_site(story: Story) -> None:
    assert story.ends == (0, 0, 1), story.printed  # the run says that one of its sites was killed
    assert story.steps[0] < story.steps[1] < trained(story.paths.site("a"))


def test_who_was_there_joined_or_came_back_ends_with_the_same_masters(story: Story) -> None:
    assert set(story.sites) == {"a", "b", "c"} and all(site["finished"] for site in story.sites.values())
    masters = [story.sites[name]["master_sha256"] for name in "abc"]
    assert masters[0] == masters[1] == masters[2]
    # Not "32 steps each": sites were stopped at different steps, and the run's length is counted in rounds.
    assert {master["version"] for master in masters[0].values()} == {NUM_STEPS // 4 + 1}


def test_work_of_the_third_site_and_of_the_one_that_came_back_is_merged(story: Story, store: Store) -> None:
    assert merged_by(store, "c"), "the third site contributed nothing"
    assert 2 in merged_by(store, "b"), "the returned site contributed nothing"
