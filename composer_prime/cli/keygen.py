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
        "Of a site, the recipe has it under [outer.keys], with the site's name; or the owner of a run that is there "
        f'lets it in, by admit or invite and --public: a = "{key.public}"\n'
        f'Of a run\'s owner, the recipe has it under [outer]: owner = "{key.public}"',
        err=True,
    )
