"""`composer-prime launch | ps | logs | cancel`: sites on platforms, found again from anywhere by the run's bucket."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from composer_prime.cli.options import RecipeArgument, StoreArgument, read_recipe
from composer_prime.errors import BadInput, ComposerPrimeError, ExecutorError, Problems
from composer_prime.visible import say

if TYPE_CHECKING:
    from composer_prime.launch.budget import Limits
    from composer_prime.launch.fleet import Fleet
    from composer_prime.launch.plan import LaunchPlan
    from composer_prime.launch.records import LaunchBook
    from composer_prime.launch.supervisor import Supervisor

POLL_S = 5.0
SMOKE_QUEUE_S = 900.0  # so long a smoke waits for machines, besides its jobs' time-out
SiteOption = Annotated[str | None, typer.Option("--site", help="One site; default: all.")]


def launch(
    context: typer.Context,
    recipe: RecipeArgument,
    on: Annotated[
        str,
        typer.Option(metavar="PLATFORMS", help="local, modal, hf-jobs, sky or ssh:HOST; several as modal:4,hf-jobs:2."),
    ],
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="Sites to start, named r0, r1, ...; default: the recipe's.")
    ] = None,
    sites: Annotated[str | None, typer.Option(help="Names of the sites, with commas: start these.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU as the platform names it; over launch.gpu.")] = None,
    gpu_count: Annotated[int | None, typer.Option(min=1, help="GPUs of a site; over launch.gpu_count.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image; over launch.image.")] = None,
    timeout_hours: Annotated[
        float | None, typer.Option(min=0.001, help="Hours of a job; over launch.timeout_hours.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="Environment variable to hand over as a secret, by name.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of each site that fails or hangs.")] = 3,
    max_preemptions: Annotated[int, typer.Option(min=0, help="Restarts of each site whose machine is taken.")] = 100,
    max_timeouts: Annotated[int, typer.Option(min=0, help="Restarts of each site that ran out of its hours.")] = 100,
    max_cost: Annotated[float | None, typer.Option(min=0.01, help="US dollars of all jobs together.")] = None,
    max_hours: Annotated[float | None, typer.Option(min=0.001, help="Hours from the first job on.")] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, max=1e5, help="Price of a job, where the platform's is unknown.")
    ] = None,
    hang_after: Annotated[
        float, typer.Option(min=0, help="Seconds without a beat before a replica is restarted; 0: never.")
    ] = 900.0,
    poll_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the jobs.")] = POLL_S,
    detach: Annotated[bool, typer.Option("--detach", help="Start, and return: nobody restarts what dies.")] = False,
    supervise_on: Annotated[
        str | None, typer.Option(metavar="PLATFORM", help="Start, and watch as a job there: modal, hf-jobs, ssh:HOST.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="One small job a platform, to see if all works.")] = False,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Start billed jobs without --max-cost.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start billed jobs without asking.")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Go on where something can't be checked.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started and its price.")] = False,
) -> None:
    """Start a recipe's sites on a platform and watch them. The same command again finds them, and starts none twice."""
    from composer_prime.launch.budget import Limits
    from composer_prime.launch.plan import plan_launch, smoke_plan, with_stored_logins

    table = {"gpu": gpu, "gpu_count": gpu_count, "image": image, "timeout_hours": timeout_hours}
    said, problems = [f"--launch.{key}={value}" for key, value in table.items() if value is not None], Problems()
    plan = plan_launch(
        read_recipe(recipe, [*context.args, *said]),
        on,
        sites=tuple(name.strip() for name in sites.split(",")) if sites else (),
        replicas=replicas,
        secrets=tuple(secret or ()),
        usd_per_hour=usd_per_hour,
        environment=with_stored_logins(os.environ, secret or ()),
        problems=problems,
    )
    plan = smoke_plan(plan) if smoke else plan
    wait = {"hang_after_s": hang_after or None, "stall_after_s": plan.recipe.launch.stall_after_s or None}
    limits = Limits(max_restarts, max_preemptions, max_timeouts, max_usd=max_cost, max_hours=max_hours, **wait)
    if plan.rented and not (max_cost or dry_run or smoke or no_limit):
        problems.note(f"jobs on {', '.join(plan.rented)} are billed: say by --max-cost how many dollars, or --no-limit")
    planned = _checked(plan, limits, problems, dry_run=dry_run, unchecked=unchecked)
    if dry_run:
        print("\n".join([*planned, "nothing was started"]))
        return
    if plan.rented:
        _ask(planned, yes=yes)
    raise typer.Exit(_smoke(plan, limits, poll_s) if smoke else _launch(plan, limits, poll_s, detach, supervise_on))


