"""Two real sites on this machine, three processes each: what they share, how they overlap, what a lag does.

One run serves all tests here; in its middle the trainer of site a is stopped for a while (SIGSTOP), so that its
orchestrator runs ahead and later batches are sampled by an older policy.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_prime.metrics import read_tape
from composer_prime.store import keys, open_store
from composer_prime.sync.records import Close
from tests.integration.local_runs import (
    ROLES,
    Touched,
    command,
    look,
    role_processes,
    run_paths,
    started,
    trained,
    wait_until,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
STOPPED_S = 3.0


@dataclass(frozen=True)
class WatchedRun:
    output_dir: Path
    exit_code: int
    printed: str
    seen: dict[int, Touched]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(run_paths(self.output_dir).summary.read_text())

    def tape(self, site: str, role: str) -> list[dict[str, float]]:
        return read_tape(run_paths(self.output_dir).site(site).tape(role))


def watch(process: subprocess.Popen[bytes], seen: dict[int, Touched], seconds: float) -> None:
    until = time.monotonic() + seconds
    processes, found_at = role_processes(process), time.monotonic()
    while (now := time.monotonic()) < until and process.poll() is None:
        if now - found_at > 0.5:  # finding them costs more than looking at them
            processes, found_at = role_processes(process), now
        look(processes, seen)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    folder = tmp_path_factory.mktemp("two-sites")
    log, seen = folder / "printed.log", {}
    site_a = run_paths(folder / "out").site("a")
    with started(command("run", folder / "out", max_steps=16), log) as process:
        wait_until(lambda: trained(site_a) >= 3, process, log)
        trainer = role_processes(process)["a", "trainer"]
        trainer.send_signal(signal.SIGSTOP)
        watch(process, seen, STOPPED_S)
        trainer.send_signal(signal.SIGCONT)
        watch(process, seen, 200)
        exit_code = process.wait(PATIENCE_S)
    yield WatchedRun(folder / "out", exit_code, log.read_text(), seen)


def test_both_sites_end_with_bit_identical_masters_at_one_round_count(run: WatchedRun) -> None:
    assert run.exit_code == 0, run.printed
    first, second = (run.summary["sites"][name] for name in "ab")
    assert first["master_sha256"] == second["master_sha256"]
    assert {master["version"] for master in first["master_sha256"].values()} == {5}
    assert first["outer_rounds"] == second["outer_rounds"] == 10
    store = open_store(str(run_paths(run.output_dir).bucket / "two-sites"))
    close = Close.from_bytes(store.get(keys.close()), keys.close())
    assert list(close.masters) == [first["master_sha256"][f]["sha256"] for f in ("0", "1")]


def test_each_site_is_three_processes_of_its_own(run: WatchedRun) -> None:
    roles = sorted((touched.site, touched.role) for touched in run.seen.values())
    assert roles == [(site, role) for site in "ab" for role in ROLES]


def test_sites_share_no_path_but_the_bucket_and_no_socket(run: WatchedRun) -> None:
    sites = run_paths(run.output_dir).sites
    for other, mine in (("a", "b"), ("b", "a")):
        theirs = [touched for touched in run.seen.values() if touched.site == other]
        ours = [touched for touched in run.seen.values() if touched.site == mine]
        foreign = str(sites / other)
        assert not [path for touched in ours for path in touched.files if path.startswith(foreign)]
        assert not [part for touched in ours for part in touched.arguments if foreign in part]
        listens = {port for touched in theirs for port in touched.listens}
        assert listens and not listens & {port for touched in ours for port in touched.calls}
    written = {path for touched in run.seen.values() for path in touched.files if path.startswith(str(run.output_dir))}
    assert any("/sites/a/" in path for path in written) and any("/sites/b/" in path for path in written)


def test_no_port_of_a_site_answers_a_stranger_more_than_that_it_is_healthy(run: WatchedRun) -> None:
    for touched in run.seen.values():
        assert bool(touched.listens) == (touched.role != "trainer")
        assert touched.answers <= {"GET /health"}
    assert {"GET /health"} in [touched.answers for touched in run.seen.values()], "they were asked"


def test_generation_of_a_step_begins_before_training_of_the_one_before_ends(run: WatchedRun) -> None:
    for site in "ab":
        began = {record["step"]: record["rollout/began"] for record in run.tape(site, "orchestrator")}
        ended = {record["step"]: record["time"] for record in run.tape(site, "trainer")}
        overlaps = [began[step + 1] < ended[step] for step in ended if step + 1 in began]
        assert len(overlaps) >= 4 and all(overlaps)  # a slower site makes fewer of the run's steps


def test_a_lagging_policy_reaches_the_loss_as_mismatch(run: WatchedRun) -> None:
    lags = {record["step"]: record["rollout/off_policy_steps"] for record in run.tape("a", "orchestrator")}
    mismatch = {
        record["step"]: record["loss/mismatch_kl"] for record in run.tape("a", "trainer") if record["train/tokens"]
    }
    fresh = [abs(value) for step, value in mismatch.items() if lags[step] == 0]
    stale = [value for step, value in mismatch.items() if lags[step] >= 2]
    assert fresh and max(fresh) < 1e-6
    assert stale and max(stale) > 1e-4
    assert max(lags.values()) <= 4


def test_every_trained_token_has_a_fate_on_the_tape(run: WatchedRun) -> None:
    store = open_store(str(run_paths(run.output_dir).bucket / "two-sites"))
    for site in "ab":
        lines = [line for key in store.list(keys.tape_prefix(site)) for line in store.get(key).decode().splitlines()]
        events = [json.loads(line) for line in lines]
        for fragment in (0, 1):
            fates = [e["tokens"] for e in events if e["event"] in ("merged", "dropped") and e["fragment"] == fragment]
            assert sum(fates) == run.summary["sites"][site]["tokens"]


def test_nothing_of_the_run_is_left_running(run: WatchedRun) -> None:
    assert not [pid for pid in run.seen if psutil.pid_exists(pid)]


def test_no_log_has_a_line_for_each_request(run: WatchedRun) -> None:
    logs = [log.read_text() for log in run_paths(run.output_dir).sites.glob("*/logs/*.log")]
    assert len(logs) == 2 * len(ROLES)
    assert not [line for log in logs for line in log.splitlines() if "HTTP/1.1" in line]


def test_the_summary_has_every_number_a_reader_expects(run: WatchedRun) -> None:
    expected = {"reward_first", "reward_last", "steps", "tokens", "outer_rounds", "master_sha256", "bytes_up"}
    expected |= {"bytes_down", "stall_s", "finish_s", "train_s", "wall_s"}
    for site in run.summary["sites"].values():
        assert expected <= site.keys() and None not in site.values()
    assert run_paths(run.output_dir).reward_plot.read_bytes().startswith(b"\x89PNG")
    assert "masters" in run.printed
