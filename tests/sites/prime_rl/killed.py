"""Kills a program by kill -9 when it is about to do one thing: `python -m tests.sites.prime_rl.killed EVENT FILE ...`.

What follows is its module and arguments. EVENT is one of Python's audit events, which come before the thing is done;
FILE is a pattern of a path in it.
"""

import os
import re
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.sites.prime_rl.checkpoints import newest_whole
from tests.sites.prime_rl.launched import Launched


@dataclass(frozen=True)
class Stage:
    """Where in the save of a step the trainer is killed, in Python's audit events.

    event, file   what it is about to do; {step}: the one that is saved; {old}: the one before, whose checkpoint goes
    is_whole      whether that step can be resumed from
    """

    event: str
    file: str
    is_whole: bool

    def within(self, step: int, old: int) -> tuple[str, ...]:
        """As what a trainer runs that shall be killed."""
        return "tests.sites.prime_rl.killed", self.event, self.file.format(step=step, old=old)


STAGES = {
    "before ours": Stage("os.remove", r"step_{step}/trainer/\.metadata$", False),
    "ours begun": Stage("os.rename", r"outer/step_{step}\.pt$", False),
    "between ours and upstream's": Stage("os.mkdir", r"step_{step}(/trainer)?$", False),
    "upstream's begun": Stage("open", r"step_{step}/trainer/(__0_0\.distcp|rank_0\.pt)$", False),
    "upstream's all but whole": Stage("os.rename", r"step_{step}/trainer/\.metadata$", False),
    "upstream's whole": Stage("os.rename", r"outer/step_{step}\.files$", True),
    "an old one half deleted": Stage("shutil.rmtree", r"step_{old}$", True),
}
"""The next save's "before ours" is after all of this one."""


def orchestrator_has_shipped(checkpoints: Path, last: int) -> None:
    """Lay down what upstream's orchestrator does when it has sent the batches up to this step."""
    for step in range(1, last + 1):
        file = checkpoints / f"step_{step}" / "orchestrator" / "progress.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def newest(checkpoints: Path) -> int | None:
    """The step from which our launcher resumes."""
    return newest_whole(checkpoints, checkpoints)


def check_refused(trainer: Launched, step: int, instead: int) -> None:
    """The trainer, which was to resume from this step, has ended with the one line that names another."""
    code, output = trainer.wait()
    said = [line for line in output.splitlines() if line.startswith("composer-prime: ")]
    assert code == 2 and len(said) == 1 and said[0].endswith(f"resume from step {instead}, which is"), output
    assert f"checkpoints/step_{step} isn't whole" in said[0] and "Traceback" not in output


def _die_before(event: str, file: str) -> None:
    def about_to(name: str, args: tuple[Any, ...]) -> None:
        paths = [os.fsdecode(at) for at in args if isinstance(at, str | os.PathLike)]
        if name != event or not any(re.search(file, path) for path in paths):
            return
        if name == "shutil.rmtree":  # in an order that the disk gives: the worst is that .metadata comes last
            for old in Path(paths[0]).rglob("*"):
                if old.is_file() and old.name != ".metadata":
                    old.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(about_to)


if __name__ == "__main__":
    _die_before(*sys.argv[1:3])
    sys.argv[:3] = []
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
