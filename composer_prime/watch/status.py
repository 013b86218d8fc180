"""`composer-prime status`: one look at a run's bucket, or two with a pause between, put together into a `RunStatus`.

Liveness can't be read off a bucket at one moment: clocks of different machines are never compared. Two looks tell whose
beat changed in between.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_prime.errors import BadInput, CorruptObject, KeyMissing
from composer_prime.outer.fragments import plan_fragments
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.founding import FoundingRecord, find_founding
from composer_prime.sync.lifetime import close_fault, find_manifest
from composer_prime.sync.members import newest_incarnation
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Beat, Close, Manifest
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.validity import clipped, most_tokens
from composer_prime.visible import visible
from composer_prime.watch.records import Bytes, FragmentStatus, RunStatus, SiteStatus
from composer_prime.watch.rounds import (
    FragmentRounds,
    believed,
    is_size,
    offered_bytes,
    pieces_of,
    read_or_say,
    read_rounds,
    read_tape,
)

MAX_OF_ONE = 3
"""Problems told of one fragment or site, before the rest is counted."""
MAX_PROBLEMS = 50
"""Told in all."""
MAX_REASONS = 20
BEATS_PER_LIVENESS = 5
"""Beats of a live site within `liveness_s`; a shorter watch can't tell that it is silent."""
ROUNDS_MEANWHILE = 2
"""By which a beat may be ahead of the rounds that were read before it."""


@dataclass(frozen=True)
class _Claimed:
    """What the bucket holds of one site's name: its newest incarnation's beat, None where it has no sound one.

    revoked   whether its key was admitted before, and isn't any more; its last beat is judged by the key it had
    """

    site: str
    incarnation: int
    incarnations: int
    beat: Beat | None
    problem: str | None
    revoked: bool = False


def look(store: Store, watch_s: float = 0.0, wait: Callable[[float], object] = time.sleep) -> RunStatus:
    """What the run at `store` is doing.

    watch_s   seconds between two looks at the beats, so that it is seen who beats; 0: one look

    Raises BadInput when no run is there, ProtocolError when its manifest can't be read. Whatever else is damaged is
    named in `problems`.
    """
    try:
        manifest, sha = find_manifest(store)
    except BadInput:
        if (record := find_founding(store)) is None:
            raise
        return _announced(store.uri, record)
    roster = Roster(store, manifest, sha)
    roster.refresh()
    runtime = ThreadRuntime()
    try:
        before = None
        if watch_s > 0:
            before = {claimed.site: claimed.beat for claimed in _claims(store, roster, runtime)[0]}
            wait(watch_s)
        return _Look(store, manifest, roster, runtime, watch_s, before).status()
    finally:
        runtime.close()


