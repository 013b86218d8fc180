"""How a process enters a run: it takes its site's name, and says that it joins, so that nothing it may need goes."""

from dataclasses import dataclass

from composer_prime.store.base import Store
from composer_prime.sync.members import Pulse, check_name_is_free, claim_incarnation
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.tape import Tape

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
    site: str
    roster: Roster
    incarnation: int
    pulse: Pulse
    tape: Tape

    def beat_joining(self, inner_step: int = 0, trained_tokens: int = 0) -> None:
        """Say that this site joins. Everything is pinned until it has (rule 13). Raises Superseded."""
        nothing = (0,) * len(self.run.fragments)
        self.pulse.beat("joining", nothing, nothing, inner_step, trained_tokens)


def enter(store: Store, run: Run, identity: SiteIdentity, runtime: Runtime) -> Entered:
    """Take the site's name and beat once, before any snapshot is looked for.

    Raises ConfigError when the name or the key won't do, StoreError, Superseded.
    """
    site, terms = identity.site, run.terms
    roster = Roster(store, run.manifest, run.sha256, identity.key)
    roster.check_admitted(site)
    judged = None if identity.replace else check_name_is_free(store, runtime, site, roster, terms.liveness_s)
    incarnation = claim_incarnation(store, site, roster, judged)
    pulse = Pulse(store, site, incarnation, roster)
    entered = Entered(run, site, roster, incarnation, pulse, Tape(store, site, incarnation))
    entered.beat_joining()
    return entered
