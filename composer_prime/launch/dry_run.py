"""What a launch would start and what that costs an hour, asked of its platforms without starting anything."""

from collections.abc import Iterator
from dataclasses import replace

from composer_prime.launch.budget import Limits, allowed_s, check_bounded
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.problems import Problems
from composer_prime.launch.records import Launch, LaunchBook
from composer_prime.store.memory import MemoryStore

_DRY = Launch(number=1, name="dry-run", created_at=0.0, created_by="")


def described(plan: LaunchPlan, limits: Limits, problems: Problems, *, logged_in: bool) -> Iterator[str]:
    """Line by line, what would be started; what a platform would refuse is noted.

    logged_in   whether a missing login is a problem, too
    """
    launch = _DRY.model_copy(update={"name": f"{plan.recipe.run.name}-XXXXXXXX"})
    fleet = Fleet(LaunchBook(MemoryStore("dry-run"), launch))
    total: float | None = 0.0
    try:
        for site in plan.sites:
            with problems.noted():
                usd, lines = _site(fleet, plan, limits, site, logged_in=logged_in)
                total = None if usd is None or total is None else total + usd
                yield from lines
    finally:
        fleet.close()
    yield f"all {len(plan.sites)} sites: {_usd(total)} an hour; {_limits(limits)}"
    yield f"run {plan.run_uri}; secrets from this environment: {', '.join(plan.secrets) or 'none'}"


def _site(
    fleet: Fleet, plan: LaunchPlan, limits: Limits, site: str, *, logged_in: bool
) -> tuple[float | None, list[str]]:
    """(US dollars an hour, lines) of one site's job."""
    on = plan.places[site].on
    executor = fleet.executor(on)
    spec = fleet.spec(plan, site, 1, plan.timeout_s)
    executor.check(spec)
    if logged_in:
        executor.log_in()
    price = fleet.price(plan, spec)
    check_bounded(limits, price, on)
    seconds = allowed_s(
        limits,
        [],
        wanted_s=plan.timeout_s,
        usd_per_hour=price.usd_per_hour,
        overrun_s=price.overrun_s,
        waiting=len(plan.sites),
        now=0.0,
    )
    shown = executor.describe(replace(spec, timeout_s=max(1, seconds)))
    usd = price.usd_per_hour
    return usd, [
        f"site {site} on {on}",
        *(f"  {line}" for line in shown.splitlines()),
        f"  price {_usd(usd)} an hour ({price.source}); ends by itself after {seconds / 3600:.2f} h",
    ]


def _usd(price: float | None) -> str:
    return "unknown" if price is None else f"${price:.2f}"


def _limits(limits: Limits) -> str:
    cost = "no limit on cost" if limits.max_usd is None else f"at most ${limits.max_usd:.2f}"
    hours = "no limit on hours" if limits.max_hours is None else f"at most {limits.max_hours:g} h"
    after = f"{limits.max_restarts} failures, {limits.max_preemptions} preemptions, {limits.max_timeouts} time-outs"
    return f"{cost}, {hours}, each site started again after at most {after}"
