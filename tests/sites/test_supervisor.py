"""A site's life under its supervisor, with stand-in roles: ends, crashes, restarts, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.config.settings import WITHOUT_WEIGHTS, SiteSettings
from composer_prime.errors import BadInput, ProcessCrashed
from composer_prime.metrics import SITE_WALL_S, read_tape
from composer_prime.sites.embedded.supervisor import (
    MAX_RESTARTS,
    ROLES,
    SiteState,
    SiteSupervisor,
    Verdict,
    judge_exit,
)
from tests.patience import wait_until
from tests.sites.fake_site import all_gone, fake_roles, is_gone, pid_of, settle


def lived(tmp_path: Path, **roles: str) -> SiteSupervisor:
    """A site whose roles do so, followed to its end."""
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles(**roles))
    supervisor.start()
    wait_until(lambda: (supervisor.poll(), supervisor.state is not SiteState.RUNNING)[1], "the site ends")
    return supervisor


@pytest.mark.parametrize(
    ("role", "code", "restarts", "has_result", "verdict"),
    [
        ("trainer", 0, 0, True, Verdict.FINISHED),
        ("trainer", 0, 0, False, Verdict.CRASHED),
        ("trainer", 1, 0, True, Verdict.CRASHED),
        ("trainer", -9, 0, False, Verdict.CRASHED),
        ("trainer", 2, 0, False, Verdict.BAD_INPUT),
        ("orchestrator", 0, 0, False, Verdict.CRASHED),
        ("orchestrator", 1, 0, True, Verdict.EXPECTED),
        ("orchestrator", 2, 0, False, Verdict.BAD_INPUT),
        ("inference", -9, 0, False, Verdict.RESTART),
        ("inference", 0, MAX_RESTARTS - 1, False, Verdict.RESTART),
        ("inference", 1, MAX_RESTARTS, False, Verdict.CRASHED),
        ("inference", 2, 0, False, Verdict.BAD_INPUT),
        ("inference", -9, MAX_RESTARTS, True, Verdict.EXPECTED),
    ],
)
def test_what_an_exit_means(role: str, code: int, restarts: int, has_result: bool, verdict: Verdict) -> None:
    assert judge_exit(role, code, restarts, has_result) is verdict


def test_a_site_is_done_when_its_trainer_leaves_a_result(tmp_path: Path) -> None:
    supervisor = lived(tmp_path, trainer="steps=4 ending=result")
    assert supervisor.state is SiteState.DONE and supervisor.error is None
    assert all_gone([child.pid for child in supervisor.children.values()])
    assert read_tape(supervisor.paths.tape("supervisor"))[0][SITE_WALL_S] > 0


def test_an_old_result_does_not_end_a_resumed_site(tmp_path: Path) -> None:
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles())
    supervisor.paths.root.mkdir(parents=True)
    supervisor.paths.result.write_text("{}")
    supervisor.start()
    assert not supervisor.paths.result.exists()
    supervisor.stop()


def settle_without_weights(tmp_path: Path) -> SiteSettings:
    """As `settle`, for a site whose weights are the run's masters."""
    settings = settle(tmp_path)
    settings.model_dir.mkdir()
    (settings.model_dir / WITHOUT_WEIGHTS).touch()
    return settings


def test_a_trainer_that_fetches_its_weights_has_the_cores_until_it_has_loaded(tmp_path: Path) -> None:
    supervisor = SiteSupervisor(settle_without_weights(tmp_path), command=fake_roles())
    supervisor.paths.root.mkdir(parents=True)
    supervisor.paths.loaded.touch()  # by the trainer of an earlier start
    supervisor.start()
    supervisor.poll()
    assert list(supervisor.children) == ["trainer"]
    supervisor.paths.loaded.touch()
    supervisor.poll()
    assert set(supervisor.children) == set(ROLES)
    supervisor.stop()


