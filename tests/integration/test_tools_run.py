"""A real site whose policy calls tools, one in twenty of which fail: it learns on, and loses those rollouts alone."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_prime.config import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.config.toml import to_toml
from composer_prime.metrics import read_tape
from tests.integration.local_runs import REPOSITORY, role_processes, started, wait_until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

STEPS = 20
FAULTS = ("ToolTimeout", "ToolDied", "ToolGarbage")
EXECUTABLE = str(Path(sys.executable).with_name("composer-prime"))


@dataclass(frozen=True)
class Run:
    """What the run left: its folder, what it printed, and descriptors of its orchestrator early and late."""

    paths: RunPaths
    code: int
    printed: str
    descriptors: tuple[int, int]

    @property
    def rollouts(self) -> list[dict[str, float]]:
        return read_tape(self.paths.site("a").tape("orchestrator"))

    def total(self, name: str) -> float:
        return sum(record.get(name, 0.0) for record in self.rollouts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("tools")
    log, here = folder / "log", Path(__file__).parent / "faulty_tools"
    recipe = load_recipe(REPOSITORY / "recipes/local/tools.toml", ["--sites.count", "1"]).to_data()
    recipe |= {"max_steps": STEPS, "output_dir": str(folder)}
    recipe["outer"]["inner_steps"] = STEPS // 2
    recipe["orchestrator"]["train"]["source"][0] = {
        "name": "faulty",
        "env": {
            "taskset": {"id": "faulty-letters"},
            "agent": {"max_turns": 5, "harness": {"tool_timeout": 1.5}},
        },
    }
    written = folder / "faulty.toml"
    written.write_text(to_toml(recipe))
    command = [EXECUTABLE, "run", str(written)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with started(command, log) as process:
            paths = RunPaths(folder / "tools")
            tape = paths.site("a").tape("orchestrator")
            wait_until(lambda: len(read_tape(tape)) >= 4, process, log)
            orchestrator = role_processes(process)["a", "orchestrator"]
            early = orchestrator.num_fds()
            wait_until(lambda: len(read_tape(tape)) >= STEPS - 2, process, log)
            late = _descriptors(orchestrator, early)
            code = process.wait(PATIENCE_S)
    yield Run(paths, code, log.read_text(), (early, late))


def _descriptors(process: psutil.Process, otherwise: int) -> int:
    try:
        return process.num_fds()
    except psutil.NoSuchProcess:
        return otherwise


def test_training_goes_on_to_its_end_and_the_policy_learns(run: Run) -> None:
    assert run.code == 0, run.printed[-3000:]
    site = json.loads(run.paths.summary.read_text())["sites"]["a"]
    assert (site["finished"], site["steps"]) == (True, STEPS)
    assert site["reward_last"] > 2 * site["reward_first"]


def test_every_rollout_that_a_tool_failed_is_counted_by_kind_and_no_other_failed(run: Run) -> None:
    counted = {name: run.total(f"rollout/failed/{name}") for name in FAULTS}
    assert all(counted.values()), counted
    assert sum(counted.values()) == run.total("rollout/failed")
    assert run.total("rollout/failed") < 0.2 * run.total("rollout/count")


def test_calls_errors_by_kind_turns_and_seconds_a_call_are_among_the_metrics(run: Run) -> None:
    kinds = Counter[str]()
    for record in run.rollouts:
        kinds.update({name: value for name, value in record.items() if name.startswith("tools/errors/")})
    assert kinds["tools/errors/unknown_tool"] > 0 and kinds["tools/errors/bad_arguments"] > 0
    assert sum(kinds.values()) == run.total("tools/errors") < run.total("tools/calls")
    assert all(1.0 <= record["rollout/turns"] <= 5.0 for record in run.rollouts)
    assert all(record["tools/call_s"] >= 0.0 for record in run.rollouts if record.get("tools/calls"))


def test_nothing_leaks(run: Run) -> None:
    early, late = run.descriptors
    assert late < early + 60, "a hanging thread keeps three until its tool returns, and one in sixty hangs"
    assert not [process for process in psutil.process_iter(["cmdline"]) if _belongs(process, run)]


def _belongs(process: psutil.Process, run: Run) -> bool:
    return any(str(run.paths.root) in part for part in process.info["cmdline"] or [])


def test_the_terminal_shows_a_rollout_before_and_after_and_the_command_shows_more(run: Run) -> None:
    assert run.printed.count("faulty: reward") == 2
    assert "site a step 0 faulty: reward" in run.printed
    shown = subprocess.run(
        [EXECUTABLE, "rollouts", str(run.paths.root), "--json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert shown.returncode == 0, shown.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in shown.stdout.splitlines()]
    assert lines and all(line["site"] == "a" and line["source"] == "faulty" for line in lines)
    assert any(message["calls"] for line in lines for message in line["messages"])
