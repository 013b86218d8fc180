"""`composer-prime`: reads the command line, calls the rooms that do the work, and says in one line what went wrong.

Nothing heavy is imported until a command runs, so that `--help` answers at once.
"""

import sys
from typing import Annotated

import typer

from composer_prime.cli import ablate, bench, export, launch, look, owner, plan, replay, run, volunteers
from composer_prime.errors import ComposerPrimeError, last_words
from composer_prime.visible import guard_process

app = typer.Typer(
    name="composer-prime",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"composer-prime {version('composer-prime')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Post-train a language model with RL, at several sites that share only a bucket."""


RECIPE_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("run", context_settings=RECIPE_ARGS)(run.run)
app.command("site", context_settings=RECIPE_ARGS)(run.site)
app.command("create", context_settings=RECIPE_ARGS)(run.create)
app.command("plan", context_settings=RECIPE_ARGS)(plan.plan)
app.command("ablate", context_settings=RECIPE_ARGS)(ablate.ablate)
app.command("launch", context_settings=RECIPE_ARGS)(launch.launch)
app.command("ps")(launch.ps)
app.command("logs")(launch.logs)
app.command("cancel")(launch.cancel)
app.command("replica", hidden=True)(run.replica)
app.command("supervise", hidden=True)(run.supervise)
app.command("rollouts")(look.rollouts)
app.command("status")(look.status)
app.command("verify")(look.verify)
app.command("export")(export.export)
app.command("follow")(export.follow)
app.command("keygen")(owner.keygen)
app.command("gateway")(owner.gateway)
app.command("delete")(owner.delete)
app.command("admit")(owner.admit)
app.command("revoke")(owner.revoke)
app.command("invite")(volunteers.invite)
app.command("join")(volunteers.join)
app.command("doctor", context_settings=RECIPE_ARGS)(volunteers.doctor)
app.command("contribution")(volunteers.contribution)
app.add_typer(bench.app, name="bench")
app.add_typer(replay.app, name="replay")


def main() -> None:
    """The console script. Exit codes: 0 done, 1 something failed, 2 the person can fix it, 74 the system refused."""
    guard_process()
    try:
        app()
    except (ComposerPrimeError, OSError) as error:
        sys.exit(last_words(error, "composer-prime"))


if __name__ == "__main__":
    main()
