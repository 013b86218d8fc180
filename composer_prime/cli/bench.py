"""`composer-prime bench`: speeds of the loss and of the codecs, measured on this machine."""

from typing import Annotated

import typer

app = typer.Typer(help="Measure a part of composer-prime on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.command("loss")
def loss(
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the measured sequence.")] = 65536,
    repeats: Annotated[int, typer.Option(min=1, help="Times each form is measured.")] = 20,
) -> None:
    """Our loss against the naive formula, forward and backward."""
    from composer_prime.bench.loss import main

    main(num_tokens, repeats)


@app.command("codecs")
def codecs(
    params: Annotated[int, typer.Option(min=1, help="fp32 values of each measured vector.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Times each vector is coded.")] = 5,
) -> None:
    """Every codec: speed on one thread, size, and how exact it is."""
    from composer_prime.bench.codecs import main

    main(params, repeats)
