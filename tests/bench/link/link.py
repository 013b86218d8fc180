"""`python -m tests.bench link`: how much of their time sites train when real links of limited rate lie between them.

Every site is a process in a network namespace of its own, its cable shaped both ways; the bucket is a real S3 server.
An inner step is a timed wait, so that the cores serve the outer loop. Needs root and iproute2.
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from composer_prime.errors import BadInput
from composer_prime.outer.codecs import get_codec
from composer_prime.plan.traffic import Traffic, seconds, traffic
from composer_prime.sync.terms import Terms
from tests.bench.cells import measure_cells
from tests.bench.link.network import HUB_ADDRESS, Network, network
from tests.bench.link.process import SiteProcess, started
from tests.bench.link.site import SiteTask
from tests.servers import S3Server
from tests.servers.weed import BUCKET, seaweed

FINISH_S = 20.0
"""Cells whose closing round takes longer are not brought to an end; masters are compared where they stand."""


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    rate_mbit     of each site's link, each way
    inner_steps, fragments, sync_delay   H, P, tau
    params        fp32 parameters of each site
    step_s        seconds of an inner step
    rounds        measured, after one that warms up
    """

    rate_mbit: float
    codec: str
    inner_steps: int
    sync_delay: int
    fragments: int = 4
    sites: int = 4
    params: int = 30_800_000
    step_s: float = 0.03
    rounds: int = 3

    def numels(self) -> list[int]:
        """Parameters of each fragment."""
        blocks, params = self.fragments, self.params
        return [params * (block + 1) // blocks - params * block // blocks for block in range(blocks)]

    def traffic(self) -> Traffic:
        """What a site moves in a round, as `plan` counts it."""
        return traffic(Terms(**self.terms()), self.numels(), self.sites)

    @property
    def bound_s(self) -> float:
        """Seconds of a round that nothing can beat: the training, or the more loaded way of the link."""
        moved = self.traffic()
        return max(
            self.inner_steps * self.step_s,
            seconds(moved.up_bytes, self.rate_mbit),
            seconds(moved.down_bytes, self.rate_mbit),
        )

    def terms(self) -> dict[str, Any]:
        """The run's terms: snapshots are put off, since they would compete for the link."""
        return {
            "inner_steps": self.inner_steps,
            "fragments": self.fragments,
            "sync_delay": self.sync_delay,
            "lr": 1.0,
            "momentum": 0.0,
            "codec": self.codec,
            "quorum": self.sites,
            "grace_s": 600.0,
            "liveness_s": 60.0,
            "max_stale_rounds": 8,
            "snapshot_rounds": 10**6,
            "rounds": self.rounds + 2,
        }


@dataclass(frozen=True)
class Measured:
    """What came out of a cell: medians over its sites, for one round of all fragments.

    up_bytes, down_bytes   of objects
    wire_up, wire_down     as the cable counted them
    turn_s, wait_s         seconds of the training thread at due steps, and where it waits for the round it is in
    other_s, late_s        at other steps, and by which timed waits came back too late
    cpu_s                  of a site's process
    masters_equal          whether masters of one version were the same at all sites, as far as they could be compared
    load                   of the machine when the cell ended
    """

    round_s: float
    utilisation: float
    up_bytes: float
    down_bytes: float
    wire_up: float
    wire_down: float
    turn_s: float
    wait_s: float
    other_s: float
    late_s: float
    cpu_s: float
    masters_equal: bool
    load: float


def main(cells: Sequence[Cell], json_path: Path | None = None) -> None:
    """Measure the cells one after another and print a table that grows. Raises BadInput where that can't be."""
    console = measure_cells(cells, measure, draw, _record, json_path)
    console.print("per round of all fragments and site; snapshots put off")


def grid(
    rates: Sequence[float],
    codecs: Sequence[str],
    inner_steps: Sequence[int],
    sync_delays: Sequence[int] | None = None,
    **same: Any,
) -> list[Cell]:
    """A cell for every combination; no delays: the most there is, H / P - 1. A longer one is refused."""
    cells = []
    for codec in codecs:
        get_codec(codec)
    for steps, codec, rate in itertools.product(inner_steps, codecs, rates):
        fragments = same.get("fragments", Cell.fragments)
        for delay in sync_delays or [max(steps // fragments - 1, 0)]:
            if steps % fragments or delay >= steps // fragments:
                raise BadInput(
                    f"--sync-delay ({delay}) must be smaller than --inner-steps / --fragments ({steps} / {fragments}), "
                    "a whole number: lower the delay or sync less often"
                )
            cells.append(Cell(rate, codec, steps, delay, **same))
    return cells


def measure(cell: Cell, finish: bool | None = None) -> Measured:
    """Run one cell; `finish`: to the run's very end, None: where that is quick. Raises BadInput, SiteError."""
    names = [chr(ord("a") + number) for number in range(cell.sites)]
    if finish is None:
        moved = cell.traffic()
        finish = seconds(moved.up_bytes, cell.rate_mbit) + seconds(moved.down_bytes, cell.rate_mbit) < FINISH_S
    with tempfile.TemporaryDirectory(prefix="bench-link-") as kept, network(names) as net:
        folder = Path(kept)
        with seaweed(folder / "s3", host=HUB_ADDRESS, inside=net.at_hub()) as server:
            reports = _run_sites(cell, net, server, folder, names, finish)
    return _summed(cell, reports, finish)


def _run_sites(
    cell: Cell, net: Network, server: S3Server, folder: Path, names: Sequence[str], finish: bool
) -> list[dict[str, Any]]:
    """Start the sites, shape their links once all have joined, and hear what they measured."""
    with contextlib.ExitStack() as stack:
        sites: list[SiteProcess] = []
        for name in names:
            task = SiteTask(
                site=name,
                store=f"s3://{BUCKET}/link",
                folder=str(folder),
                terms=cell.terms(),
                params=cell.params,
                step_s=cell.step_s,
                warmup_steps=cell.inner_steps,
                steps=cell.rounds * cell.inner_steps,
                finish=finish,
            )
            module = "tests.bench.link.site"
            sites.append(stack.enter_context(started(module, task, net, server, folder)))
            if name == names[0]:
                sites[0].hear()  # it creates the run; the others would upload the same masters
        for site in sites[1:]:
            site.hear()
        net.shape(cell.rate_mbit)
        for site in sites:
            site.tell()
        reports = [site.hear() for site in sites]
        for site in sites:
            site.tell()
        return reports


def _summed(cell: Cell, reports: Sequence[dict[str, Any]], finish: bool) -> Measured:
    def median(name: str) -> float:
        return statistics.median(report[name] for report in reports) / cell.rounds

    round_s = median("at_s")
    return Measured(
        round_s=round_s,
        utilisation=cell.inner_steps * cell.step_s / round_s,
        up_bytes=median("object_up"),
        down_bytes=median("object_down"),
        wire_up=median("wire_up"),
        wire_down=median("wire_down"),
        turn_s=median("turn_s"),
        wait_s=median("wait_s"),
        other_s=median("other_s"),
        late_s=median("late_s"),
        cpu_s=median("cpu_s"),
        masters_equal=masters_equal([report["masters"] for report in reports], finish),
        load=os.getloadavg()[0],
    )


def masters_equal(masters: Sequence[Sequence[Sequence[Any]]], finish: bool) -> bool:
    """Whether sites that hold the same version of a fragment hold the same bytes; with `finish`, all do."""
    for of_fragment in zip(*masters, strict=True):
        shas: dict[int, set[str]] = {}
        for version, sha in of_fragment:
            shas.setdefault(version, set()).add(sha)
        if any(len(found) > 1 for found in shas.values()) or (finish and len(shas) > 1):
            return False
    return True


def draw(results: Sequence[tuple[Cell, Measured]]) -> Table:
    """A line a cell."""
    table = Table(title=_title([cell for cell, _ in results]), title_justify="left")
    for column in ("Mbit/s", "H", "tau", "codec"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    numbers = ("MB up", "MB down", "wire up", "wire down", "bound s", "round s", "stall s", "late s")
    for column in (*numbers, "CPU s", "utilisation", "masters", "load"):
        table.add_column(column, justify="right")
    for cell, found in results:
        table.add_row(
            f"{cell.rate_mbit:g}",
            str(cell.inner_steps),
            str(cell.sync_delay),
            cell.codec,
            *(f"{value / 1e6:.2f}" for value in (found.up_bytes, found.down_bytes, found.wire_up, found.wire_down)),
            f"{cell.bound_s:.2f}",
            f"{found.round_s:.2f}",
            f"{found.turn_s + found.wait_s + found.other_s:.2f}",
            f"{found.late_s:.2f}",
            f"{found.cpu_s:.2f}",
            f"{found.utilisation:.1%}",
            "equal" if found.masters_equal else "DIFFER",
            f"{found.load:.1f}",
        )
    return table


def _title(cells: Sequence[Cell]) -> str:
    first = cells[0]
    return (
        f"{first.sites} sites, {first.params / 1e6:.1f} M parameters in {first.fragments} fragments, "
        f"inner steps of {first.step_s * 1000:.0f} ms"
    )


def _record(cell: Cell, found: Measured) -> dict[str, Any]:
    return {"cell": asdict(cell), "measured": asdict(found), "traffic": asdict(cell.traffic()), "at": time.time()}
