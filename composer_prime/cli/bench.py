"""`composer-prime bench`: medians and ratios of the parts whose speed we promise, measured on this machine."""

from pathlib import Path
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


@app.command("outer")
def outer(
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters of the measured fragment.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 5,
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel: fp32, bf16 or int8.")] = "int8",
    store: Annotated[str | None, typer.Option(help="Where payloads go; default: a temporary folder.")] = None,
) -> None:
    """A round of the outer loop: coding, upload, commit, download, apply."""
    from composer_prime.bench.outer import main

    main(params, repeats, codec, store)


@app.command("codecs")
def codecs(
    params: Annotated[int, typer.Option(min=1, help="fp32 values of each measured vector.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Times each vector is coded.")] = 5,
) -> None:
    """Every codec: speed on one thread, size, and how exact it is."""
    from composer_prime.bench.codecs import main

    main(params, repeats)


@app.command("sweep")
def sweep(
    variant: Annotated[
        list[str], typer.Option(help="A recipe and overrides, as after `composer-prime run`; repeat it.")
    ],
    seed: Annotated[list[int], typer.Option(help="A run.seed; repeat it.")] = [0],  # noqa: B006 (typer reads it once)
    output_dir: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("outputs"),
) -> None:
    """Real runs of several variants over several seeds, one after another, in one table."""
    from composer_prime.bench.sweep import main

    main(variant, seed, output_dir)
