"""`python -m tests.bench peers`: our round of two sites against GradientMail's (PyPI), in turn, on one store.

Both exchange the same number of parameters in the same codec between two processes, from the moment both hold
movement until both hold the new parameters. GradientMail needs Python 3.12 and an environment of its own, so its sites
are started with the interpreter that is named; nothing of it is part of this package.
"""

import json
import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

from rich.console import Console
from rich.table import Table

from composer_prime.errors import BadInput, SiteError
from tests.bench.round import gradientmail_site
from tests.bench.round.round import SITES, RoundBench, measure
from tests.servers.weed import BUCKET, seaweed

DELTA_DTYPES = {"fp32": None, "bf16": "BF16"}
"""The codecs that both have, as GradientMail names them; its 8 and 4 bit formats are others than ours."""
LR, MOMENTUM = 0.7, 0.9
"""Both sides' outer optimizer."""
ANSWER_S = 600.0
"""Longest that GradientMail's two sites may take from start to end."""
REMEDY = (
    "make it once with `python3.12 -m venv peers && peers/bin/pip install 'torch>=2.11,<2.14' "
    "numpy 'gradientmail[s3]==0.0.2'`, then add --gradientmail-python peers/bin/python"
)

_ASK_VERSIONS = """
import platform
from importlib.metadata import version
import gradientmail, torch
print("GradientMail", version("gradientmail"), "on Python", platform.python_version(), "and torch", torch.__version__)
"""


@dataclass(frozen=True)
class PeerBench:
    """What is measured: fp32 parameters, codec, and seconds between GradientMail's looks at the store."""

    params: int
    codec: str
    poll_s: float

    def orders(self, prefix: str, index: int, rounds: int) -> dict[str, object]:
        """What `gradientmail_site` needs to know."""
        return {
            "bucket": BUCKET,
            "prefix": prefix,
            "site": SITES[index],
            "index": index,
            "params": self.params,
            "rounds": rounds,
            "delta_dtype": DELTA_DTYPES[self.codec],
            "poll_s": self.poll_s,
            "lr": LR,
            "momentum": MOMENTUM,
        }


def main(
    gradientmail_python: Path | None,
    params: int = 25_000_000,
    repeats: int = 5,
    codec: str = "fp32",
    polls_s: Sequence[float] = (1.0, 0.1),
) -> None:
    """Run the bench and print medians and their ratio to ours.

    polls_s   GradientMail is measured with each of these; 1.0 is its default

    Raises BadInput when there is no interpreter with GradientMail, no SeaweedFS, or the codec isn't one of both.
    """
    python, versions = find_peer(gradientmail_python)
    if codec not in DELTA_DTYPES:
        raise BadInput(f"GradientMail has no codec {codec}: compare with one of {', '.join(DELTA_DTYPES)}")
    times: dict[str, list[float]] = {"composer-prime": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            with seaweed(Path(folder) / str(number)) as server:  # each repeat on an empty store
                os.environ.update(server.environment())
                ours = RoundBench(f"s3://{BUCKET}/bench-peers", params, 1, codec, adopts=True, lr=LR, momentum=MOMENTUM)
                times["composer-prime"] += measure(ours)[0]
                for poll_s in polls_s:
                    bench = PeerBench(params, codec, poll_s)
                    command = [str(python), str(Path(gradientmail_site.__file__))]
                    name = f"GradientMail, poll_interval {poll_s:g} s"
                    times.setdefault(name, []).extend(measure_peer(bench, command, f"gradientmail/{poll_s:g}")[1:])
    _print(times, f"two sites, {params:,} fp32 parameters, {codec}; {versions}")


def find_peer(python: Path | None) -> tuple[Path, str]:
    """The interpreter, and the versions in its environment. Raises BadInput when it hasn't got GradientMail."""
    if python is None:
        raise BadInput(f"GradientMail needs Python 3.12 and an environment of its own: {REMEDY}")
    python = Path(os.path.abspath(python))  # not resolved: a virtual environment's interpreter is a link
    try:
        said = subprocess.run([python, "-I", "-c", _ASK_VERSIONS], capture_output=True, text=True, check=True)
    except OSError as error:
        raise BadInput(f"{python} can't be run ({error.strerror}): {REMEDY}") from error
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BadInput(f"{python} has no GradientMail that works ({why}): {REMEDY}") from error
    return python, said.stdout.strip()


def measure_peer(bench: PeerBench, command: Sequence[str], prefix: str, repeats: int = 1) -> list[float]:
    """Seconds of each round, the slower site's; the first one warms up.

    command   runs a site that speaks as `gradientmail_site` does; its orders are added as JSON

    Raises SiteError when a site ends early.
    """
    with ExitStack() as stack:
        sites = []
        for index in range(len(SITES)):
            orders = bench.orders(prefix, index, repeats + 1)
            sites.append(stack.enter_context(_started([*command, json.dumps(orders)])))
            stack.callback(sites[-1].kill)
        alarm = threading.Timer(ANSWER_S, lambda: [site.kill() for site in sites])
        alarm.start()
        stack.callback(alarm.cancel)
        rounds = [_exchange(sites) for _ in range(repeats + 1)]
        for site in sites:
            if site.wait() != 0:
                raise SiteError(f"GradientMail's site ended with {site.returncode} after its last round")
    return rounds


def _started(command: Sequence[str]) -> Popen[str]:
    return Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=_environment(os.environ))


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would lead another interpreter to our packages."""
    return {name: value for name, value in ours.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _exchange(sites: Sequence[Popen[str]]) -> float:
    """One round: let both go once both are ready; the slower one's seconds."""
    for site in sites:
        if _answer(site) != "ready":
            raise SiteError("GradientMail's site said something else than that it is ready")
    for site in sites:
        assert site.stdin is not None
        site.stdin.write("go\n")
        site.stdin.flush()
    return max(float(_answer(site)) for site in sites)


def _answer(site: Popen[str]) -> str:
    assert site.stdout is not None
    line = site.stdout.readline().strip()
    if not line:
        raise SiteError(f"GradientMail's site ended with {site.wait()} in the middle of a round; its output says why")
    return line


def _print(times: Mapping[str, list[float]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("round", "median s", "least s", "most s", "x ours, median of pairs"):
        table.add_column(column, justify="left" if column == "round" else "right")
    ours = next(iter(times.values()))
    for name, each in times.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(each, ours, strict=True))
        table.add_row(name, *(f"{value:.3f}" for value in (statistics.median(each), min(each), max(each), ratio)))
    console = Console()
    console.print(table)
    console.print(f"{len(ours)} rounds each, in turn; load {os.getloadavg()[0]:.2f}")
