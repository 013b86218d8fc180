"""`python -m tests.bench join`: how long a site that comes late takes to its first contribution, over a slow real link.

Two sites on fast links make some rounds; a third, in a network namespace of its own behind a shaped cable, then starts.
Counted from the start of its process. The bucket is a real S3 server. Needs root and iproute2.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from composer_prime.errors import BadInput
from composer_prime.outer.codecs import get_codec
from tests.bench.cells import measure_cells
from tests.bench.join.site import JoinTask
from tests.bench.link.link import masters_equal
from tests.bench.link.network import HUB_ADDRESS, Network, network
from tests.bench.link.process import SiteProcess, started
from tests.servers import S3Server
from tests.servers.weed import BUCKET, seaweed

FOUNDERS, JOINER = ("a", "b"), "c"
ENDLESS = 10**6
"""Rounds that the run would have: it is never brought to its end."""


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    after_rounds   of every fragment that have closed when the third site starts
    own_weights    whether it has the weights that the run started from, as who has the model's files does
    rate_mbit      of its link, each way
    inner_steps, fragments, sync_delay   H, P, tau
    step_s         seconds of an inner step, a timed wait
    """

    after_rounds: int
    own_weights: bool
    rate_mbit: float = 10.0
    codec: str = "topk"
    inner_steps: int = 128
    fragments: int = 4
    sync_delay: int = 31
    params: int = 30_800_000
    step_s: float = 0.03
    snapshot_rounds: int = 4

    def terms(self) -> dict[str, Any]:
        """The run's terms: as recipes have them, but for the end."""
        return {
            "inner_steps": self.inner_steps,
            "fragments": self.fragments,
            "sync_delay": self.sync_delay,
            "lr": 0.7,
            "momentum": 0.0,
            "codec": self.codec,
            "quorum": 1,
            "grace_s": 600.0,
            "liveness_s": 60.0,
            "max_stale_rounds": 8,
            "snapshot_rounds": self.snapshot_rounds,
            "rounds": ENDLESS,
        }

    def task(self, site: str, folder: Path, after_rounds: int | None) -> JoinTask:
        """What one site does."""
        return JoinTask(
            site=site,
            store=f"s3://{BUCKET}/join",
            folder=str(folder),
            terms=self.terms(),
            params=self.params,
            step_s=self.step_s,
            after_rounds=after_rounds,
            own_weights=self.own_weights or site != JOINER,
            launched_at=time.monotonic(),
        )


@dataclass(frozen=True)
class Measured:
    """What came out, in seconds from the start of the joining process.

    imported_s, ready_s     its imports are done; it has its model and begins to join
    trains_s                it begins to train, if only as a learner
    joined_s                its parameters stand on the newest masters
    offered_s, merged_s     the record of its first offer stands; it has adopted a master with its work in it
    object_down, wire_down  bytes until it had joined: of objects, and as the cable counted them
    cpu_s                   of its process until then
    rounds                  that had closed by then, on the mean of the fragments
    begins                  from which masters it followed the log, by fragment
    """

    imported_s: float
    ready_s: float
    trains_s: float
    joined_s: float
    offered_s: float
    merged_s: float
    object_down: int
    wire_down: int
    cpu_s: float
    rounds: float
    begins: tuple[str, ...]
    masters_equal: bool
    load: float


def main(cells: Sequence[Cell], json_path: Path | None = None) -> None:
    """Measure the cells one after another and print a table that grows. Raises BadInput where that can't be."""
    measure_cells(cells, measure, draw, _record, json_path, notes=lambda found: found.begins)


def cells_of(after_rounds: Sequence[int], weights: Sequence[str], codecs: Sequence[str], **same: Any) -> list[Cell]:
    """A cell for every combination. Raises BadInput for an unknown codec or source of weights."""
    for name in weights:
        if name not in ("own", "bucket"):
            raise BadInput(f'--weights ({name}) must be "own" (the site has the model) or "bucket"')
    for codec in codecs:
        get_codec(codec)
    return [
        Cell(after, name == "own", codec=codec, **same)
        for codec in codecs
        for name in weights
        for after in after_rounds
    ]


def measure(cell: Cell) -> Measured:
    """Run one cell. Raises BadInput, SiteError."""
    with tempfile.TemporaryDirectory(prefix="bench-join-") as kept, network([*FOUNDERS, JOINER]) as net:
        folder = Path(kept)
        with seaweed(folder / "s3", host=HUB_ADDRESS, inside=net.at_hub()) as server, contextlib.ExitStack() as stack:
            founders = list(_found(cell, net, server, folder, stack))
            for site in founders:
                site.hear()
            net.shape(cell.rate_mbit, only=[JOINER])
            joiner = stack.enter_context(_start(cell.task(JOINER, folder, None), net, server, folder))
            said = [joiner.hear() for _ in range(3)]
            for site in (*founders, joiner):
                site.tell()
            masters = [site.hear()["masters"] for site in (*founders, joiner)]
            for site in (*founders, joiner):
                site.tell()
    found = {name: value for each in said for name, value in each.items()}
    rounds, begins = found.pop("rounds") / cell.fragments, tuple(found.pop("begins"))
    equal = masters_equal(masters, finish=False)
    return Measured(**found, rounds=rounds, begins=begins, masters_equal=equal, load=os.getloadavg()[0])


def _found(
    cell: Cell, net: Network, server: S3Server, folder: Path, stack: contextlib.ExitStack
) -> Iterator[SiteProcess]:
    """The two sites that are there first, each once it has joined: the first creates the run."""
    for name in FOUNDERS:
        site = stack.enter_context(_start(cell.task(name, folder, cell.after_rounds), net, server, folder))
        site.hear()
        yield site


def _start(task: JoinTask, net: Network, server: S3Server, folder: Path) -> contextlib.AbstractContextManager[Any]:
    return started("tests.bench.join.site", task, net, server, folder)


def draw(results: Sequence[tuple[Cell, Measured]]) -> Table:
    """A line a cell."""
    first = results[0][0]
    table = Table(
        title=f"a third site joins over {first.rate_mbit:g} Mbit/s; {first.params / 1e6:.1f} M parameters in "
        f"{first.fragments} fragments, H {first.inner_steps}, inner steps of {first.step_s * 1000:.0f} ms",
        title_justify="left",
    )
    for column in ("codec", "weights"):
        table.add_column(column)
    numbers = (
        "after rounds",
        "MB down",
        "wire MB",
        "bound s",
        "imports s",
        "trains s",
        "joined s",
        "offered s",
        "merged s",
    )
    for column in (*numbers, "at round", "CPU s", "masters", "load"):
        table.add_column(column, justify="right")
    for cell, found in results:
        table.add_row(
            cell.codec,
            "own" if cell.own_weights else "bucket",
            str(cell.after_rounds),
            f"{found.object_down / 1e6:.2f}",
            f"{found.wire_down / 1e6:.2f}",
            f"{found.object_down * 8 / (cell.rate_mbit * 1e6):.1f}",
            f"{found.imported_s:.1f}",
            f"{found.trains_s:.1f}",
            f"{found.joined_s:.1f}",
            f"{found.offered_s:.1f}",
            f"{found.merged_s:.1f}",
            f"{found.rounds:.1f}",
            f"{found.cpu_s:.1f}",
            "equal" if found.masters_equal else "DIFFER",
            f"{found.load:.1f}",
        )
    return table


def _record(cell: Cell, found: Measured) -> dict[str, Any]:
    return {"cell": asdict(cell), "measured": asdict(found)}