def test_the_others_wait_no_longer_than_they_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.sites.embedded.supervisor.ALONE_S", 0.2)
    supervisor = SiteSupervisor(settle_without_weights(tmp_path), command=fake_roles())
    supervisor.start()
    wait_until(lambda: (supervisor.poll(), len(supervisor.children) == len(ROLES))[1], "all are started")
    assert not supervisor.paths.loaded.exists()
    supervisor.stop()


@pytest.mark.parametrize("role", ["orchestrator", "trainer"])
def test_a_crash_names_role_code_and_last_lines_and_ends_the_site(tmp_path: Path, role: str) -> None:
    supervisor = lived(tmp_path, **{role: "ending=exit:3"})
    assert supervisor.state is SiteState.FAILED
    assert isinstance(supervisor.error, ProcessCrashed)
    first, *lines = str(supervisor.error).splitlines()
    assert f"a/{role} ended with exit code 3" in first and str(supervisor.paths.log(role)) in first
    assert len(lines) == 20
    assert "line 24" in str(supervisor.error)
    assert all_gone([child.pid for child in supervisor.children.values()])


@pytest.mark.parametrize("role", ROLES)
def test_exit_code_2_is_bad_input_in_the_words_of_the_role(tmp_path: Path, role: str) -> None:
    supervisor = lived(tmp_path, **{role: "ending=exit:2"})
    assert isinstance(supervisor.error, BadInput)
    assert str(supervisor.error) == f"a/{role}: widget (7) must be at most 3: lower it"


def test_a_killed_inference_comes_back(tmp_path: Path) -> None:
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles())
    supervisor.start()
    first = pid_of(supervisor.paths, "inference")
    (supervisor.paths.root / "pids" / "inference").unlink()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: (supervisor.poll(), supervisor.num_restarts["inference"])[1], "it is started again")
    assert pid_of(supervisor.paths, "inference") == supervisor.children["inference"].pid != first
    assert supervisor.state is SiteState.RUNNING
    supervisor.stop()


def test_an_inference_that_keeps_crashing_ends_the_site(tmp_path: Path) -> None:
    supervisor = lived(tmp_path, inference="ending=exit:1")
    assert isinstance(supervisor.error, ProcessCrashed) and "a/inference" in str(supervisor.error)
    assert supervisor.num_restarts["inference"] == MAX_RESTARTS


def test_stopping_ends_the_trainer_before_the_others(tmp_path: Path) -> None:
    supervisor = SiteSupervisor(settle(tmp_path), command=fake_roles())
    supervisor.start()
    pids = [pid_of(supervisor.paths, role) for role in ROLES if role != "inference"]
    supervisor.stop()
    assert supervisor.state is SiteState.STOPPED
    ended = {role: float((supervisor.paths.root / "ended" / role).read_text()) for role in ("trainer", "orchestrator")}
    assert ended["trainer"] < ended["orchestrator"]
    assert all_gone(pids) and is_gone(supervisor.children["inference"].pid)


def test_a_supervisor_killed_with_sigkill_leaves_no_process(tmp_path: Path) -> None:
    code = f"""
import time; from pathlib import Path
from composer_prime.sites.embedded.supervisor import SiteSupervisor
from tests.sites.fake_site import fake_roles, settle
SiteSupervisor(settle(Path({str(tmp_path)!r})), command=fake_roles(trainer="ending=stubborn")).start()
time.sleep(600)
"""
    paths = settle(tmp_path).paths
    with subprocess.Popen([sys.executable, "-c", code]) as killed:
        pids = [pid_of(paths, role) for role in ROLES]
        assert not any(is_gone(pid) for pid in pids)
        killed.kill()
    wait_until(lambda: all_gone(pids), "all roles are gone")


def test_a_site_runs_once_in_its_folder(tmp_path: Path) -> None:
    first, second = (SiteSupervisor(settle(tmp_path), command=fake_roles()) for _ in range(2))
    first.start()
    with pytest.raises(BadInput, match="site a is already running"):
        second.start()
    second.stop()
    assert first.state is SiteState.RUNNING and first.children["trainer"].poll() is None
    first.stop()
    second.start()
    second.stop()
