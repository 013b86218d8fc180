"""`composer-prime keygen`: a site's signing key, whose public half the run's owner writes into the recipe."""

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A new file for the private key. It stays with the site: no one else needs it.",
            show_default=False,
        ),
    ],
) -> None:
    """Make a site's signing key: write the private key to PATH, print the public one."""
    from composer_prime.sync.signatures import SigningKey

    key = SigningKey.generate()
    key.save(path)
    typer.echo(key.public)
    typer.echo(
        "The run's owner admits it by a line with the site's name under [outer.keys] in the recipe, for site a: "
        f'a = "{key.public}"',
        err=True,
    )
