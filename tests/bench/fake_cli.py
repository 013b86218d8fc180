"""Stands for `composer-prime` in tests of what calls it: leaves what the real commands leave, and trains nothing.

`run` makes a site's result and weights in WORK pieces, `ablate` a run of each arm in one, `replay teacher` answers
/health. Each piece takes PIECE_S. They stop when they are interrupted and go on where they were, as the real ones do.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from composer_prime.ablate import ablation
from composer_prime.ablate.plan import Job, Row, plan_jobs
from composer_prime.cli.main import RECIPE_ARGS
from composer_prime.config.ablate import read_arms
from composer_prime.config.load import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.sites.embedded.processes import catch_interrupt
from tests.ablate.arms import FakeRunner

WORK = 4
PIECE_S = 1.0
INTERRUPTED_EXIT = 130

app = typer.Typer(pretty_exceptions_enable=False)


@app.command("run", context_settings=RECIPE_ARGS)
def run(context: typer.Context, recipe: Path, resume: Annotated[bool, typer.Option("--resume")] = False) -> None:
    paths = RunPaths.of(load_recipe(recipe, context.args))
    site = paths.site("a")
    assert paths.root.exists() == resume, "a folder that is there is continued, and no other"
    site.broadcasts.mkdir(parents=True, exist_ok=True)
    with catch_interrupt() as interrupt:
        for piece in range(len([*site.broadcasts.iterdir()]), WORK):
            time.sleep(PIECE_S)
            if interrupt.is_set:
                raise typer.Exit(INTERRUPTED_EXIT)
            site.broadcast(piece).mkdir()
            (site.broadcast(piece) / "STABLE").touch()
    site.result.write_text("{}")


@app.command("ablate", context_settings=RECIPE_ARGS)
def ablate(
    context: typer.Context,
    recipe: str,
    arm: Annotated[list[str] | None, typer.Option()] = None,
    seeds: Annotated[int, typer.Option()] = 3,
    held_out_prompts: Annotated[int, typer.Option()] = 256,
    harm: Annotated[bool, typer.Option("--harm/--no-harm")] = True,
) -> None:
    with catch_interrupt() as interrupt:

        def slowly(job: Job, is_stopped: Callable[[], bool]) -> Row | None:
            time.sleep(PIECE_S)
            return None if is_stopped() else FakeRunner()(job, is_stopped)

        jobs = plan_jobs(read_arms(recipe, context.args, arm or (), harm=harm), seeds, held_out_prompts)
        raise typer.Exit(ablation.ablate(jobs, slowly, Console(width=140), is_stopped=lambda: interrupt.is_set))


@app.command("replay")
def replay(kind: str, model: str, port: int = 0, weights: Path = Path(), seed: int = 0, device: str = "") -> None:
    assert kind == "teacher" and weights.name == f"step_{WORK - 1}" and device == "cpu" and seed == 1000
    health = Starlette(routes=[Route("/health", lambda request: PlainTextResponse("ready"))])
    uvicorn.run(health, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    app(sys.argv[1:])
