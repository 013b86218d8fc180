"""`python -m tests.bench join-command`: how long a whole `composer-prime join` takes to its first offer.

The owner's site trains a real model on a fast link; the volunteer's whole command runs behind a shaped cable: its
checks, the model's files from a hub, three processes, masters, rollouts, inner steps. Needs root and iproute2.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from composer_prime.config.load import recipe_from_data
from composer_prime.config.paths import RunPaths, SitePaths
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, SiteError
from composer_prime.metrics import TRAIN_STEP_S, TRAIN_TRAIN_S, read_tape
from composer_prime.outer.codecs import get_codec
from composer_prime.sync.signatures import SigningKey
from tests.bench.cells import measure_cells
from tests.bench.join import hub as join_hub
from tests.bench.link.network import HUB_ADDRESS, Network, network
from tests.bench.link.site import COUNTERS
from tests.servers import S3Server
from tests.servers.weed import BUCKET, free_ports, seaweed

RUN, OWNER, VOLUNTEER = "slow-link", "a", "c"
ENVIRONMENT = "reverse-letters"
ENDLESS = 10**6
"""Inner steps that the run would have: it is never brought to its end."""
PATIENCE_S = 900.0
"""Longest that is waited for the owner's rounds, and for the volunteer."""
LOOK_S = 0.05
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
HUB_PLACES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
STEP_BACK = 5
"""Niceness of the owner's site: in truth it has a machine of its own. More, and whatever else runs would starve it."""


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    own_weights    whether the volunteer has the model's files already
    rate_mbit      of its link, each way
    inner_steps, fragments, sync_delay   H, P, tau
    batch_size     rollouts a step
    after_rounds   of every fragment that have closed when it starts
    model          of the model's sizes, what differs from `join_hub.CONFIG`
    """

    own_weights: bool
    rate_mbit: float = 10.0
    codec: str = "topk"
    inner_steps: int = 8
    fragments: int = 4
    sync_delay: int = 1
    batch_size: int = 4
    after_rounds: int = 5
    model: Mapping[str, int] | None = None

    def recipe(self, folder: Path, keys: Mapping[str, str]) -> dict[str, Any]:
        """The owner's recipe; `keys` are public, by name."""
        return {
            "run": {"name": RUN},
            "max_steps": ENDLESS,
            "output_dir": str(folder / "owner"),
            "model": {"name": join_hub.NAME},
            "orchestrator": {
                "batch_size": self.batch_size,
                "group_size": 2,
                "train": {
                    "sampling": {"max_completion_tokens": 4},
                    "filter_zero_advantages": False,  # random weights earn nothing
                    "source": [{"name": "letters", "env": {"taskset": {"id": ENVIRONMENT}}}],
                },
            },
            "trainer": {"optim": {"lr": 1e-5}, "loss": {"kwargs": {"kl_tau": 1e-3}}},
            "ckpt": {"interval": ENDLESS},
            "outer": {
                "store": f"s3://{BUCKET}",
                "inner_steps": self.inner_steps,
                "fragments": self.fragments,
                "sync_delay": self.sync_delay,
                "codec": self.codec,
                "owner": keys["owner"],
            },
            "site": {"name": OWNER, "key_file": str(folder / f"{OWNER}.key")},
        }


@dataclass(frozen=True)
class Measured:
    """What came out, in seconds from the start of `composer-prime join`.

    checked_s     the machine and the link are checked, and it has said who sees what
    launched_s    the model's files are there, and the site's three processes are being started
    joined_s      its parameters stand on the newest masters, which inference is told of
    stepped_s     its first inner step is done
    offered_s     the record of its first offer stands in the bucket
    merged_s      a commit has taken it
    steps         inner steps until the offer, H / P; `steps_s` from the join to the last one's end, of which `train_s`
                  the trainer computed; the rest is rollouts, and weights on their way to the inference server
    down, up      bytes that the cable counted until the offer stood; `joined_down` until it had joined
    params        of the model
    begins        from which masters it followed the log, by fragment
    """

    checked_s: float
    launched_s: float
    joined_s: float
    stepped_s: float
    offered_s: float
    merged_s: float
    steps: int
    steps_s: float
    train_s: float
    joined_down: int
    down: int
    up: int
    params: int
    rounds: int
    begins: tuple[str, ...]
    load: float


def main(cells: Sequence[Cell], json_path: Path | None = None) -> None:
    """Measure the cells one after another and print a table that grows. Raises BadInput where that can't be."""
    measure_cells(cells, measure, draw, _record, json_path, notes=_notes)


