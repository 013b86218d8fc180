"""How a job on a stock image installs what it runs: the wheels that it is handed, and what they need from an index."""

import shlex
from collections.abc import Sequence

from composer_prime.executors.base import JobSpec
from composer_prime.executors.packages import Packages

UV_IMAGE = "ghcr.io/astral-sh/uv:0.9.7-python3.12-bookworm-slim"
"""A Python and uv, nothing else."""
PRIME_RL_VERSION = "0.8.0"
PRIME_RL_IMAGE = f"ghcr.io/primeintellect-ai/prime-rl:v{PRIME_RL_VERSION}"
"""PRIME-RL's own, with uv; its environment is the one of its lock."""
LINK_VARIABLE = "COMPOSER_PRIME_WHEEL_"
"""With a number from 0: where a job finds a wheel. A secret, since who has a link can read the wheel."""

_FETCH = """\
import hashlib, os, pathlib, sys, urllib.request
folder = pathlib.Path(sys.argv[1])
for number, (file, sha256) in enumerate(zip(sys.argv[2::2], sys.argv[3::2])):
    data = urllib.request.urlopen(os.environ[f"COMPOSER_PRIME_WHEEL_{number}"], timeout=300).read()
    if hashlib.sha256(data).hexdigest() != sha256:
        sys.exit(f"{file} in the bucket isn't the one that was launched: its sha256 differs")
    (folder / file).write_bytes(data)
"""


def stock_image(packages: Packages) -> str:
    """The public image on which they are installed."""
    return PRIME_RL_IMAGE if packages.on_prime_rl else UV_IMAGE


def installing(spec: JobSpec, packages: Packages) -> tuple[str, ...]:
    """The job's command with the installation before it. A step that fails ends the job with 1; it says no link."""
    wheels = packages.wheels()
    named = shlex.join(each for wheel in wheels for each in (wheel.file, wheel.sha256))
    backend = "cpu" if spec.resources.gpu is None else "auto"  # what the machine's driver can run
    steps = (
        "wheels=$(mktemp -d)",
        f'python3 -c {shlex.quote(_FETCH)} "$wheels" {named}',
        f"unset {' '.join(link_names(packages))}",
        *install_commands(packages, [f'"$wheels"/{shlex.quote(wheel.file)}' for wheel in wheels], backend),
    )
    return ("sh", "-c", "\n".join([*(f"{step} || exit 1" for step in steps), 'exec "$@"']), "sh", *spec.command)


def install_commands(packages: Packages, wheels: Sequence[str], backend: str | None) -> list[str]:
    """The shell's commands that install wheels on the stock image.

    wheels    their files, as words of the shell
    backend   uv's name of the torch that they need; None: what the index has, which is for GPUs on Linux
    """
    files = " ".join(wheels)
    if packages.on_prime_rl:
        pip = "uv pip install --quiet --python /app/.venv"
        return [
            f"{pip} --no-deps {files}",
            f"{pip} {shlex.join(packages.pins)}",
            "python3 -m composer_prime.sites.prime_rl",
        ]
    torch = "" if backend is None else f" --torch-backend {backend}"
    return [f"uv pip install --quiet --system{torch} {shlex.join(packages.pins)} {files}"]


def link_names(packages: Packages) -> list[str]:
    """The variables by which a job finds its wheels, in their order."""
    return [f"{LINK_VARIABLE}{number}" for number in range(len(packages.names))]
