"""What commands that look at a run in its bucket take: STORE, the root of one run; and what its owner accepts."""

from typing import Annotated

import typer

StoreArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="The folder of one run: s3://bucket/prefix/run-name, gs://..., hf://..., or a plain path.",
        show_default=False,
    ),
]


def check_run(uri: str) -> None:
    """Raise BadInput when the store holds no run, before a command imports what takes seconds."""
    from contextlib import closing

    from composer_prime.store import open_store
    from composer_prime.sync.lifetime import find_manifest

    with closing(open_store(uri)) as store:
        find_manifest(store)


AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="TERM",
        help="A term by which one site could ruin the run, by name: mean, tokens or steps; may be repeated.",
        show_default=False,
    ),
]