def cells_of(weights: Sequence[str], codecs: Sequence[str], **same: Any) -> list[Cell]:
    """A cell for every combination. Raises BadInput for an unknown codec or source of weights."""
    for name in weights:
        if name not in ("own", "bucket"):
            raise BadInput(f'--weights ({name}) must be "own" (the volunteer has the model\'s files) or "bucket"')
    for codec in codecs:
        get_codec(codec)
    return [Cell(name == "own", codec=codec, **same) for codec in codecs for name in weights]


def measure(cell: Cell) -> Measured:
    """Run one cell. Raises BadInput, SiteError."""
    with tempfile.TemporaryDirectory(prefix="bench-join-") as kept, network([OWNER, VOLUNTEER]) as net:
        folder = Path(kept)
        params = _make_model(cell, folder)
        with seaweed(folder / "s3", host=HUB_ADDRESS, inside=net.at_hub()) as server, contextlib.ExitStack() as stack:
            place = _Place(cell, net, server, folder, stack)
            place.start_owner()
            place.invite()
            net.shape(cell.rate_mbit, only=[VOLUNTEER])
            found = place.join()
    return Measured(**found, params=params, load=os.getloadavg()[0])


def _make_model(cell: Cell, folder: Path) -> int:
    """In a process of its own, since torch stays; the number of parameters."""
    changes = json.dumps(dict(cell.model or {}))
    text = f"from pathlib import Path; from tests.bench.join.hub import make_model; import json; print(\
make_model(Path({str(folder / 'model')!r}), **json.loads({changes!r})))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SiteError(f"the model can't be made: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class _Running:
    """A process and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise SiteError with the end of its log when it has ended."""
        if self.process.poll() is not None:
            said = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SiteError(f"{self.log.stem} ended before it had measured:\n{said}")


class _Place:
    """The places of one cell: where the bucket is, where the owner's site is, and where the volunteer is."""

    def __init__(self, cell: Cell, net: Network, server: S3Server, folder: Path, stack: contextlib.ExitStack) -> None:
        self._cell, self._net, self._folder, self._stack = cell, net, folder, stack
        self._port = free_ports(1)[0]
        self._environment = {name: value for name, value in os.environ.items() if name not in HUB_PLACES}
        self._environment |= {**server.environment(), "HF_ENDPOINT": f"http://{HUB_ADDRESS}:{self._port}"}
        self._environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._recipe = folder / "recipe.toml"
        self._invitation = folder / f"{VOLUNTEER}.invitation"
        self._owners_hub = {"HF_HOME": str(folder / "owners-hub")}
        program = Path(sys.executable).with_name("composer-prime")
        self._program = [str(program)] if program.exists() else [sys.executable, "-m", "composer_prime.cli.main"]

    def start_owner(self) -> None:
        """The hub, the owner's site, and whoever watches the bucket; returns once enough rounds have closed."""
        hub = [sys.executable, "-m", "tests.bench.join.hub", str(self._folder / "model")]
        self._start("hub", [*self._net.at_hub(), *hub, HUB_ADDRESS, str(self._port)])
        keys = {name: SigningKey.generate() for name in ("owner", OWNER)}
        for name, key in keys.items():
            key.save(self._folder / f"{name}.key")
        recipe = recipe_from_data(self._cell.recipe(self._folder, {name: key.public for name, key in keys.items()}))
        self._recipe.write_text(to_toml(recipe.to_data()))
        site = ["nice", "-n", str(STEP_BACK), *self._program, "site", str(self._recipe)]
        owner = self._start("owner", [*self._net.at_site(OWNER), *site], self._owners_hub)
        run = f"s3://{BUCKET}/{RUN}"
        watch = [sys.executable, "-m", "tests.bench.join.watch", run, str(self._cell.fragments), VOLUNTEER]
        self._watch = self._start("watch", [*self._net.at_hub(), *watch])
        self._wait(lambda: self._seen().get("closed", 0) >= self._cell.after_rounds, owner)
        self._owner = owner

    def invite(self) -> None:
        """Write the invitation."""
        asked = ["invite", f"s3://{BUCKET}/{RUN}", "--name", VOLUNTEER, "--recipe", str(self._recipe)]
        asked += ["--key", str(self._folder / "owner.key"), "--out", str(self._invitation)]
        asked += ["--credentials-env", ",".join(SECRETS)]
        done = subprocess.run(
            [*self._net.at_hub(), *self._program, *asked],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SiteError(f"the owner can't invite: {done.stderr.strip()}")

    def join(self) -> dict[str, Any]:
        """Run `composer-prime join`, and note when it comes to what."""
        root = self._folder / "volunteer"
        site = RunPaths(root / RUN).site(VOLUNTEER)
        own = self._owners_hub if self._cell.own_weights else {}
        command = [*self._program, "join", str(self._invitation), "--folder", str(root)]
        command += ["--allow-env", ENVIRONMENT, "--allow-local"]
        log = self._folder / "join.log"
        marks: dict[str, Callable[[], bool]] = {
            "checked": lambda: "You take part as site" in log.read_text(),
            "launched": site.settings.exists,
            "joined": lambda: _holds(site.log("trainer"), "trainer_started"),
            "stepped": lambda: bool(_steps(site)),
            "offered": lambda: "offered" in self._seen(),
            "merged": lambda: "merged" in self._seen(),
        }
        first, began = self._wire(), time.time()
        joining = self._start("join", [*self._net.at_site(VOLUNTEER), *command], own, without=SECRETS)
        found: dict[str, Any] = {}
        wires: dict[str, tuple[int, int]] = {}

        def all_passed() -> bool:
            for name, has_passed in marks.items():
                if f"{name}_s" not in found and has_passed():
                    found[f"{name}_s"], wires[name] = time.time() - began, self._wire()
            self._owner.check()
            return len(found) == len(marks)

        self._wait(all_passed, joining)
        seen, steps = self._seen(), self._cell.inner_steps // self._cell.fragments
        taken = _steps(site)[:steps]
        return found | {
            "offered_s": seen["offered"] - began,
            "merged_s": seen["merged"] - began,
            "steps": steps,
            "steps_s": taken[-1]["time"] - began - found["joined_s"],
            "train_s": sum(step[TRAIN_TRAIN_S] for step in taken),
            "joined_down": wires["joined"][0] - first[0],
            "down": wires["offered"][0] - first[0],
            "up": wires["offered"][1] - first[1],
            "rounds": int(seen["closed"]),
            "begins": tuple(
                line.partition("begins ")[2]
                for line in site.log("trainer").read_text().splitlines()
                if " begins fragment=" in line
            ),
        }

    def _start(
        self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None, without: Sequence[str] = ()
    ) -> _Running:
        """A process until the cell ends; its output goes to NAME.log."""
        environment = self._environment | dict(more or {})
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in environment.items() if key not in without},
            )
        self._stack.callback(_end, process)
        return _Running(process, log)

    def _wait(self, holds: Callable[[], bool], running: _Running) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            running.check()
            self._watch.check()
            if time.monotonic() > until:
                raise SiteError(
                    f"{running.log.stem} took more than {PATIENCE_S:g} s: {running.log.read_text()[-2000:]}"
                )
            time.sleep(LOOK_S)

    def _seen(self) -> dict[str, float]:
        """All that the watch has said so far, but for what it says of requests that fail."""
        found: dict[str, float] = {}
        for line in self._watch.log.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n") and "failed" not in line:
                found |= json.loads(line)
        return found

    def _wire(self) -> tuple[int, int]:
        """Bytes that came down the volunteer's cable and went up, so far."""
        files = [str(COUNTERS / f"{way}_bytes") for way in ("rx", "tx")]
        said = subprocess.run(
            [*self._net.at_site(VOLUNTEER), "cat", *files], capture_output=True, text=True, check=True
        ).stdout
        down, up = said.split()
        return int(down), int(up)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # its children go with it, and what it would still say to the bucket nobody reads
    process.wait()


