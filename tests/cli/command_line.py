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
