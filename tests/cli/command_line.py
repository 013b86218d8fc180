"""Runs the command line inside the test's process, as the console script does."""

import sys
from dataclasses import dataclass

import pytest

from composer_prime.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What a command printed, and the code it ended with."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Answer:
    """Run `composer-prime <arguments>`."""
    monkeypatch.setattr(sys, "argv", ["composer-prime", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    code = ended.value.code
    return Answer(code if isinstance(code, int) else int(code is not None), printed.out, printed.err)


def assert_refused(answer: Answer, *parts: str) -> None:
    """One line on standard error that holds the parts, exit code 2, nothing else."""
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
    assert answer.err.startswith("composer-prime: ") and all(part in answer.err for part in parts), answer.err
