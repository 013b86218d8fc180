"""A replica's own output holds no secret that it was given, whoever writes it and however it is cut."""

import os
import subprocess
import sys

from composer_prime.executors.launching import SECRET_NAMES_VARIABLE

TOKEN = "tok-9f8e7d6c5b4a"
PROGRAM = """
import os, subprocess, sys
from composer_prime.executors.redacting import redacted_output
print("before", flush=True)
with redacted_output():
    exec(sys.argv[1])
print("after")
"""


def said(body: str, **variables: str) -> list[str]:
    """The lines of a process whose output is redacted while it runs `body`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, body],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def given(**secrets: str) -> dict[str, str]:
    return {**secrets, SECRET_NAMES_VARIABLE: ",".join(secrets)}


def test_what_the_process_itself_writes_is_redacted_on_both_outputs() -> None:
    body = "print('out', os.environ['TOKEN']); print('err', os.environ['TOKEN'], file=sys.stderr)"
    lines = said(body, **given(TOKEN=TOKEN))
    assert sorted(lines[1:3]) == ["err [redacted]", "out [redacted]"]
    assert (lines[0], lines[-1]) == ("before", "after")


def test_what_its_children_write_is_redacted() -> None:
    body = "subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"TOKEN\"], 1)'], check=True)"
    assert said(body, **given(TOKEN=TOKEN)) == ["before", "[redacted] 1", "after"]


def test_a_secret_in_two_writes_is_redacted_and_one_that_only_begins_is_not() -> None:
    body = "os.write(1, b'a tok-9f8e'); os.write(1, b'7d6c5b4a b\\n'); os.write(1, b'tok-9f')"
    assert said(body, **given(TOKEN=TOKEN)) == ["before", "a [redacted] b", "tok-9fafter"]


def test_without_secrets_nothing_stands_between() -> None:
    assert said("print(os.environ['TOKEN'])", TOKEN=TOKEN) == ["before", TOKEN, "after"]