class _Look:
    """One look: reads everything once, then answers."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        roster: Roster,
        runtime: Runtime,
        watch_s: float,
        before: Mapping[str, Beat | None] | None,
    ) -> None:
        self._store, self._manifest, self._roster = store, manifest, roster
        self._watch_s, self._before = watch_s, before
        self._terms = manifest.terms
        shapes = [(parameter.name, parameter.shape) for parameter in manifest.parameters]
        self._fragments = plan_fragments(shapes, manifest.terms.fragments)
        momentum = self._terms.has_momentum
        self._rounds: list[FragmentRounds] = [
            read_rounds(store, roster, each.index, runtime, each.numel, self._terms.final_version, momentum=momentum)
            for each in self._fragments
        ]
        claims, strangers = _claims(store, roster, runtime)
        self._beats = {claimed.site: claimed.beat for claimed in claims}
        self._claimed = [self._believed(claimed) for claimed in claims]
        self._tapes = {each.site: read_tape(pieces_of(store, each.site, runtime)) for each in self._claimed}
        self._clips = self._read_clips()
        self._offered, unread = self._read_offers(runtime)
        self._closed, problems = self._read_close()
        problems += strangers
        for rounds in self._rounds:
            problems += few(f"fragment {rounds.fragment}", rounds.problems)
        problems += [claimed.problem for claimed in self._claimed if claimed.problem is not None]
        problems += [problem for tape in self._tapes.values() for problem in tape.problems]
        problems += [problem for site, of_site in unread.items() for problem in few(f"site {site}", of_site)]
        self._problems = few("in all", problems, MAX_PROBLEMS)

    def _believed(self, claimed: _Claimed) -> _Claimed:
        """Without a beat that says what can't be."""
        beat, rounds = claimed.beat, max(rounds.version for rounds in self._rounds)
        if beat is None:
            return claimed
        most, num_fragments = most_tokens(self._terms, rounds + ROUNDS_MEANWHILE), len(self._fragments)
        if beat.trained_tokens > most:
            fault = f"says {beat.trained_tokens} tokens, the recipe makes at most {most} in {rounds} rounds"
        elif len(beat.versions) > num_fragments:
            fault = f"says {len(beat.versions)} versions of {num_fragments} fragments"
        else:
            return claimed
        return replace(claimed, beat=None, problem=f"the beat of site {claimed.site} {fault}: not counted")

    def status(self) -> RunStatus:
        """Everything, put together."""
        terms = self._terms
        versions = [rounds.version for rounds in self._rounds]
        sites = tuple(self._site(claimed) for claimed in self._claimed)
        return RunStatus(
            uri=self._store.uri,
            run=self._manifest.run,
            created_by=self._manifest.created_by,
            inner_steps=terms.inner_steps,
            fragments=terms.fragments,
            sync_delay=terms.sync_delay,
            codec=terms.codec,
            rounds_done=min(terms.rounds, *versions),
            rounds=terms.rounds,
            closed=self._closed,
            signed=self._roster.signed,
            owner=self._manifest.owner,
            quorum=terms.quorum,
            contributing=sum(site.contributing for site in sites),
            live=_num_live(sites),
            liveness_s=terms.liveness_s,
            watched_s=self._watch_s,
            sites=sites,
            by_fragment=tuple(self._fragment(rounds) for rounds in self._rounds),
            refused=dict(sum((rounds.refused() for rounds in self._rounds), Counter[str]()).most_common(MAX_REASONS)),
            bytes=Bytes(
                payloads=sum(self._offered.values()),
                merged=sum(rounds.merged_bytes for rounds in self._rounds),
                masters=sum(rounds.snapshot_bytes for rounds in self._rounds),
            ),
            problems=tuple(self._problems),
        )

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read_close(self) -> tuple[bool, list[str]]:
        """Whether the run has ended, and what is wrong with the record that should say so."""
        key, end = keys.close(), self._terms.final_version
        try:
            data = read_bytes(self._store, key)
        except KeyMissing:
            return False, []
        try:
            close = Close.from_bytes(data, key)
        except CorruptObject as error:
            return False, [str(error)]
        fault = close_fault(self._roster, close, end)
        is_over = all(rounds.version >= end for rounds in self._rounds)
        return is_over, [] if fault is None else [f"{key} of {close.closed_by} {fault}"]

    def _read_offers(self, runtime: Runtime) -> tuple[dict[tuple[int, int, str], int], dict[str, list[str]]]:
        """Payload bytes by (fragment, version, site): from the tapes, and from the records of what isn't on one yet.
        And what is wrong with them, by site."""
        known = {
            (*place, site): nbytes
            for site, tape in self._tapes.items()
            for place, nbytes in tape.offered.items()
            if place[0] < len(self._rounds) and place[1] <= self._rounds[place[0]].version
        }
        standing = {
            (rounds.fragment, version, site)
            for rounds in self._rounds
            for version, sites in rounds.offers.items()
            for site in sites
        }
        read, problems = offered_bytes(self._store, sorted(standing - known.keys()), runtime)
        sizes = known | read
        for (fragment, version, site), nbytes in sizes.items():
            if not is_size(nbytes, self._fragments[fragment].numel):
                told = f"says {nbytes} bytes of its offer for fragment {fragment}, round {version}: not counted"
                problems.setdefault(site, []).append(f"site {site} {told}")
        return {
            place: nbytes for place, nbytes in sizes.items() if is_size(nbytes, self._fragments[place[0]].numel)
        }, problems

    # --- sites ------------------------------------------------------------------------------------------------------

    def _site(self, claimed: _Claimed) -> SiteStatus:
        site, beat = claimed.site, claimed.beat
        taken = [
            (rounds.fragment, version, entry)
            for rounds in self._rounds
            for version in range(rounds.version)
            for entry in rounds.taken(version)
            if entry.site == site
        ]
        offered = {(f, v) for (f, v, name), nbytes in self._offered.items() if name == site and nbytes > 0}
        missed = offered - {(fragment, version) for fragment, version, _ in taken}
        num_missed = sum(version < self._rounds[fragment].version for fragment, version in missed)
        trained = max([0 if beat is None else beat.trained_tokens, *(entry.trained_tokens for _, _, entry in taken)])
        merged = self._mean(entry.tokens for _, _, entry in taken)
        dropped = self._mean(self._tapes[site].dropped.values())
        if is_guest := site in self._roster.guests(self._roster.last_admission_of(site)):
            bounds = [believed(rounds, site, self._roster) for rounds in self._rounds]
            merged, most = (self._mean(each) for each in zip(*bounds, strict=True))
            trained = max(merged, min(trained, most))
            dropped = min(dropped, trained - merged)
        if claimed.revoked or self._closed:  # nothing of it will be taken any more
            dropped = max(0, trained - merged)
        traffic = [moved for process, moved in self._tapes[site].traffic.items() if process < claimed.incarnations]
        return SiteStatus(
            site=site,
            guest=is_guest,
            incarnation=claimed.incarnation,
            incarnations=claimed.incarnations,
            state="revoked" if claimed.revoked else "silent" if beat is None else beat.state,
            beating=self._is_beating(claimed),
            contributing=any(version + 1 == self._rounds[fragment].version for fragment, version, _ in taken),
            beat_counter=0 if beat is None else beat.counter,
            inner_step=0 if beat is None else beat.inner_step,
            waits=told[1] if (told := self._tapes[site].waits) and told[0] == claimed.incarnation else None,
            versions=() if beat is None else beat.versions,
            trained_tokens=trained,
            merged_tokens=merged,
            carried_tokens=max(0, trained - merged - dropped),
            dropped_tokens=dropped,
            rounds_taken=len(taken),
            rounds_missed=num_missed,
            bytes_up=sum(up for up, _ in traffic),
            bytes_down=sum(down for _, down in traffic),
            rounds_clipped=len(self._clips[site]),
            least_clip=min(self._clips[site], default=None),
        )

    def _read_clips(self) -> dict[str, list[float]]:
        """By which factors rounds shortened a site's offers, as their commits tell."""
        clips: dict[str, list[float]] = defaultdict(list)
        for rounds in self._rounds:
            for version in range(rounds.version):
                if taken := rounds.taken(version):
                    guests = self._roster.guests(rounds.commits[version].admissions)
                    for site, factor in clipped(taken, self._terms, guests).items():
                        clips[site].append(factor)
        return clips

    def _mean(self, tokens) -> int:
        """Over fragments: each step trains every fragment, so that a site's tokens are counted once."""
        return round(sum(tokens) / len(self._rounds))

    def _is_beating(self, claimed: _Claimed) -> bool | None:
        if self._before is None:
            return None
        if self._beats[claimed.site] != self._before.get(claimed.site):
            return True
        return False if self._watch_s > self._terms.liveness_s / BEATS_PER_LIVENESS else None

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _fragment(self, rounds: FragmentRounds) -> FragmentStatus:
        num_sites = max(1, len(self._claimed))
        shares = [len(rounds.taken(version)) / num_sites for version in range(rounds.version)]
        return FragmentStatus(
            fragment=rounds.fragment,
            parameters=self._fragments[rounds.fragment].numel,
            version=rounds.version,
            void=len(rounds.void),
            faulty=len(rounds.faulty),
            participation=sum(shares) / len(shares) if shares else None,
            open_offers=len(rounds.offers.get(rounds.version, ())),
            snapshots=tuple(rounds.snapshots),
        )


