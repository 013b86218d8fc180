"""A supervisor that is itself a job: it goes on when the machine that launched is switched off.

Its job is an attempt of a site of its own, which `ps` shows and `cancel` ends. What it is to do lies in the bucket, and
its hash stands on the command line, which the launcher gave to the platform. Before its time is over it starts the next
one.
"""

import os
import time
from contextlib import closing
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from composer_prime.errors import BadInput, ExecutorError
from composer_prime.executors.base import Resources, Secrets
from composer_prime.executors.open import PLATFORMS, Opener, open_executor
from composer_prime.executors.packages import Packages
from composer_prime.launch import launch_keys
from composer_prime.launch.budget import Limits
from composer_prime.launch.fleet import Fleet
from composer_prime.launch.plan import INSTALLS, LaunchPlan, NamedSecrets, installed
from composer_prime.launch.records import open_launch
from composer_prime.launch.supervisor import Say, Supervisor
from composer_prime.store import open_store

SITE = "supervisor"
TIMEOUT_S = 24 * 3600
"""As long as every platform lets a job run."""
HOST_TIMEOUT_S = 60 * 24 * 3600
"""On a host of one's own, from where the next one can't be started."""
HANDOVER_S = 900
"""So long before that the next one is started."""
LOGIN_PREFIX = "COMPOSER_PRIME_LOGIN_"
"""Before the names of variables by which platforms are logged into: a container may have its own of those names."""


@dataclass(frozen=True)
class Order:
    """A supervisor's task.

    on          where the supervisor runs
    packages    that its job installs
    timeout_s   of its job
    logins      the variables by which it logs into the plan's platforms and its own, with LOGIN_PREFIX
    """

    plan: LaunchPlan
    on: str
    packages: Packages | None
    timeout_s: int
    limits: Limits
    poll_s: float
    logins: NamedSecrets


_ORDERS = TypeAdapter(Order)


def order_of(plan: LaunchPlan, on: str, limits: Limits, poll_s: float, opener: Opener = open_executor) -> Order:
    """The order of a supervisor on a platform.

    Raises BadInput for what can't be watched from there, such as a platform that is this machine's alone.
    """
    if SITE in plan.sites:
        raise BadInput(f"site {SITE} has the name of the job that --supervise-on starts: name it otherwise")
    logins: dict[str, str] = {}
    is_host = on.startswith("ssh:")
    for each in {*plan.places.values()} if is_host else {*plan.places.values(), on}:
        with closing(opener(each)) as executor:
            logins |= {LOGIN_PREFIX + name: value for name, value in executor.credentials().items()}
    packages = None
    if on in INSTALLS and plan.recipe.launch.image is None:
        needs = dict.fromkeys(PLATFORMS[name].package for name in (*plan.platforms, on))
        packages = installed(plan.recipe, filter(None, needs))
        packages.wheels()
    return Order(plan, on, packages, HOST_TIMEOUT_S if is_host else TIMEOUT_S, limits, poll_s, Secrets(logins))


def start_supervisor(fleet: Fleet, order: Order) -> tuple[str, bool]:
    """(the id of the supervisor's job, whether it is new): the newest one while its platform has it, else the next.

    Raises as `submit_supervisor`, and ExecutorError where the platform doesn't say.
    """
    attempt, attempts = 1, [fleet.settle(each) for each in fleet.look() if each.site == SITE]
    if attempts:
        newest = attempts[-1]
        attempt = newest.number
        if newest.ended is not None or newest.is_unknown:
            attempt += 1
        elif newest.problem:
            raise ExecutorError(f"whether attempt {attempt} of the supervisor runs isn't known: {newest.problem}")
        elif newest.job is not None and newest.status is not None and not newest.status.half_submitted:
            return newest.job.id, False  # as the platform says: a record may say anything
    return submit_supervisor(fleet, order, attempt), True


def submit_supervisor(fleet: Fleet, order: Order, attempt: int) -> str:
    """Start one attempt, or find it; the id of its job. Raises as `Fleet.intend` and `Fleet.submit`."""
    book, plan = fleet.book, order.plan
    sha = book.keep(launch_keys.order, _ORDERS.dump_json(order))
    named = ("--launch", str(book.launch.number), "--attempt", str(attempt), "--order", sha)
    secrets = plan.secrets.also(order.logins.reveal())
    alone = replace(plan, places={SITE: order.on}, packages=order.packages, secrets=secrets)
    small = Resources(cpus=0.25, memory_gib=0.5, nonpreemptible=True)
    spec = replace(
        fleet.spec(alone, SITE, attempt),
        command=("composer-prime", "supervise", plan.run_uri, *named),
        timeout_s=order.timeout_s,
        resources=small if order.on == "modal" else Resources(),
        caches={},
    )
    record = fleet.intend(order.on, spec, fleet.executor(order.on).price(spec), order.timeout_s)
    return fleet.submit(order.on, spec, record).id


def supervise(uri: str, launch: int, attempt: int, order: str, say: Say, *, opener: Opener = open_executor) -> int:
    """Watch a launch to its end, or hand it over; an exit code. Reads this process's environment.

    order    its sha256

    Raises BadInput where that launch, or this attempt, was ended; CorruptObject where the bucket's order isn't the one
    that was launched.
    """
    with closing(open_store(uri)) as store:
        book = open_launch(store, launch)
        book.refuse_ended(SITE, attempt)
        mine: Order = _ORDERS.validate_json(book.kept(launch_keys.order, order))
        for name in mine.logins:
            os.environ[name.removeprefix(LOGIN_PREFIX)] = os.environ.pop(name)
        with closing(Fleet(book, opener=opener)) as fleet:
            supervisor = Supervisor(fleet, mine.plan, mine.limits, say=say)
            supervisor.check()
            until = time.monotonic() + mine.timeout_s - HANDOVER_S
            ok = supervisor.run(lambda: time.sleep(mine.poll_s), until=lambda: time.monotonic() > until)
            if ok is None:
                say(f"handed over to {submit_supervisor(fleet, mine, attempt + 1)}")
    return 1 if ok is False else 0
