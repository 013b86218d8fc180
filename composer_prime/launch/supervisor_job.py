"""A supervisor that is itself a job: it goes on when the machine that launched is switched off.

Its job is an attempt of a site of its own, which `ps` shows and `cancel` ends. What it is to do lies in the bucket, and
its hash stands on the command line, which the launcher gave to the platform. Before its time is over it starts the next
one.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Executor, JobSpec, Resources
from composer_prime.executors.open import PLATFORMS, open_executor
from composer_prime.executors.secrets import Secrets
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import NOT_SUBMITTED, Fleet
from composer_prime.launch.plan import LaunchPlan, Placement, installed
from composer_prime.launch.records import Attempt, LaunchBook, open_launch
from composer_prime.launch.supervisor import Say, Supervisor
from composer_prime.redaction import SECRET_NAMES_VARIABLE
from composer_prime.store import open_store

SITE = "supervisor"
TIMEOUT_S = 24 * 3600
"""As long as every platform lets a job run."""
HOST_TIMEOUT_S = 60 * 24 * 3600
HANDOVER_S = 900
"""So long before that the next one is started."""
LOGIN_PREFIX = "COMPOSER_PRIME_LOGIN_"
"""Before the names of variables by which platforms are logged into: a container may have its own of those names."""


@dataclass(frozen=True)
class Order:
    """What a supervisor is to do: a plan, but for the recipe's text and the values of secrets.

    recipe   its sha256
    on       where the supervisor runs
    logins   names of the variables, without their prefix
    """

    recipe: str
    on: Placement
    places: dict[str, Placement]
    env: dict[str, str]
    secrets: tuple[str, ...]
    logins: tuple[str, ...]
    usd_per_hour: float | None
    limits: Limits
    poll_s: float

    def plan(self, book: LaunchBook, uri: str, environment: Mapping[str, str]) -> LaunchPlan:
        """The plan again, with the secrets of a job's environment. Raises as `LaunchBook.recipe`."""
        secrets = Secrets({name: environment[name] for name in self.secrets})
        return LaunchPlan(self.places, book.recipe(self.recipe, uri), uri, self.env, secrets, self.usd_per_hour)

    @property
    def timeout(self) -> int:
        """Seconds of a job's time-out: one on a host of one's own can't start the next, and needn't."""
        return HOST_TIMEOUT_S if self.on.platform == "ssh" else TIMEOUT_S

    def to_json(self) -> str:
        return _ORDERS.dump_json(self).decode()


_ORDERS = TypeAdapter(Order)


def order_of(plan: LaunchPlan, on: str, limits: Limits, poll_s: float, logins: Mapping[str, str]) -> Order:
    """What a supervisor on a platform is to do. Raises BadInput for what can't be watched from there."""
    if SITE in plan.sites:
        raise BadInput(f"site {SITE} has the name of the job that --supervise-on starts: name it otherwise")
    images = {place.image for place in plan.places.values()}
    image = next(iter(images)) if None not in images else None
    needs = [PLATFORMS[name].package for name in dict.fromkeys((*plan.platforms, on.partition(":")[0]))]
    packages = None if image else installed(plan.recipe, plan.run_uri, [name for name in needs if name])
    return Order(
        recipe=plan.recipe_sha,
        on=Placement(on, image, packages),
        places=dict(plan.places),
        env=dict(plan.env),
        secrets=tuple(plan.secrets),
        logins=tuple(logins),
        usd_per_hour=plan.usd_per_hour,
        limits=limits,
        poll_s=poll_s,
    )


def logins_for(plan: LaunchPlan, on: str, opener: Callable[[str], Executor] = open_executor) -> dict[str, str]:
    """The variables by which a supervisor elsewhere logs into the plan's platforms, and its own.

    Raises BadInput for a platform that is this machine's alone.
    """
    found: dict[str, str] = {}
    own = [] if on.startswith("ssh:") else [on]
    for each in dict.fromkeys([*(plan.places[site].on for site in plan.one_of_each), *own]):
        with closing(opener(each)) as executor:
            found |= executor.credentials()
    return found