def _announced(uri: str, record: FoundingRecord) -> RunStatus:
    """A run that its first site has yet to make."""
    fields: dict[str, Any] = dict.fromkeys(RunStatus.__dataclass_fields__, 0) | record.terms.model_dump()
    fields |= {"uri": uri, "run": record.run, "created_by": "nobody yet (announced)", "owner": record.owner}
    fields |= {"closed": False, "signed": bool(record.owner or record.keys), "bytes": Bytes(0, 0, 0), "refused": {}}
    fields |= {"sites": (), "by_fragment": (), "problems": ()}
    return RunStatus(**{name: fields[name] for name in RunStatus.__dataclass_fields__})


def few(source: str, problems: Sequence[str], most: int = MAX_OF_ONE) -> list[str]:
    """The first of one source's problems, and how many more there are."""
    more = len(problems) - most
    return [visible(each) for each in problems[:most]] + ([f"{source}: {more:,} more problems"] if more > 0 else [])


def _num_live(sites: Sequence[SiteStatus]) -> int | None:
    """Live sites, as rounds wait for them; None when it isn't known of one whether it still beats."""
    beating = [site.beating for site in sites if site.state == "live"]
    return None if None in beating else sum(map(bool, beating))


def _claims(store: Store, roster: Roster, runtime: Runtime) -> tuple[list[_Claimed], list[str]]:
    """Every site of the run that ever claimed its name, with the beat of its newest incarnation; and what is wrong
    with other claims."""
    claims: dict[str, list[int]] = {}
    for key in store.list(keys.sites_prefix()):
        if keys.is_claim(key):
            site, incarnation = keys.parse_claim(key)
            claims.setdefault(site, []).append(incarnation)
    roster.refresh()  # who was admitted since is no stranger
    strangers = [site for site in claims if roster.signed and roster.last_admission_of(site) is None]
    for site in strangers:
        del claims[site]
    problems = []
    if strangers:
        problems = [f"names that were never admitted have claims: {len(strangers):,}, such as {min(strangers)}"]

    def read(site: str) -> _Claimed:
        admissions = roster.last_admission_of(site) if roster.signed else None
        revoked = admissions is not None and admissions < roster.newest
        numbers = claims[site]
        newest = newest_incarnation(store, site, roster, admissions=admissions) if roster.signed else max(numbers)
        place = (site, max(newest, 0), len(claims[site]))
        if newest < 0:
            why = "it was admitted anew and has not come since, or another uses its name"
            problem = f"site {site} has claims, but none that its admitted key signed: {why}"
            return _Claimed(*place, None, problem, revoked)
        beat = read_or_say(store, Beat, key := keys.beat(site, newest))
        if isinstance(beat, str):
            return _Claimed(*place, None, f"site {site} has not beaten: {beat}", revoked)
        fault = roster.fault(beat, site, admissions)
        if fault is None and (beat.site, beat.incarnation) != (site, newest):
            fault = f"says {beat.site} {beat.incarnation}"
        if fault is not None:
            return _Claimed(*place, None, f"{key} of {site} {fault}", revoked)
        return _Claimed(*place, beat, None, revoked)

    return runtime.map(read, sorted(claims)), problems
