"""How a process enters a run: it takes its site's name, says what it needs, and reads the newest masters (rule 11)."""

from dataclasses import dataclass

from composer_prime.store.base import Store
from composer_prime.sync.courier import Courier
from composer_prime.sync.journal import Journal
from composer_prime.sync.members import Members, Pulse, check_name_is_free, claim_incarnation
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.tape import Tape


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
    store: Store, run: Run, identity: SiteIdentity, *, runtime: Runtime, journal: Journal | None, inner_step: int = 0
) -> Entered:
    """Enter a run and read its log up to now. Raises ConfigError when the name or the key won't do, StoreError."""
    site, terms = identity.site, run.terms
    roster = Roster(store, run.manifest, run.sha256, identity.key)
    roster.check_admitted(site)
    if not identity.replace:
        check_name_is_free(store, runtime, site, roster, terms.liveness_s)
    claim = claim_incarnation(store, site, roster)
    incarnation = claim.incarnation
    pulse = Pulse(store, site, claim, roster, atomic=terms.committer is None)
    # Before any snapshot is looked for: what this site may need is kept from now on (rule 13).
    nothing = (0,) * len(run.fragments)
    pulse.beat("joining", nothing, nothing, inner_step, 0)
    tape = Tape(store, site, incarnation)
    courier = Courier(
        store,
        run,
        runtime=runtime,
        roster=roster,
        members=Members(store, runtime, roster, terms.liveness_s),
        pulse=pulse,
        replicas=[
            Replica(store, run, fragment.index, runtime=runtime, roster=roster, site=site) for fragment in run.fragments
        ],
        tape=tape,
        journal=journal,
        site=site,
        incarnation=incarnation,
    )
    courier.catch_up()
    return Entered(run, roster, incarnation, pulse, tape, courier)