def _holds(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text(errors="replace")


def _steps(site: SitePaths) -> list[dict[str, float]]:
    tape = site.tape("trainer")
    return [line for line in read_tape(tape) if TRAIN_STEP_S in line] if tape.exists() else []


def draw(results: Sequence[tuple[Cell, Measured]]) -> Table:
    """A line a cell."""
    cell, found = results[0]
    table = Table(
        title=f"composer-prime join over {cell.rate_mbit:g} Mbit/s; {found.params / 1e6:.1f} M parameters in "
        f"{cell.fragments} fragments, H {cell.inner_steps}, {cell.batch_size} rollouts a step",
        title_justify="left",
    )
    for column in ("codec", "weights"):
        table.add_column(column)
    seconds = [field.name for field in fields(Measured) if field.name.endswith("_s")]
    for name in (*seconds, "without steps_s", "MB down joined", "MB down", "MB up", "at round", "load"):
        table.add_column(name.replace("_", " "), justify="right")
    for cell, found in results:
        table.add_row(
            cell.codec,
            "own" if cell.own_weights else "bucket",
            *(f"{getattr(found, name):.1f}" for name in seconds),
            f"{found.offered_s - found.steps_s:.1f}",
            *(f"{num / 1e6:.1f}" for num in (found.joined_down, found.down, found.up)),
            str(found.rounds),
            f"{found.load:.1f}",
        )
    return table


def _notes(found: Measured) -> list[str]:
    counted = f"{found.steps} inner steps until the offer: {found.steps_s:.1f} s, of which {found.train_s:.1f} training"
    return [*found.begins, counted]


def _record(cell: Cell, found: Measured) -> dict[str, Any]:
    return {"cell": asdict(cell), "measured": asdict(found)}
