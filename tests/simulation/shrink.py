"""A failing plan made small: fewer faults, then fewer sites, while it still fails."""

from collections.abc import Callable

from tests.simulation.plan import Plan, draw_plan
from tests.simulation.world import run_plan


def fails(plan: Plan) -> bool:
    """Whether a plan breaks an invariant."""
    return bool(run_plan(plan).violations)


def shrink(plan: Plan, failing: Callable[[Plan], bool] = fails) -> Plan:
    """The least plan found that still fails; `plan` itself when it doesn't fail any more."""
    if not failing(plan):
        return plan
    places = list(range(len(plan.faults)))
    size = max(1, len(places) // 2)
    while places:
        for start in range(0, len(places), size):
            fewer = places[:start] + places[start + size :]
            if failing(plan.keep(fewer)):
                places = fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    small = plan.keep(places)
    for num_sites in range(1, plan.num_sites):
        fewer_sites = small.with_sites(num_sites)
        if len(fewer_sites.faults) == len(small.faults) and failing(fewer_sites):
            return fewer_sites
    return small


def command(plan: Plan) -> str:
    """What plays it again."""
    whole = draw_plan(plan.seed)
    kept = [str(place) for place, fault in enumerate(whole.faults) if fault in plan.faults]
    faults = "" if len(kept) == len(whole.faults) else f' --faults "{",".join(kept)}"'
    sites = "" if plan.num_sites == whole.num_sites else f" --sites {plan.num_sites}"
    return f"python -m tests.simulation --seed {plan.seed}{sites}{faults}"
