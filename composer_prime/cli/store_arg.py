"""What every command that looks at a run in its bucket takes: STORE, the root of one run."""

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
