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

AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="TERM",
        help="A term by which one site could ruin the run, by name: mean, tokens or steps; may be repeated.",
        show_default=False,
    ),
]