def _ask(planned: list[str], *, yes: bool) -> None:
    """Show what would be started, and end the command unless the answer is yes."""
    for line in planned:
        say(line)
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput("nobody is there to say whether these jobs shall start: say --yes")
    if not typer.confirm("Start these jobs?"):
        say("nothing was started")
        raise typer.Exit(1)


def _checked(
    plan: "LaunchPlan", limits: "Limits", problems: "Problems", *, dry_run: bool, unchecked: bool
) -> list[str]:
    """What would be started, after all checks that can be made beforehand. Raises BadInput for all that is wrong."""
    from composer_prime.config import Recipe
    from composer_prime.launch import preflight
    from composer_prime.sites.embedded.installed import package_checks
    from composer_prime.sites.preflight import check_bucket

    checks = (
        (preflight.access_lines(plan), True),
        (preflight.login_lines(plan), not dry_run),
        (() if plan.is_smoke else preflight.memory_lines(plan, preflight.gpu_bytes_beforehand), True),
    )
    for lines, counts in checks:
        with problems.noted():
            for line in lines:
                if isinstance(line, preflight.Unchecked) and counts and not unchecked and plan.rented:
                    problems.note(f"{line}: mend that, or go on with --unchecked")
                else:
                    say(line)
    if not dry_run:
        problems.gather(lambda: check_bucket(plan.recipe, None, new_run=False))
        if "local" in plan.platforms and isinstance(plan.recipe, Recipe):
            problems.gather(*package_checks(plan.recipe))
    planned = list(preflight.described(plan, limits, problems, dry_run=dry_run))
    problems.check()
    return planned


def _launch(plan: "LaunchPlan", limits: "Limits", poll_s: float, detach: bool, supervise_on: str | None) -> int:
    """Start what isn't there, and watch it to its end; the exit code: 0 when all sites ended rightly."""
    from composer_prime.launch.fleet import begin_fleet
    from composer_prime.launch.preflight import bucket_lines
    from composer_prime.launch.supervisor import Supervisor
    from composer_prime.launch.supervisor_job import order_of, start_supervisor
    from composer_prime.sites.embedded.processes import catch_interrupt
    from composer_prime.store import open_store

    with closing(open_store(plan.run_uri)) as store, closing(begin_fleet(store, plan.recipe.run.name)) as fleet:
        supervisor = Supervisor(fleet, plan, limits, say=say)
        for line in bucket_lines(plan):
            say(line)
        supervisor.check()
        order = order_of(plan, supervise_on, limits, poll_s) if supervise_on else None
        _first_turn(fleet, supervisor)
        if order is not None:
            job, is_new = start_supervisor(fleet, order)
            say(_watched(plan, job, is_new))
            return 0
        if detach and supervisor.troubled:  # and nobody looks again
            said = "; ".join(f"{site} ({problem})" for site, problem in supervisor.troubled.items())
            raise ExecutorError(
                f"not seen to run: {said}. The other jobs go on; the same command again starts what is missing"
            )
        if detach:
            say(_detached(plan))
            return 0
        pause, now = threading.Event(), time.monotonic
        due = now() + plan.timeout_s + SMOKE_QUEUE_S if plan.is_smoke else math.inf
        with catch_interrupt() as interrupt:
            ok = supervisor.run(lambda: pause.wait(poll_s), until=lambda: interrupt.is_set or now() > due)
        if ok is None and not interrupt.is_set:
            raise ExecutorError("no machine in time: see your quota and credit there, or ask for another place")
        if ok is None:
            say("the jobs end now" if plan.is_smoke else _detached(plan))
            return 130
        return 0 if ok else 1