def start_supervisor(fleet: Fleet, plan: LaunchPlan, order: Order, logins: Mapping[str, str]) -> tuple[str, bool]:
    """(the id of the supervisor's job, whether it is new): the newest one while its platform has it, else the next.

    Raises as `submit` does, and ExecutorError where the platform doesn't say.
    """
    all_seen = [fleet.settle(seen) for seen in fleet.look() if seen.attempt.site == SITE]
    newest = max(all_seen, key=lambda seen: seen.attempt.number, default=None)
    if newest is None:
        return submit_supervisor(fleet, plan, order, logins, 1), True
    number, is_over = newest.attempt.number, newest.attempt.ended is not None or newest.unknown
    if newest.status is not None and newest.attempt.started is not None and not is_over:
        return newest.attempt.started.id, False  # as the platform says: a record may say anything
    if not is_over and newest.problem != NOT_SUBMITTED:
        raise ExecutorError(f"whether attempt {number} of the supervisor runs isn't known: {newest.problem}")
    number += is_over
    return submit_supervisor(fleet, plan, order, logins, number), True


def submit_supervisor(fleet: Fleet, plan: LaunchPlan, order: Order, logins: Mapping[str, str], attempt: int) -> str:
    """Start one attempt, or find it; the id of its job."""
    book, executor = fleet.book, fleet.executor(order.on.on)
    order_sha = book.keep_order(order.to_json())
    named = ("--launch", str(book.launch.number), "--attempt", str(attempt), "--order", order_sha)
    given = {LOGIN_PREFIX + name: value for name, value in logins.items()}
    small = Resources(cpus=0.25, memory_gib=0.5, nonpreemptible=True)
    spec = JobSpec(
        run=book.name,
        site=SITE,
        attempt=attempt,
        command=("composer-prime", "supervise", plan.run_uri, *named),
        timeout_s=order.timeout,
        env={**plan.env, SECRET_NAMES_VARIABLE: ",".join((*plan.secrets, *given))},
        secrets=plan.secrets.also(given),
        resources=small if order.on.platform == "modal" else Resources(),
        image=order.on.image,
        registry_secret=plan.recipe.launch.registry_secret,
        packages=order.on.packages,
    )
    executor.check(spec)
    book.intend(fleet.record(spec, order.on.on, executor.price(spec)))
    book.keep_recipe(plan.recipe_text)
    if (linked := order.on.linked) is not None:
        spec = replace(spec, secrets=spec.secrets.also(book.hand(linked)))
    job = executor.submit(spec)
    book.start(job)
    return job.id


def supervise(
    uri: str,
    launch: int,
    attempt: int,
    order_sha: str,
    say: Say,
    *,
    opener: Callable[[str], Executor] = open_executor,
    time_s: float | None = None,
) -> int:
    """Watch a launch to its end, or hand it over after `time_s`; an exit code. Reads this process's environment.

    Raises BadInput where that launch, or this attempt, was ended; CorruptObject where the bucket's order isn't the one
    that was launched.
    """
    with closing(open_store(uri)) as store:
        book = open_launch(store, launch)
        _refuse_ended(book, book.attempt(SITE, attempt))
        order: Order = _ORDERS.validate_json(book.order(order_sha))
        logins = {name: os.environ.pop(LOGIN_PREFIX + name) for name in order.logins}
        os.environ.update(logins)
        plan = order.plan(book, uri, os.environ)
        with closing(Fleet(book, opener=opener)) as fleet:
            supervisor = Supervisor(fleet, plan, order.limits, say=say)
            supervisor.check()
            until = time.monotonic() + (order.timeout - HANDOVER_S if time_s is None else time_s)
            ok = supervisor.run(lambda: time.sleep(order.poll_s), until=lambda: time.monotonic() > until)
            if ok is None:
                say(f"handed over to {submit_supervisor(fleet, plan, order, logins, attempt + 1)}")
    return 1 if ok is False else 0


def _refuse_ended(book: LaunchBook, mine: Attempt) -> None:
    if (stop := book.stopped()) is not None:
        raise BadInput(f"launch {book.name} was stopped on {stop.by}: this supervisor doesn't start")
    if mine.ended is not None:
        raise BadInput(f"attempt {mine.number} of the supervisor was ended before its start: it doesn't start")
