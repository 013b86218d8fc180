"""A replica's own output holds no secret that it was given, whoever writes it and however it is cut."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from composer_prime.redaction import SECRET_NAMES_VARIABLE
from tests.patience import PATIENCE_S

TOKEN = "tok-9f8e7d6c5b4a"
PROGRAM = """
import os, subprocess, sys
from composer_prime.cli import main
from composer_prime.launch.redacting import redact_output
def command():
    print("before", flush=True)
    redact_output()
    exec(sys.argv[1])
    print("after")
main.app = command
main.main()
"""
"""As `composer-prime replica` runs a site."""


def ran(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python's end with these arguments; both its outputs are one."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )


def said(body: str, **variables: str) -> list[str]:
    """The lines of a process whose output is redacted while it runs `body`."""
    done = ran("-c", PROGRAM, body, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def given(**secrets: str) -> dict[str, str]:
    return {**secrets, SECRET_NAMES_VARIABLE: ",".join(secrets)}


def test_what_the_process_itself_writes_is_redacted_on_both_outputs() -> None:
    body = "print('out', os.environ['TOKEN']); print('err', os.environ['TOKEN'], file=sys.stderr)"
    lines = said(body, **given(TOKEN=TOKEN))
    assert sorted(lines[1:3]) == ["err [redacted]", "out [redacted]"]
    assert (lines[0], lines[-1]) == ("before", "after")


def test_an_access_key_s_id_is_a_name_and_stays() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "composer", "AWS_SECRET_ACCESS_KEY": "composed-secret", "AWS_SESSION_TOKEN": TOKEN}
    body = "print('composer-prime replica', os.environ['AWS_SECRET_ACCESS_KEY'], os.environ['AWS_SESSION_TOKEN'])"
    assert said(body, **given(**keys)) == ["before", "composer-prime replica [redacted] [redacted]", "after"]


def test_what_is_no_secret_stays() -> None:
    assert said("print(os.environ['WORD'])", WORD=TOKEN) == ["before", TOKEN, "after"]


@pytest.mark.parametrize(
    ("raised", "code", "begins"),
    [
        ("RuntimeError('at https://u:' + os.environ['TOKEN'] + '@host')", 1, "Traceback"),
        ("errors.BadInput('no ' + os.environ['TOKEN'])", 2, "composer-prime: no [redacted]"),
        ("errors.ExecutorError('no ' + os.environ['TOKEN'])", 1, "composer-prime: no [redacted]"),
        ("SystemExit('no ' + os.environ['TOKEN'])", 1, "no [redacted]"),
        ("KeyboardInterrupt(os.environ['TOKEN'])", -signal.SIGINT, "Traceback"),
        ("SystemExit(7)", 7, ""),
    ],
)
def test_an_error_is_printed_without_the_secret_that_its_text_holds(raised: str, code: int, begins: str) -> None:
    done = ran("-c", PROGRAM, f"from composer_prime import errors\nraise {raised}", **given(TOKEN=TOKEN))
    assert done.returncode == code and TOKEN not in done.stdout
    before, *error = done.stdout.splitlines()
    assert before == "before" and "".join(error[:1]).startswith(begins)
    assert not error or "[redacted]" in error[-1]


def test_a_replica_that_is_refused_says_why_in_one_line_without_the_secret(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/{TOKEN}"
    arguments = ("replica", uri, "--launch", "1", "--site", "a", "--attempt", "1", "--recipe", "0" * 64)
    done = ran("-m", "composer_prime.cli.main", *arguments, **given(TOKEN=TOKEN))
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("composer-prime: ") and "/[redacted] holds no launch" in line


def test_a_process_that_was_left_behind_keeps_nobody_and_the_end_is_not_lost() -> None:
    body = (
        "from composer_prime.launch import redacting; redacting.DRAIN_S = 0.5\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(left.pid, flush=True); os.write(1, b'the end: tok-9f')"
    )
    _, pid, end = said(body, **given(TOKEN=TOKEN))
    assert end == "the end: tok-9fafter"
    assert psutil.pid_exists(int(pid)), "it went on without waiting for that process"
    os.kill(int(pid), signal.SIGKILL)
