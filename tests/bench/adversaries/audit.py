"""What became of every hostile and every honest offer of a run, read from its bucket by someone who took no part."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.reading import find_record, read_record
from composer_prime.sync.records import Commit, Offer, Part, Taken
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import part_shares
from tests.bench.adversaries.kinds import KINDS
from tests.bench.adversaries.site import Deed

CODECS = ("fp32", "bf16", "int8", "int4", "topk")
ROUNDING = 1 + 1e-4
"""Norms are stated to 5 digits."""


@dataclass
class Tally:
    """The fates of one kind's offers.

    made       offers put into the bucket
    refused    by the commit that closed their round, or by every part of it; the record says why (`whys`)
    bounded    taken, with no more weight than the run's rule leaves to any offer; or left out of some parts only
    unseen     the round closed without them, or never opened
    """

    made: int = 0
    refused: int = 0
    bounded: int = 0
    unseen: int = 0
    whys: Counter[str] = field(default_factory=Counter)


@dataclass
class Audit:
    """All kinds, and the honest sites.

    honest_offers    with something to merge, that stand in the bucket
    honest_refused   what commits, parts and tapes say of honest offers that were refused
    unbounded        hostile offers that were taken with more weight than the rule leaves to any: there may be none
    rounds, cut      all that closed, and those that were merged in parts
    """

    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    honest_offers: int = 0
    honest_taken: int = 0
    honest_refused: list[str] = field(default_factory=list)
    unbounded: list[str] = field(default_factory=list)
    rounds: int = 0
    cut: int = 0

    def add(self, other: "Audit") -> None:
        """Count another run's offers in."""
        for kind, tally in other.kinds.items():
            mine = self.kinds[kind]
            mine.made += tally.made
            mine.refused += tally.refused
            mine.bounded += tally.bounded
            mine.unseen += tally.unseen
            mine.whys += tally.whys
        self.honest_offers += other.honest_offers
        self.honest_taken += other.honest_taken
        self.honest_refused += other.honest_refused
        self.unbounded += other.unbounded
        self.rounds += other.rounds
        self.cut += other.cut

    @property
    def complaints(self) -> list[str]:
        """What may not be: honest offers refused, hostile ones that got through."""
        return [
            *(f"honest offer refused: {one}" for one in self.honest_refused),
            *(f"taken with too much weight: {one}" for one in self.unbounded),
        ]

    @property
    def is_clean(self) -> bool:
        """Whether every hostile offer was refused by name or bounded, and no honest one refused."""
        return not self.complaints


@dataclass(frozen=True)
class _Round:
    """A closed round, and the parts in which it was merged: none where all was merged at once."""

    commit: Commit
    parts: tuple[Part, ...]

    def taken_of(self, site: str) -> Taken | None:
        """The site's offer, where the commit takes it."""
        return next((entry for entry in self.commit.taken if entry.site == site), None)

    def why_excluded(self, site: str) -> dict[int, str]:
        """Why an offer was left out, by part."""
        return {part.part: entry.why for part in self.parts for entry in part.excluded if entry.site == site}

    def weighed(self, terms: Terms) -> Iterator[tuple[dict[str, float], Sequence[Taken]]]:
        """(multipliers, the offers that they are of) in everything that was merged by itself."""
        for part in self.parts or (None,):
            out = [] if part is None else [entry.site for entry in part.excluded]
            yield (
                part_shares(self.commit, out, terms, guests=()) if len(out) < len(self.commit.taken) else {},
                [entry for entry in self.commit.taken if entry.site not in out],
            )


def audit(store: Store, honest: Collection[str], deeds: Iterable[Deed]) -> Audit:
    """Judge a run at its end.

    store    the run's root
    honest   names of the honest sites, whose tapes are read
    deeds    what the adversaries wrote down

    Raises BadInput when no run is there, CorruptObject or KeyMissing when a part of a round isn't.
    """
    terms = find_manifest(store)[0].terms
    found = Audit()
    rounds = {(one.commit.fragment, one.commit.version): one for one in _rounds(store, terms.fragments)}
    found.honest_refused += sorted(set(_told_of_honest(store, honest)))
    for one in rounds.values():
        _count_honest(store, found, one, honest)
    for deed in deeds:
        _judge(found, deed, rounds.get((deed.fragment, deed.version)), terms)
    return found


