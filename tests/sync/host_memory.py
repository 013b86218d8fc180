"""What two sites' outer loops take of host memory, in bytes a parameter: `python -m tests.sync.host_memory`.

The peaks in docs/prime-rl.md; `plan.memory.outer_bytes` counts what lies there between rounds. Each site is a process
on a CPU that moves its parameters by random numbers. What Python and torch grow by as they join counts too: about
65 MB, which large models don't see.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composer_prime.store import open_store
from composer_prime.sync.journal import FileJournal
from composer_prime.sync.ranked_loop import RankedLoop
from composer_prime.sync.ranks import Ranks
from composer_prime.sync.site_clock import OuterLoop
from tests.sync.harness import make_terms

TENSORS = 16


def resident(peak: bool = True) -> int:
    """Bytes of this process, now or at most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def forget_peak() -> None:
    """Measure anew from here."""
    Path("/proc/self/clear_refs").write_text("5")


def site(folder: Path, name: str, numel: int, terms: dict[str, Any]) -> None:
    """Train to the run's end, save a checkpoint, and print the peaks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.ranks", rank=0, world_size=1)
    moves = torch.Generator().manual_seed(ord(name))
    values = [(0.02 * torch.randn(numel // TENSORS)).bfloat16().float() for _ in range(TENSORS)]
    named = [(f"model.layers.{place}.w", torch.nn.Parameter(value)) for place, value in enumerate(values)]

    def opened() -> OuterLoop:
        journal = FileJournal(folder / f"{name}.journal")
        return OuterLoop(open_store(str(folder / "bucket")), make_terms(**terms), run="r", site=name, journal=journal)

    loop = RankedLoop(Ranks(), opened)
    before = resident(peak=False)
    peaks = []
    loop.join(named)
    stop = False
    while not stop:
        forget_peak()
        with torch.no_grad():
            for _, parameter in named:
                parameter.add_(1e-3 * torch.randn(parameter.shape, generator=moves))
        stop = loop.after_inner_step(100, 1).stop
        peaks.append(resident())
    torch.save(loop.state_dict(), folder / f"{name}.pt")
    closing = resident()
    loop.close()
    print(
        f"site {name}: {(max(peaks[:-1]) - before) / numel:.1f} training, {(closing - before) / numel:.1f} at the end"
    )


def main() -> None:
    """Both sites, or one of them where its name is given."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--millions", type=int, default=16)
    asked.add_argument("--fragments", type=int, default=4)
    asked.add_argument("--momentum", type=float, default=0.0)
    asked.add_argument("--site", nargs=2, metavar=("FOLDER", "NAME"))
    given = asked.parse_args()
    terms = {"fragments": given.fragments, "inner_steps": 2 * given.fragments, "momentum": given.momentum}
    if given.site is not None:
        folder, name = given.site
        site(Path(folder), name, given.millions * 10**6, {**terms, "codec": "int8", "quorum": 2})
        return
    print(json.dumps({**terms, "millions": given.millions}))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.sync.host_memory", *sys.argv[1:], "--site", folder]
        sites = [subprocess.Popen([*command, name]) for name in "ab"]
        for one in sites:
            one.wait()


if __name__ == "__main__":
    main()
