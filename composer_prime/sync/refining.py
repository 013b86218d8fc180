"""Rule 11, over a slow link: train from the upper halves of the masters, and make them whole beside the training.

A trained master is 3.35 bytes a parameter; its upper half, which is all of it that a bf16 model holds, 1.35. A site
that begins there follows the log by the same arithmetic, and its movement counts from where it stood itself, so it may
offer. It vouches for no master until the lower half has come, and neither makes commits nor calls any void.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from composer_prime.errors import CorruptObject, KeyMissing, RoundWaits, StoreError
from composer_prime.store.base import Store
from composer_prime.store.remembering import RememberingStore
from composer_prime.sync.replica import Replica, StrictReplica
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.snapshots import Master, Upper, load_lower, newest_master

logger = logging.getLogger(__name__)


@dataclass
class _Refined:
    """One fragment on its way to a whole master.

    replica    the site's own, on a coarse master
    log        through which it reads, so that the rounds since need not be fetched twice
    strict     follows the log from the whole master, once that is here
    is_lost    whether the snapshot turned out to be gone or wrong
    """

    upper: Upper
    replica: Replica
    log: RememberingStore
    strict: StrictReplica | None = None
    is_lost: bool = False


class Refining:
    """What a site that began with coarse masters has yet to fetch. Nothing, for most."""

    def __init__(self, store: Store, run: Run, *, runtime: Runtime, roster: Roster) -> None:
        self._store = store
        self._run = run
        self._runtime = runtime
        self._roster = roster
        self._left: dict[int, _Refined] = {}

    def replica(self, start: Upper, site: str) -> Replica:
        """The replica that follows the log from a coarse master."""
        fragment = start.master.fragment
        log = RememberingStore(self._store, 4 * self._run.fragments[fragment].numel)
        replica = Replica(
            log, self._run, fragment, runtime=self._runtime, roster=self._roster, site=site, start=start.master
        )
        replica.on_pass = lambda: log.keep() if replica.master.coarse else log.forget()
        self._left[fragment] = _Refined(start, replica, log)
        return replica

    def pins(self) -> Mapping[int, int]:
        """The version of the master, by fragment, that is yet to be fetched; the rounds since are needed, too."""
        return {
            fragment: refined.upper.master.version
            for fragment, refined in list(self._left.items())
            if refined.replica.master.coarse  # else it has found a whole one itself
        }

    def next(self) -> Replica | None:
        """The replica whose master is the next to be made whole."""
        for fragment, refined in list(self._left.items()):
            if refined.replica.master.coarse:
                return refined.replica
            self._done(fragment)  # it has found a whole one itself, where the log before that was gone
        return None

    def fetch(self, fragment: int, goes_on: Callable[[], bool]) -> bool:
        """Come near the present from a whole master, beside the passes; False once `goes_on` says no.

        Raises StoreError: call again.
        """
        refined = self._left[fragment]
        if refined.strict is None:
            master = self._whole(refined, goes_on)
            if master is None:
                return False
            refined.strict = self._strict(refined, master)
        try:
            self._follow(refined.strict, refined.replica.version)
        except (KeyMissing, RoundWaits):  # of a round that this site has passed, and whose bytes are spoiled since
            places = (self._store, self._run, self._roster, fragment)
            found = newest_master(*places, at_most=refined.replica.version, above=refined.strict.version)
            if found is None:
                raise
            refined.strict = self._strict(refined, found)
            self._follow(refined.strict, refined.replica.version)
        return True

    def settle(self, fragment: int) -> None:
        """Let the site's replica stand on its whole master; under the lock of the passes, so that it stands still.

        Raises StoreError: fetch again. Raises ProtocolError as `Replica.become`.
        """
        refined = self._left[fragment]
        assert refined.strict is not None
        self._follow(refined.strict, refined.replica.version)
        refined.replica.become(refined.strict)
        self._done(fragment)
        logger.info("master_whole fragment=%d version=%d", fragment, refined.replica.version)

    def _done(self, fragment: int) -> None:
        refined = self._left.pop(fragment)
        refined.replica.on_pass = lambda: None
        refined.log.forget()

    def _whole(self, refined: _Refined, goes_on: Callable[[], bool]) -> Master | None:
        """The whole of the master that we began with or, where that is gone, of another one not above our version."""
        if not refined.is_lost:
            try:
                return load_lower(self._store, refined.upper, goes_on)
            except (KeyMissing, CorruptObject) as error:
                refined.is_lost = True
                logger.warning("lower_half_refused fragment=%d error=%s", refined.replica.fragment, error)
        fragment, at_most = refined.replica.fragment, refined.replica.version
        found = newest_master(self._store, self._run, self._roster, fragment, at_most=at_most)
        if found is None:
            raise StoreError(f"{self._store.uri} holds no whole master of fragment {fragment} up to version {at_most}")
        return found

    def _strict(self, refined: _Refined, master: Master) -> StrictReplica:
        log, places = refined.log.recalled(), {"runtime": self._runtime, "roster": self._roster}
        try:
            return StrictReplica(log, self._run, master.fragment, site="", start=master, **places)
        except (KeyMissing, CorruptObject) as error:  # it slept, and rounds behind that master were collected meanwhile
            refined.is_lost = True
            raise StoreError(f"{error}; looking for another master") from error

    def _follow(self, strict: StrictReplica, version: int) -> None:
        while strict.version < version:
            if not strict.advance():
                break
        if strict.version != version:
            raise StoreError(
                f"fragment {strict.fragment}: the log leads to version {strict.version} from a whole master, "
                f"and this site stands at {version}"
            )