def _smoke(plan: "LaunchPlan", limits: "Limits", poll_s: float) -> int:
    """Start a smoke's jobs, wait for them, and show their logs; an exit code. What it wrote is deleted again, unless a
    job's end isn't confirmed."""
    once = replace(limits, max_restarts=0, max_preemptions=0, max_timeouts=0, hang_after_s=None)
    try:
        code = _launch(plan, once, poll_s, False, None)
    finally:
        cancel(plan.run_uri)
        try:
            logs(plan.run_uri)
        except ComposerPrimeError as error:
            say(f"no more of the logs: {error}")
        with _fleet(plan.run_uri) as (_, book):
            book.clear()
    found = "not known to be right: see above; what isn't found there, the image lacks" if code else "right"
    say(f"{', '.join(plan.places.values())}: account, packages, secrets and bucket are {found}")
    return code


def _watched(plan: "LaunchPlan", job: str, is_new: bool) -> str:
    return (
        f"The launch is watched {'by a job of its own' if is_new else 'already'}, {job}, which restarts what dies: "
        f"this machine may be switched off. See it with `composer-prime ps {plan.run_uri}`, end all with "
        f"`composer-prime cancel {plan.run_uri}`."
    )


def _first_turn(fleet: "Fleet", supervisor: "Supervisor") -> None:
    """Start what isn't there; when that can't be, end what was started, and say so."""
    try:
        supervisor.turn()
    except ComposerPrimeError:
        for each in fleet.withdraw():
            billed = each.problem and f"may still run and be billed: {each.problem}"
            say(f"{each.site} attempt {each.number}: {billed or 'ended again, since not all could be started'}")
        raise


def _detached(plan: "LaunchPlan") -> str:
    return (
        f"The jobs go on. See them with `composer-prime ps {plan.run_uri}`, end them with `composer-prime cancel "
        f"{plan.run_uri}`; the same launch command watches them again and restarts what dies."
    )


@contextmanager
def _fleet(uri: str) -> "Iterator[tuple[Fleet, LaunchBook]]":
    """The newest launch of the run at `uri`."""
    from composer_prime.launch.fleet import Fleet
    from composer_prime.launch.records import open_launch
    from composer_prime.store import open_store

    with closing(open_store(uri)) as store:
        book = open_launch(store)
        with closing(Fleet(book)) as fleet:
            yield fleet, book


def ps(
    store: StoreArgument, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False
) -> None:
    """List a launch's jobs: their state, as their platforms say it now, what they cost, and why they ended."""
    from composer_prime.launch.listing import draw, rows

    with _fleet(store) as (fleet, book):
        found = rows(fleet.look())
    draw(found, book, as_json=as_json)


def logs(
    store: StoreArgument,
    site: SiteOption = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which; default: the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the jobs end.")] = False,
) -> None:
    """Print what a launch's jobs wrote, by lines, without secrets; also after they ended."""
    from composer_prime.launch.listing import chosen, merged_logs

    with _fleet(store) as (fleet, book):
        for line in merged_logs(fleet, chosen(book, site, attempt), follow=follow):
            say(line)


def cancel(store: StoreArgument, site: SiteOption = None) -> None:
    """End a launch's jobs, or one site's, and say when their platforms confirm that nothing runs any more."""
    failed = []
    with _fleet(store) as (fleet, book):
        for each in fleet.cancel(site):
            name = f"{each.site} attempt {each.number}"
            say(f"{name}: {each.problem or each.state}")
            failed += [name] if each.problem else []
    if failed:
        raise ExecutorError(
            f"{', '.join(failed)} may still run and be billed: try `composer-prime cancel {store}` again, or end "
            "them in the platform's own console"
        )
    say(f"nothing of {book.name} runs any more" if site is None else f"{site} runs no more")
