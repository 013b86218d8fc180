"""Which variables travel in an invitation, so that the volunteer's machine reaches the bucket: read where the host is.

Endpoint and region come along by themselves; keys only when the owner names them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.volunteers.invitation import check_environment

PLACES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION")
"""Not secret, and the same for everybody."""


def read_credentials(
    file: Path | None, names: str | None, gateway: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of an invitation.

    file      lines NAME=VALUE; empty ones and comments are passed over
    names     of variables in `environ`, with commas
    gateway   the gateway that is named instead of the bucket: then nothing of the bucket travels

    Raises BadInput for a name that isn't set, a line that is none, or a variable that no bucket needs.
    """
    given = _read_file(file) if file is not None else {}
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        if not environ.get(name):
            raise BadInput(f"--credentials-env names {name}, which isn't set here: set it, or leave it out")
        given[name] = environ[name]
    if gateway is not None:
        if given:
            raise BadInput(
                "with --gateway the bucket's keys stay with you: leave --credentials and --credentials-env out"
            )
        return {}
    check_environment(given)
    return {name: environ[name] for name in PLACES if environ.get(name)} | given


def _read_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--credentials {path} can't be read ({error}): give a file of NAME=VALUE lines") from None
    found = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.partition("=")
        if not separator:
            raise BadInput(f"--credentials {path} line {number} isn't NAME=VALUE: correct it")
        found[name.strip()] = value.strip().strip("'\"")
    return found
