"""A child's output, its end, and above all that nothing of it outlives whoever started it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.redaction import HIDDEN, SECRET_NAMES_VARIABLE
from composer_prime.sites.embedded.processes import Child, answer_of, stop, tail
from tests.patience import PATIENCE_S, wait_until
from tests.sites.fake_site import is_gone

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + SLEEP


def start(log: Path, code: str) -> Child:
    return Child("test", [sys.executable, "-c", code], log, env={"COLOR": "teal"})


def test_both_outputs_go_to_the_log_and_the_environment_is_added_to(tmp_path: Path) -> None:
    child = start(tmp_path / "logs" / "x.log", "import os, sys; print(os.environ['COLOR']); sys.exit('gone wrong')")
    assert child.wait(PATIENCE_S) == 1
    assert sorted(child.tail()) == ["gone wrong", "teal"]


def test_a_tail_holds_only_what_this_process_wrote(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    start(log, "print('first')").wait(PATIENCE_S)
    second = start(log, "print(); [print('second', n) for n in range(30)]")
    second.wait(PATIENCE_S)
    assert tail(log, 100)[0] == "first"
    assert second.tail(100) == [f"second {n}" for n in range(30)]
    assert second.tail() == [f"second {n}" for n in range(10, 30)]


TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"


@pytest.mark.parametrize("variables", [{"HF_TOKEN": TOKEN}, {"MINE": TOKEN, SECRET_NAMES_VARIABLE: "OTHER,MINE"}])
def test_no_secret_of_its_environment_is_in_its_log_which_is_whole_at_its_end(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    code = """
import os, subprocess, sys
token = next(value for value in os.environ.values() if value.startswith("hf_AbC"))
for n in range(5_000):
    print(n, token, token[:8], file=(sys.stdout, sys.stderr)[n % 2], flush=n % 100 == 0)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", f"print('below', {token!r})"])
sys.exit("no " + token)
"""
    child = Child("test", [sys.executable, "-c", code], tmp_path / "x.log", env=variables)
    assert child.wait(PATIENCE_S) == 1
    text = (tmp_path / "x.log").read_text()
    assert TOKEN not in text
    lines = sorted(text.splitlines())
    assert lines == sorted([*(f"{n} {HIDDEN} {TOKEN[:8]}" for n in range(5_000)), f"below {HIDDEN}", f"no {HIDDEN}"])


def test_a_process_that_lost_its_supervisor_still_writes_a_log_without_secrets(tmp_path: Path) -> None:
    saying = """
import os, signal, time
def say(*_):
    print("told to end", os.environ["HF_TOKEN"], flush=True)
    raise SystemExit
signal.signal(signal.SIGTERM, say)
print("up", flush=True); time.sleep(600)
"""
    top = f"""
import signal; from pathlib import Path; from composer_prime.sites.embedded.processes import Child
log, env = Path({str(tmp_path / "x.log")!r}), {{"HF_TOKEN": {TOKEN!r}}}
child = Child("orphan", [{sys.executable!r}, "-c", {saying!r}], log, env=env, orphan=signal.SIGTERM)
{SLEEP}
"""
    with subprocess.Popen([sys.executable, "-c", top]) as killed:
        wait_until(lambda: tail(tmp_path / "x.log", 1), "the child runs")
        killed.kill()
    wait_until(lambda: len(tail(tmp_path / "x.log", 2)) == 2, "it said that it was told to end")
    assert tail(tmp_path / "x.log", 9) == ["up", f"told to end {HIDDEN}"]


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    child = start(tmp_path / "x.log", STUBBORN)
    wait_until(lambda: child.tail() == ["deaf"], "the child ignores SIGTERM")
    stop([child], grace_s=0.1)
    assert child.poll() == -signal.SIGKILL
    assert is_gone(child.pid)


def test_what_a_process_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    child = start(tmp_path / "x.log", code)
    assert child.wait(PATIENCE_S) == 0
    left_behind = int(child.tail()[0])
    wait_until(lambda: is_gone(left_behind), "the group is killed")


def test_two_processes_of_one_log_that_run_at_once_each_give_their_own_answer(tmp_path: Path) -> None:
    log, second, may_end = tmp_path / "model.log", [], tmp_path / "may end"

    def meanwhile() -> bool:
        if not second:
            second.append(answer_of("model", [sys.executable, "-c", "print('/other')"], log))
            may_end.touch()
        return False

    code = f"import os, time\nwhile not os.path.exists({str(may_end)!r}): time.sleep(0.01)\nprint('/model')"
    assert answer_of("model", [sys.executable, "-c", code], log, is_stopped=meanwhile) == "/model\n"
    assert second == ["/other\n"]
    assert [file.name for file in tmp_path.glob("model*")] == ["model.log"]
