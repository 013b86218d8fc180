"""How a process enters a run: it takes its site's name, says what it needs, and reads the newest masters (rule 11)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from composer_prime.errors import StoreError, StoreUnusable, Superseded
from composer_prime.store.base import Store
from composer_prime.sync.beginning import OwnValues, begin
from composer_prime.sync.courier import Courier
from composer_prime.sync.journal import Journal
from composer_prime.sync.members import Members, Pulse, check_name_is_free, claim_incarnation
from composer_prime.sync.refining import Refining
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import Upper
from composer_prime.sync.tape import Tape

logger = logging.getLogger(__name__)

BEATS_PER_LIVENESS = 5
"""Beats within the time after which a silent site is given up."""


@dataclass(frozen=True)
class SiteIdentity:
    """Who a site is.

    site       its name in the bucket
    key        its signing key, in a run that admits keys
    replace    whether it takes its name over from a process that is still alive; otherwise it is refused
    """

    site: str
    key: SigningKey | None = None
    replace: bool = True


@dataclass(frozen=True)
class Entered:
    """A process's place in a run."""

    run: Run
    roster: Roster
    incarnation: int
    pulse: Pulse
    tape: Tape
    courier: Courier


def enter(
    store: Store,
    run: Run,
    identity: SiteIdentity,
    *,
    runtime: Runtime,
    journal: Journal | None,
    inner_step: int = 0,
    own: OwnValues | None = None,
    patience_s: float | None = None,
) -> Entered:
    """Enter a run and read its log up to now.

    own          what this process holds that may be masters of the run; they aren't fetched then
    patience_s   seconds that whole masters may take to fetch; beyond them a site begins with upper halves. None: any.
                 The fixed committer always waits, since nobody merges anything without it

    Raises ConfigError when the name or the key won't do, StoreError, Superseded.
    """
    site, terms = identity.site, run.terms
    roster = Roster(store, run.manifest, run.sha256, identity.key)
    roster.check_admitted(site)
    judged = None if identity.replace else check_name_is_free(store, runtime, site, roster, terms.liveness_s)
    claim = claim_incarnation(store, site, roster, judged)
    incarnation = claim.incarnation
    pulse = Pulse(store, site, claim, roster, atomic=terms.committer is None)
    # Before any snapshot is looked for: what this site may need is kept from now on (rule 13).
    nothing = (0,) * len(run.fragments)
    pulse.beat("joining", nothing, nothing, inner_step, 0)
    tape = Tape(store, site, incarnation)
    refining = Refining(store, run, runtime=runtime, roster=roster)
    with _beating(runtime, terms.liveness_s, lambda: pulse.beat("joining", nothing, nothing, inner_step, 0)):
        is_committer = roster.authority().committer == site
        starts = begin(store, run, roster, runtime, own, None if is_committer else patience_s)
        courier = Courier(
            store,
            run,
            runtime=runtime,
            roster=roster,
            members=Members(store, runtime, roster, terms.liveness_s),
            pulse=pulse,
            replicas=[
                refining.replica(start, site)
                if isinstance(start, Upper)
                else Replica(store, run, fragment.index, runtime=runtime, roster=roster, site=site, start=start)
                for fragment, start in zip(run.fragments, starts, strict=True)
            ],
            refining=refining,
            tape=tape,
            journal=journal,
            site=site,
            incarnation=incarnation,
        )
        courier.catch_up()
    return Entered(run, roster, incarnation, pulse, tape, courier)


JOINING_TASK = "outer-joining"
"""Name of the task that beats while a site joins, and does nothing before time has passed."""


@contextmanager
def _beating(runtime: Runtime, liveness_s: float, beat: Callable[[], None]) -> Iterator[None]:
    """Beat beside the block: over a slow link it outlasts `liveness_s`, after which nobody honours pins.

    Raises Superseded at the block's end when another process took the name meanwhile.
    """
    waiting, entered = runtime.condition(), False
    superseded: list[Superseded] = []

    def go_on() -> None:
        while not entered and not superseded:
            with waiting:
                if not entered:
                    waiting.wait(timeout=liveness_s / BEATS_PER_LIVENESS)
            try:
                if not entered:
                    beat()
            except Superseded as error:
                superseded.append(error)
            except (StoreError, StoreUnusable) as error:
                logger.warning("beat_failed error=%s", error)

    task = runtime.spawn(JOINING_TASK, go_on)
    try:
        yield
    finally:
        with waiting:
            entered = True
            waiting.notify_all()
        task.join()
    if superseded:
        raise superseded[0]
