"""Sites that join, die and come back in the middle of a run, over a real S3 server."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from tests.integration.local_runs import command, role_processes, run_paths, started, trained, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.s3]


def merged_by(store: Store, site: str) -> list[dict[str, Any]]:
    lines = [line for key in store.list(keys.tape_prefix(site)) for line in store.get(key).decode().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == "merged"]


def test_a_third_site_joins_and_a_killed_one_comes_back_and_all_end_with_the_same_masters(
    tmp_path: Path, store_uri: Callable[[str], str]
) -> None:
    uri = store_uri("seaweed")
    paths, logs = run_paths(tmp_path / "out"), [tmp_path / f"{name}.log" for name in ("run", "b", "c")]
    settings = {"outer__store": uri, "max_steps": 120}
    with started(command("run", tmp_path / "out", **settings), logs[0]) as run:
        wait_until(lambda: trained(paths.site("b")) >= 5, run, logs[0])
        role_processes(run)["b", "trainer"].send_signal(signal.SIGKILL)
        killed_at = trained(paths.site("a"))
        join = command("site", tmp_path / "out", "--site", "c", **settings)
        back = command("site", tmp_path / "out", "--site", "b", "--resume", **settings)
        wait_until(lambda: "site b failed" in logs[0].read_text(), run, logs[0])
        with started(back, logs[1]) as returned, started(join, logs[2]) as joined:
            codes = [process.wait(240) for process in (returned, joined, run)]
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0, 1], printed  # the run says that one of its sites was killed
    assert trained(paths.site("a")) > killed_at
    sites = json.loads(paths.summary.read_text())["sites"]
    assert set(sites) == {"a", "b", "c"} and all(site["finished"] for site in sites.values())
    assert sites["a"]["master_sha256"] == sites["b"]["master_sha256"] == sites["c"]["master_sha256"]
    assert {master["version"] for master in sites["a"]["master_sha256"].values()} == {31}
    store = open_store(f"{uri}/two-sites")
    assert merged_by(store, "c"), "the third site contributed nothing"
    assert {event["incarnation"] for event in merged_by(store, "b")} >= {1}, "the returned site contributed nothing"
    store.close()


def test_ctrl_c_ends_cleanly_and_resume_goes_on_to_the_end(tmp_path: Path) -> None:
    paths, log = run_paths(tmp_path / "out"), tmp_path / "run.log"
    with started(command("run", tmp_path / "out", max_steps=16), log) as run:
        wait_until(lambda: trained(paths.site("a")) >= 4, run, log)
        began = time.monotonic()
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130 and time.monotonic() - began < 60
    assert "--resume" in log.read_text() and "Traceback" not in log.read_text()
    first = trained(paths.site("a"))
    with started(command("run", tmp_path / "out", "--resume", max_steps=16), log) as run:
        assert run.wait(240) == 0, log.read_text()
    sites = json.loads(paths.summary.read_text())["sites"]
    assert sites["a"]["master_sha256"] == sites["b"]["master_sha256"]
    assert trained(paths.site("a")) > first
    # Not "16 steps each": sites were stopped at different steps, and the run's length is counted in rounds.
    assert {master["version"] for master in sites["a"]["master_sha256"].values()} == {16 // 4 + 1}
