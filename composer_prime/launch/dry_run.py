"""What a launch would start and what that costs an hour, said without starting, or writing, anything."""

from collections.abc import Iterator
from dataclasses import replace

from composer_prime.launch.budget import Limits, allowed_s, check_bounded, price_of_job
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import LaunchPlan, spec_of
from composer_prime.launch.records import Launch, LaunchBook
from composer_prime.store.memory import MemoryStore

_DRY = Launch(number=1, name="dry-run", created_at=0.0, created_by="")


def dry_run_lines(plan: LaunchPlan, limits: Limits) -> Iterator[str]:
    """Line by line. Raises BadInput for what the platform would refuse."""
    launch = _DRY.model_copy(update={"name": f"{plan.recipe.run.name}-XXXXXXXX"})
    fleet = Fleet(LaunchBook(MemoryStore("dry-run"), launch))
    try:
        total: float | None = 0.0
        for site in plan.sites:
            intent = fleet.intent(plan, site, 1, plan.timeout_s)
            executor = fleet.executor(plan.on)
            spec = spec_of(intent, launch.name, plan)
            executor.check(spec)
            price = price_of_job(executor.price(spec), plan.usd_per_hour)
            check_bounded(limits, price, plan.on)
            seconds = allowed_s(
                limits,
                [],
                wanted_s=plan.timeout_s,
                usd_per_hour=price.usd_per_hour,
                overrun_s=intent.overrun_s,
                waiting=len(plan.sites),
                now=0.0,
            )
            spec = replace(spec, timeout_s=max(1, seconds))
            yield f"site {site} on {plan.on}"
            yield from (f"  {line}" for line in executor.describe(spec).splitlines())
            usd = price.usd_per_hour
            yield f"  price {_usd(usd)} an hour ({price.source}); ends by itself after {seconds / 3600:.2f} h"
            total = None if usd is None or total is None else total + usd
        yield f"all {len(plan.sites)} sites: {_usd(total)} an hour; {_limits(limits)}"
        yield f"run {plan.run_uri}; secrets from this environment: {', '.join(plan.secrets) or 'none'}"
        yield "nothing was started"
    finally:
        fleet.close()


def _usd(price: float | None) -> str:
    return "unknown" if price is None else f"${price:.2f}"


def _limits(limits: Limits) -> str:
    cost = "no limit on cost" if limits.max_usd is None else f"at most ${limits.max_usd:.2f}"
    hours = "no limit on hours" if limits.max_hours is None else f"at most {limits.max_hours:g} h"
    after = f"{limits.max_restarts} failures, {limits.max_preemptions} preemptions, {limits.max_timeouts} time-outs"
    return f"{cost}, {hours}, each site started again after at most {after}"
