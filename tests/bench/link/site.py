"""One site of `bench link`, a process in a network namespace: the real outer loop around timed inner steps.

    python -m tests.bench.link.site TASK.json

Says `{"joined": true}` on its standard output, starts at a line on its standard input, and says what it measured.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_prime.store import open_store
from composer_prime.sync.journal import FileJournal
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import Terms

COUNTERS = Path("/sys/class/net/eth0/statistics")


@dataclass(frozen=True)
class SiteTask:
    """What a site does.

    params         fp32 parameters in all, in as many equal blocks as the terms have fragments
    step_s         seconds an inner step takes: a timed wait
    warmup_steps   inner steps before the measured ones
    steps          measured inner steps; their first and their last end with a due one
    finish         whether the run is brought to its end after them, so that all masters are final
    """

    site: str
    store: str
    folder: str
    terms: dict[str, Any]
    params: int
    step_s: float
    warmup_steps: int
    steps: int
    finish: bool


@dataclass(frozen=True)
class Moment:
    """What had passed at one moment: seconds, CPU seconds of this process, bytes on the cable and of objects."""

    at_s: float
    cpu_s: float
    wire_up: int
    wire_down: int
    object_up: int
    object_down: int

    @classmethod
    def of(cls, loop: OuterLoop) -> "Moment":
        """Now."""
        summary, cpu = loop.summary(), os.times()
        sent, received = (int((COUNTERS / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
        used_s = cpu.user + cpu.system
        return cls(time.monotonic(), used_s, sent, received, summary["bytes_up"], summary["bytes_down"])

    def since(self, other: "Moment") -> dict[str, float]:
        """What has passed from that moment to this one."""
        return {field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)}


class Model:
    """Blocks that drift a little, each value once a round, by noise made beforehand: hardly any CPU is used."""

    def __init__(self, params: int, num_blocks: int, site: str) -> None:
        sizes = [params * (block + 1) // num_blocks - params * block // num_blocks for block in range(num_blocks)]
        alike = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(sum(site.encode()))
        self._blocks = {
            f"layers.{block}.weight": nn.Parameter(torch.randn(size, generator=alike) * 0.02)
            for block, size in enumerate(sizes)
        }
        spread = torch.empty(max(sizes)).exponential_(generator=own).sqrt_()
        self._noise = torch.randn(max(sizes), generator=own).div_(spread).mul_(1e-3)
        self._moved = 0

    def named_parameters(self) -> Mapping[str, Tensor]:
        """For the outer loop."""
        return self._blocks

    def drift(self, steps: int) -> None:
        """Move the next piece of a block, one of `steps` that make it whole, each time another way."""
        turn, piece = divmod(self._moved, steps)
        values = list(self._blocks.values())[turn % len(self._blocks)].data
        start, stop = values.numel() * piece // steps, values.numel() * (piece + 1) // steps
        cut = 7919 * self._moved % (self._noise.numel() - (stop - start) + 1)
        values[start:stop].add_(self._noise[cut : cut + stop - start])
        self._moved += 1


def main(path: Path) -> None:
    """Join, wait for the start, measure, and say what came out."""
    torch.set_num_threads(1)
    task = SiteTask(**json.loads(path.read_text()))
    terms = Terms(**task.terms)
    model = Model(task.params, terms.fragments, task.site)
    loop = OuterLoop(
        open_store(task.store), terms, run="link", site=task.site, journal=FileJournal(Path(task.folder) / task.site)
    )
    try:
        loop.join(list(model.named_parameters().items()))  # type: ignore[arg-type]
        say({"joined": True})
        if sys.stdin.readline():
            say(measure(loop, model, task, terms.steps_per_turn, terms.sync_delay))
            sys.stdin.readline()  # the others may still need this site's offers and its commits
    finally:
        loop.close()


def measure(loop: OuterLoop, model: Model, task: SiteTask, steps_per_turn: int, sync_delay: int) -> dict[str, Any]:
    """Train; what the measured steps took, and where the training thread lost time."""
    last = task.warmup_steps + task.steps
    lost = {"turn_s": 0.0, "wait_s": 0.0, "other_s": 0.0, "late_s": 0.0}
    first = Moment.of(loop)
    for step in range(1, last + 1):
        late_s = inner_step(model, task.step_s, steps_per_turn)
        report = loop.after_inner_step(1, 1)
        if step > task.warmup_steps:
            place = step % steps_per_turn
            lost["turn_s" if place == 0 else "wait_s" if place == sync_delay else "other_s"] += report.stall_s
            lost["late_s"] += late_s
        elif step == task.warmup_steps:
            first = Moment.of(loop)
    passed = Moment.of(loop).since(first)
    while task.finish and not loop.after_inner_step(1, 1).stop:
        pass
    summary = loop.summary()
    return {**passed, **lost, "masters": [(each["version"], each["sha256"]) for each in summary["masters"]]}


def inner_step(model: Model, step_s: float, steps_per_turn: int) -> float:
    """One inner step, a timed wait of `step_s` seconds; seconds that it took too long."""
    until = time.monotonic() + step_s
    model.drift(steps_per_turn)
    time.sleep(max(until - time.monotonic(), 0.0))
    return time.monotonic() - until


def say(record: dict[str, Any]) -> None:
    """Tell the bench one line."""
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
