"""A launch that names no image: its jobs begin on a stock image, install what this machine has, and train."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from composer_prime.executors.installing import LINK_VARIABLE
from composer_prime.launch.records import LaunchBook, by_site, open_launch
from composer_prime.store import open_store
from tests.executors.jobs import wait_until
from tests.executors.registry import loopback
from tests.integration.local_runs import command, run_paths, started
from tests.patience import PATIENCE_S

AFTER = {"r0": ["preempted", "succeeded"], "r1": ["succeeded"], "supervisor": []}

pytestmark = [pytest.mark.slow, pytest.mark.s3]


@pytest.mark.parametrize("name", ["hf-jobs", "modal"])
def test_two_replicas_on_a_stock_image_end_with_equal_masters(
    name: str, tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, paths, log = store_uri("seaweed"), run_paths(tmp_path / "out"), tmp_path / "launch.log"
    changes: dict[str, object] = {"outer.store": uri, "outer.quorum": 2, "max_steps": 16}
    with closing(loopback(name, tmp_path / "platform")) as platform:
        for variable, value in platform.environment().items():
            monkeypatch.setenv(variable, value)
        options = ("--on", platform.launch_option(), "--replicas", "2", "--poll-s", "0.5")
        with started(command("launch", tmp_path / "out", *options, **changes), log) as launcher:
            assert launcher.wait(PATIENCE_S) == 0, log.read_text()
    first, second = (json.loads(paths.site(site).result.read_text())["master_sha256"] for site in ("r0", "r1"))
    assert first == second
    said = log.read_text()
    assert LINK_VARIABLE not in said and "X-Amz" not in said


def ends(book: LaunchBook) -> dict[str, list[str]]:
    """How each site's attempts ended, of those that have."""
    found = by_site(book.attempts())
    return {site: [each.ended.state for each in attempts if each.ended] for site, attempts in found.items()}


@pytest.mark.parametrize("name", ["hf-jobs", "modal"])
def test_a_launch_outlives_the_machine_that_began_it(
    name: str, tmp_path: Path, store_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends at once; a replica whose machine is taken then is started again by the supervisor's job."""
    uri, paths, log = store_uri("seaweed"), run_paths(tmp_path / "out"), tmp_path / "launch.log"
    changes: dict[str, object] = {"outer.store": uri, "outer.quorum": 2, "max_steps": 64}
    with closing(loopback(name, tmp_path / "platform")) as platform:
        for variable, value in platform.environment().items():
            monkeypatch.setenv(variable, value)
        on = platform.launch_option()
        options = ("--on", on, "--replicas", "2", "--supervise-on", on, "--poll-s", "0.5", "--image", "any")
        with started(command("launch", tmp_path / "out", *options, **changes), log) as launcher:
            assert launcher.wait(PATIENCE_S) == 0, log.read_text()
        assert "this machine may be switched off" in log.read_text()
        with closing(open_store(f"{uri}/two-sites")) as store:
            book = open_launch(store)
            wait_until(lambda: bool(store.list("rounds/")), "a round")
            job = book.attempt("r0", 1).job(book.name)
            assert job is not None
            platform.preempt(job)
            wait_until(lambda: {**ends(book), "supervisor": []} == AFTER, "both sites' ends")
    first, second = (json.loads(paths.site(site).result.read_text())["master_sha256"] for site in ("r0", "r1"))
    assert first == second
