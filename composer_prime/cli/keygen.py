"""`composer-prime keygen`: a signing key, of a site or of a run's owner, whose public half a recipe names."""

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A new file for the private key. It stays where it is: no one else needs it.",
            show_default=False,
        ),
    ],
) -> None:
    """Make a signing key, for a site or a run's owner: write the private key to PATH, print the public one."""
    from composer_prime.sync.signatures import SigningKey

    key = SigningKey.generate()
    key.save(path)
    typer.echo(key.public)
    typer.echo(
        f"A site's key stands under [outer.keys] of a new run's recipe, by the site's name: a = \"{key.public}\"\n"
        "The owner of a run that is there admits or invites a site, with that key: "
        f"composer-prime admit STORE --site a --public {key.public} --key OWNER.KEY\n"
        f"An owner's key stands under [outer] of a new run's recipe: owner = \"{key.public}\"",
        err=True,
    )
