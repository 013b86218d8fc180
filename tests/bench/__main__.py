"""Benches of a checkout: medians, ratios and storms that docs/benchmarks.md quotes.

python -m tests.bench storm --sites 16 --minutes 10
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.main import guard_process, last_words
from composer_prime.errors import ComposerPrimeError

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)


@app.command("outer")
def outer(
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters of the measured fragment.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 5,
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel.")] = "int8",
    store: Annotated[str | None, typer.Option(help="Where payloads go; default: a temporary folder.")] = None,
) -> None:
    """A round of the outer loop: coding, upload, commit, download, apply."""
    from tests.bench.round.outer import main

    main(params, repeats, codec, store)


@app.command("round")
def round_(
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are measured, after one.")] = 5,
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel.")] = "fp32",
) -> None:
    """A round of two sites on SeaweedFS, against the same bytes moved by plain s3fs."""
    from tests.bench.round.round import main

    main(params, repeats, codec)


@app.command("peers")
def peers(
    gradientmail_python: Annotated[
        Path | None, typer.Option(help="Python 3.12 of an environment that has GradientMail.")
    ] = None,
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each that are measured, each after one.")] = 5,
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel: fp32 or bf16.")] = "fp32",
    poll_s: Annotated[list[float], typer.Option(min=0.01, help="GradientMail's poll_interval; repeat it.")] = [1, 0.1],  # noqa: B006
) -> None:
    """A round of two sites on SeaweedFS, against one of GradientMail's, in turn."""
    from tests.bench.round.peers import main

    main(gradientmail_python, params, repeats, codec, poll_s)


@app.command("link")
def link(
    rate: Annotated[list[float], typer.Option(min=0.1, help="Mbit/s of each site's link, each way; repeat it.")] = [50],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="How pseudo-gradients travel; repeat it.")] = ["topk"],  # noqa: B006
    inner_steps: Annotated[list[int], typer.Option(min=1, help="H; repeat it.")] = [128],  # noqa: B006
    sync_delay: Annotated[
        list[int] | None, typer.Option(min=0, help="tau; repeat it. Default: the most there is, H / P - 1.")
    ] = None,
    fragments: Annotated[int, typer.Option(min=1, help="P: parts the parameters are cut into.")] = 4,
    sites: Annotated[int, typer.Option(min=1, max=26, help="Sites, each in a network namespace of its own.")] = 4,
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters of each site.")] = 30_800_000,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds of an inner step, a timed wait.")] = 0.03,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured, after one.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Where the numbers go as JSON.")] = None,
) -> None:
    """Utilisation over real links of limited rate, measured and predicted. Needs root and iproute2."""
    from tests.bench.link.link import grid, main

    same = {"fragments": fragments, "sites": sites, "params": params, "step_s": step_s, "rounds": rounds}
    main(grid(rate, codec, inner_steps, sync_delay, **same), json)


@app.command("join")
def join(
    after: Annotated[list[int], typer.Option(min=0, help="Rounds that have closed before; repeat it.")] = [3, 10, 30],  # noqa: B006
    weights: Annotated[
        list[str], typer.Option(help="own: the site has the model the run started from; bucket: it hasn't. Repeat it.")
    ] = ["own", "bucket"],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="How pseudo-gradients travel; repeat it.")] = ["topk"],  # noqa: B006
    rate: Annotated[float, typer.Option(min=0.1, help="Mbit/s of the joining site's link, each way.")] = 10,
    params: Annotated[int, typer.Option(min=1, help="Parameters, first in bf16, masters in fp32.")] = 30_800_000,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds of an inner step, a timed wait.")] = 0.03,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the numbers go as JSON.")] = None,
) -> None:
    """How soon a site that comes late contributes, over a real slow link. Needs root and iproute2."""
    from tests.bench.join.join import cells_of, main

    main(cells_of(after, weights, codec, rate_mbit=rate, params=params, step_s=step_s), json_path)