def _told_of_honest(store: Store, honest: Collection[str]) -> Iterator[str]:
    """What honest sites' tapes tell of rounds that may not be: void ones, refusals of honest offers."""
    for reader in honest:
        for key in store.list(keys.tape_prefix(reader)):
            for event in map(json.loads, store.get(key).splitlines()):
                if event["event"] == "round":
                    place = f"round {event['fragment']}/{event['version']}"
                    if event["fault"] is not None:
                        yield f"{place} void: {event['fault']}"
                    yield from (f"{site} in {place}: {why}" for site, why in event["refused"].items() if site in honest)


def _rounds(store: Store, fragments: int) -> Iterator[_Round]:
    for fragment in range(fragments):
        version = 0
        while (commit := find_record(store, Commit, keys.commit(fragment, version))) is not None:
            indices = range(commit.num_parts)
            yield _Round(commit, tuple(read_record(store, Part, keys.merged(fragment, version, i)) for i in indices))
            version += 1


def _count_honest(store: Store, found: Audit, one: _Round, honest: Collection[str]) -> None:
    commit = one.commit
    found.rounds += 1
    found.cut += bool(one.parts)
    found.honest_taken += sum(entry.site in honest for entry in commit.taken)
    for site in sorted(honest):
        for part, why in one.why_excluded(site).items():
            found.honest_refused.append(f"{site} in part {part} of round {commit.fragment}/{commit.version}: {why}")
    for key in store.list(keys.offers_prefix(commit.fragment, commit.version)):
        if keys.is_offer(key) and keys.offer_site(key) in honest:
            offer = find_record(store, Offer, key)
            found.honest_offers += offer is not None and offer.payload is not None


def _judge(found: Audit, deed: Deed, one: _Round | None, terms: Terms) -> None:
    tally = found.kinds[deed.kind]
    tally.made += 1
    whys, taken = [], None
    if one is not None:
        whys = [entry.why for entry in one.commit.refused if entry.site == deed.site]
        taken = one.taken_of(deed.site)
    if one is None or (taken is None and not whys):
        tally.unseen += 1
        return
    excluded = one.why_excluded(deed.site)
    if taken is not None and one.parts and len(excluded) == len(one.parts):
        whys = list(excluded.values())
    elif taken is not None:
        found.unbounded += [f"{_told(deed)}: {what}" for what in _too_much(one, deed.site, terms)]
    tally.refused += bool(whys)
    tally.bounded += not whys
    for why in whys[:1]:
        tally.whys[_gist(why, {entry.site for entry in (*one.commit.taken, *one.commit.refused)})] += 1


def _told(deed: Deed) -> str:
    return f"{deed.kind} of {deed.site} in round {deed.fragment}/{deed.version}"


def _too_much(one: _Round, site: str, terms: Terms) -> Iterator[str]:
    """Where an offer was merged with more weight than the rule leaves to any."""
    for factors, taken in one.weighed(terms):
        norm = next((entry.offer.norm for entry in taken if entry.site == site), None)
        if norm is not None and factors[site] * norm > ROUNDING * _allowed(taken, terms):
            yield f"{factors[site]} times a norm of {norm}"


def _allowed(taken: Sequence[Taken], terms: Terms) -> float:
    """The norm that one offer's part in the merge may have: what the clip leaves, and of a mean its equal share."""
    norms = sorted(entry.offer.norm for entry in taken)
    limit = terms.clip * norms[(len(norms) - 1) // 2]
    return limit / len(norms) if terms.aggregate == "clipped" else limit


def _gist(why: str, sites: Collection[str]) -> str:
    """A reason without what differs from offer to offer: numbers, hashes, keys and sites."""
    words = [word.rstrip(":;,").removesuffix("'s") for word in why.split()]
    before = ["", *words]  # a site's name stands first, or after one of these: "a" is a word, too
    named = [word in sites and last in ("", "of", "not", "signed") for word, last in zip(words, before, strict=False)]
    told = [
        "SITE" if is_site else "..." if _differs(word) else word for word, is_site in zip(words, named, strict=True)
    ]
    return " ".join(word for word, last in zip(told, ["", *told], strict=False) if word != "..." or last != "...")


def _differs(word: str) -> bool:
    return "/" in word or (any(letter.isdigit() for letter in word) and word not in CODECS)
