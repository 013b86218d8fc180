"""`composer-prime bench`: medians and ratios of the parts whose speed we promise, measured on this machine."""

import math
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
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel.")] = "int8",
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


@app.command("round")
def round_(
    params: Annotated[int, typer.Option(min=1, help="fp32 parameters.")] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are measured, after one.")] = 5,
    codec: Annotated[str, typer.Option(help="How pseudo-gradients travel.")] = "fp32",
) -> None:
    """A round of two sites on SeaweedFS, against the same bytes moved by plain s3fs."""
    from composer_prime.bench.round import main

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
    from composer_prime.bench.peers import main

    main(gradientmail_python, params, repeats, codec, poll_s)


@app.command("gateway")
def gateway(
    requests: Annotated[int, typer.Option(min=20, help="Requests of each kind that are measured.")] = 300,
) -> None:
    """Signed requests to a real gateway over loopback, with TCP_NODELAY and without."""
    from composer_prime.bench.gateway import main

    main(requests)


@app.command("sweep")
def sweep(
    variant: Annotated[
        list[str], typer.Option(help="A recipe and overrides, as after `composer-prime run`; repeat it.")
    ],
    seed: Annotated[list[int], typer.Option(help="A run.seed; repeat it.")] = [0],  # noqa: B006 (typer reads it once)
    output_dir: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("outputs"),
    baseline: Annotated[
        int | None, typer.Option(help="Number of a variant, from 0: the others are compared with it, seed by seed.")
    ] = None,
    held_out_prompts: Annotated[
        int, typer.Option(min=0, help="Tasks no site trained on, to score each run's final masters on; 0: none.")
    ] = 512,
) -> None:
    """Real runs of several variants over several seeds, one after another, in one table."""
    from composer_prime.bench.sweep import main

    main(variant, seed, output_dir, baseline, held_out_prompts)


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
    from composer_prime.bench.link import grid, main

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
    exact_join_s: Annotated[
        float,
        typer.Option(min=0, help="site.exact_join_s: for how long whole masters are waited for; inf: for any time."),
    ] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the numbers go as JSON.")] = None,
) -> None:
    """How soon a site that comes late contributes, over a real slow link. Needs root and iproute2."""
    from composer_prime.bench.join import cells_of, main

    patience = {"exact_join_s": None if exact_join_s == math.inf else exact_join_s}
    main(cells_of(after, weights, codec, rate_mbit=rate, params=params, step_s=step_s, **patience), json_path)


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
    from composer_prime.bench.join_command import cells_of, main

    main(cells_of(weights, codec, rate_mbit=rate, inner_steps=inner_steps, after_rounds=after), json_path)


@app.command("rollouts")
def rollouts(
    recipe: Annotated[Path, typer.Argument(help="A recipe; its first environment is played.")],
    turns: Annotated[list[int], typer.Option(min=1, help="A limit of turns; repeat it.")] = [1, 2, 3, 5],  # noqa: B006
    number: Annotated[int, typer.Option("--rollouts", min=1, help="Rollouts that are measured of each.")] = 128,
    cores: Annotated[int, typer.Option(min=1, help="Cores that client and server share.")] = 1,
) -> None:
    """Rollouts a second of a recipe's environment, by the turns that they may take."""
    from composer_prime.bench.rollouts import main

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
    from composer_prime.bench.storm import main

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
    gather_sites: Annotated[
        int, typer.Option(min=1, help="outer.gather_sites of the two arms; 4: their rounds are cut into parts.")
    ] = 16,
    honest_offers: Annotated[
        int, typer.Option(min=0, help="Honest offers to judge in one process, beside the adversaries; 0: none.")
    ] = 10_000,
    kind: Annotated[list[str], typer.Option(help="What each adversary of the two arms plays; repeat it.")] = [],  # noqa: B006
    output_dir: Annotated[Path, typer.Option(help="Where the runs' folders go.")] = Path("outputs"),
) -> None:
    """Twelve kinds of hostile offers from three of ten sites: what is refused, what is bounded, what reward is lost."""
    from composer_prime.bench.adversaries import main

    seeds = seed if runs else []
    raise typer.Exit(main(recipe, seeds, max_steps, honest, hostile, gather_sites, honest_offers, output_dir, kind))