@app.command("join-command")
def join_command(
    weights: Annotated[
        list[str], typer.Option(help="own: the volunteer has the model's files; bucket: it hasn't. Repeat it.")
    ] = ["own", "bucket"],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="How pseudo-gradients travel; repeat it.")] = ["topk"],  # noqa: B006
    rate: Annotated[float, typer.Option(min=0.1, help="Mbit/s of the volunteer's link, each way.")] = 10,
    inner_steps: Annotated[int, typer.Option(min=4, help="H, of real inner steps; a multiple of 4.")] = 8,
    after: Annotated[int, typer.Option(min=0, help="Rounds that have closed before.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the numbers go as JSON.")] = None,
) -> None:
    """How soon a volunteer's whole `composer-prime join` contributes, over a slow link. Needs root and iproute2."""
    from tests.bench.join.command import cells_of, main

    main(cells_of(weights, codec, rate_mbit=rate, inner_steps=inner_steps, after_rounds=after), json_path)


@app.command("rollouts")
def rollouts(
    recipe: Annotated[Path, typer.Argument(help="A recipe; its first environment is played.")],
    turns: Annotated[list[int], typer.Option(min=1, help="A limit of turns; repeat it.")] = [1, 2, 3, 5],  # noqa: B006
    number: Annotated[int, typer.Option("--rollouts", min=1, help="Rollouts that are measured of each.")] = 128,
    cores: Annotated[int, typer.Option(min=1, help="Cores that client and server share.")] = 1,
) -> None:
    """Rollouts a second of a recipe's environment, by the turns that they may take."""
    from tests.bench.rollouts import main

    main(recipe, turns, number, cores)


@app.command("storm")
def storm(
    sites: Annotated[int, typer.Option(min=2, help="Sites, each a process of its own.")] = 16,
    minutes: Annotated[float, typer.Option(min=0.3, help="How long the storm lasts.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the faults: kinds, times and victims.")] = 0,
    faults_per_hour: Annotated[float, typer.Option(min=0, help="Faults an hour, all sites together.")] = 125.0,
    outage_s: Annotated[float, typer.Option(min=0, help="One outage of the store, seconds; 0: none.")] = 0.0,
    reference_minutes: Annotated[
        float, typer.Option(min=0, help="Length of the fault-free run that goodput is measured against; 0: none.")
    ] = 1.0,
    liveness_s: Annotated[float, typer.Option(min=1, help="Seconds without a sign of life until nobody waits.")] = 6.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write all numbers here.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep books and logs here; default: a temporary folder.")] = None,
) -> None:
    """Real site processes on a real SeaweedFS under kill -9, SIGSTOP, cuts, late joins, store restarts and 503s."""
    from tests.bench.storm.storm import main

    raise typer.Exit(
        main(sites, minutes, seed, faults_per_hour, outage_s, reference_minutes, liveness_s, json_path, folder)
    )


@app.command("adversaries")
def adversaries(
    recipe: Annotated[Path, typer.Option(help="The recipe that the honest sites train.")] = Path(
        "recipes/local/two_sites.toml"
    ),
    seed: Annotated[list[int], typer.Option(help="A run.seed, with which both arms run; repeat it.")] = [0],  # noqa: B006
    runs: Annotated[bool, typer.Option(help="Run the two arms; without them only the crowd.")] = True,
    max_steps: Annotated[int, typer.Option(min=8, help="Training steps of each honest site.")] = 72,
    honest: Annotated[int, typer.Option(min=2, max=7, help="Honest sites.")] = 7,
    hostile: Annotated[int, typer.Option(min=1, max=3, help="Adversaries with admitted keys.")] = 3,
    honest_offers: Annotated[
        int, typer.Option(min=0, help="Honest offers to judge in one process, beside the adversaries; 0: none.")
    ] = 10_000,
    kind: Annotated[list[str], typer.Option(help="What each adversary of the two arms plays; repeat it.")] = [],  # noqa: B006
    output_dir: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("outputs"),
) -> None:
    """Twelve kinds of hostile offers from three of ten sites: what is refused, what is bounded, what reward is lost."""
    from tests.bench.adversaries.adversaries import main

    seeds = seed if runs else []
    raise typer.Exit(main(recipe, seeds, max_steps, honest, hostile, honest_offers, output_dir, kind))


if __name__ == "__main__":
    guard_process()
    try:
        app(prog_name="python -m tests.bench")
    except (ComposerPrimeError, OSError) as error:
        sys.exit(last_words(error, "bench"))
