"""How a job on a stock image installs what it runs: the wheels that it is handed, and what its index has."""

import json
import shlex
from collections.abc import Sequence

from composer_prime.executors.base import JobSpec, WheelLink
from composer_prime.executors.packages import Packages

STOCK_IMAGE = "ghcr.io/astral-sh/uv:0.9.7-python3.12-bookworm-slim"
"""A Python and uv, nothing else."""
WHEELS_VARIABLE = "COMPOSER_PRIME_WHEELS"
"""Where a job finds its wheels, as JSON: a secret, since who has a link can read a wheel."""

_FETCH = """\
import hashlib, json, os, pathlib, sys, urllib.request
for file, sha256, url in json.loads(os.environ["COMPOSER_PRIME_WHEELS"]):
    data = urllib.request.urlopen(url, timeout=300).read()
    if hashlib.sha256(data).hexdigest() != sha256:
        sys.exit(f"{file} in the bucket isn't the one that was launched: its sha256 differs")
    folder = pathlib.Path(sys.argv[1], file).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(data)
"""


def installing(spec: JobSpec) -> tuple[str, ...]:
    """The job's command with its installation before it. Standard output tells what went wrong, and no link."""
    script = "\n".join(
        [
            "wheels=$(mktemp -d)",
            f"python3 -c {shlex.quote(_FETCH)} $wheels",
            f"unset {WHEELS_VARIABLE}",
            install_command(spec, [f"$wheels/{wheel.file}" for wheel in spec.wheels]),
            'exec "$@"',
        ]
    )
    return ("sh", "-ec", script, "sh", *spec.command)


def install_command(spec: JobSpec, wheels: Sequence[str]) -> str:
    """The shell's command that installs a job's packages on the stock image. wheels: their files, as it sees them."""
    backend = "cpu" if spec.resources.gpu is None else "auto"
    requirements = (spec.packages or Packages()).requirements
    return shlex.join(
        ["uv", "pip", "install", "--quiet", "--system", "--torch-backend", backend, *requirements]
    ) + "".join(f" {wheel}" for wheel in wheels)


def links_of(wheels: Sequence[WheelLink]) -> dict[str, str]:
    """The secret by which a job finds its wheels."""
    return {WHEELS_VARIABLE: json.dumps([[wheel.file, wheel.sha256, wheel.url] for wheel in wheels])}
