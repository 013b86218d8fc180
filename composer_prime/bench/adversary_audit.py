"""What became of every hostile and every honest offer of a run, read from its bucket by someone who took no part."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from composer_prime.bench.adversary_kinds import KINDS
from composer_prime.bench.adversary_site import Deed
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.terms import Terms

CODECS = ("fp32", "bf16", "int8", "int4", "e3m0", "topk")
ROUNDING = 1 + 1e-4
"""Norms are stated to 5 digits."""


@dataclass
class Tally:
    """The fates of one kind's offers.

    made       offers put into the bucket
    refused    by the commit that closed their round, which says why (`whys`)
    bounded    taken, with no more weight than the run's rule leaves to any offer
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
    honest_refused   what commits and tapes say of honest offers that were refused
    unbounded        hostile offers that were taken with more weight than the rule leaves to any: there may be none
    unnamed          hostile offers that a commit refuses and no honest site's tape names: there may be none
    """

    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    honest_offers: int = 0
    honest_taken: int = 0
    honest_refused: list[str] = field(default_factory=list)
    unbounded: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    rounds: int = 0

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
        self.unnamed += other.unnamed
        self.rounds += other.rounds

    @property
    def complaints(self) -> list[str]:
        """What may not be: honest offers refused, hostile ones that got through, refusals that no tape names."""
        return [
            *(f"honest offer refused: {one}" for one in self.honest_refused),
            *(f"taken with too much weight: {one}" for one in self.unbounded),
            *(f"refused and not on any tape: {one}" for one in self.unnamed),
        ]

    @property
    def is_clean(self) -> bool:
        """Whether every hostile offer was refused by name or bounded, and no honest one refused."""
        return not self.complaints


def audit(store: Store, honest: Collection[str], deeds: Iterable[Deed]) -> Audit:
    """Judge a run at its end.

    store    the run's root
    honest   names of the honest sites, whose tapes are read
    deeds    what the adversaries wrote down

    Raises BadInput when no run is there.
    """
    terms = find_manifest(store)[0].terms
    found, commits = Audit(), {(one.fragment, one.version): one for one in _commits(store, terms.fragments)}
    named, told = _tapes(store, honest)
    found.honest_refused += sorted(told)
    for commit in commits.values():
        _count_honest(store, found, commit, honest)
    for deed in deeds:
        _judge(found, deed, commits.get((deed.fragment, deed.version)), terms, named)
    return found


def _commits(store: Store, fragments: int) -> Iterator[Commit]:
    for fragment in range(fragments):
        version = 0
        while (commit := find_record(store, Commit, keys.commit(fragment, version))) is not None:
            yield commit
            version += 1


def _tapes(store: Store, honest: Collection[str]) -> tuple[set[tuple[int, int, str]], set[str]]:
    """(fragment, version, site) of refusals that some honest tape names; and those that concern honest sites."""
    named, told = set[tuple[int, int, str]](), set[str]()
    for reader in honest:
        for key in store.list(keys.tape_prefix(reader)):
            for event in map(json.loads, store.get(key).splitlines()):
                if event["event"] != "round":
                    continue
                place = int(event["fragment"]), int(event["version"])
                if event["fault"] is not None:
                    told.add(f"round {place[0]}/{place[1]} void: {event['fault']}")
                for site, why in event["refused"].items():
                    named.add((*place, site))
                    if site in honest:
                        told.add(f"{site} in round {place[0]}/{place[1]}: {why}")
    return named, told


def _count_honest(store: Store, found: Audit, commit: Commit, honest: Collection[str]) -> None:
    found.rounds += 1
    found.honest_taken += sum(entry.site in honest for entry in commit.taken)
    for key in store.list(keys.offers_prefix(commit.fragment, commit.version)):
        if keys.is_offer(key) and keys.offer_site(key) in honest:
            offer = find_record(store, Offer, key)
            found.honest_offers += offer is not None and offer.payload is not None


def _judge(found: Audit, deed: Deed, commit: Commit | None, terms: Terms, named: Collection[object]) -> None:
    tally = found.kinds[deed.kind]
    tally.made += 1
    place = f"{deed.kind} of {deed.site} in round {deed.fragment}/{deed.version}"
    taken = next((entry for entry in commit.taken if entry.site == deed.site), None) if commit else None
    refused = next((entry for entry in commit.refused if entry.site == deed.site), None) if commit else None
    if commit is not None and taken is not None:
        tally.bounded += 1
        if taken.multiplier * taken.offer.norm > ROUNDING * _allowed(commit, terms):
            found.unbounded.append(f"{place}: {taken.multiplier} times a norm of {taken.offer.norm}")
    elif refused is not None:
        tally.refused += 1
        sites = {entry.site for entry in (*commit.taken, *commit.refused)} if commit else set[str]()
        tally.whys[_gist(refused.why, sites)] += 1
        if (deed.fragment, deed.version, deed.site) not in named:
            found.unnamed.append(place)
    else:
        tally.unseen += 1


def _allowed(commit: Commit, terms: Terms) -> float:
    """The norm that one offer's part in the merge may have: what the clip leaves, and of a mean its equal share."""
    norms = sorted(entry.offer.norm for entry in commit.taken)
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
