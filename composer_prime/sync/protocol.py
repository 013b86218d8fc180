"""The decisions of the outer loop, as pure functions of (what I know, now): no I/O, no clock, no torch.

A driver feeds them with what it read from the bucket; a simulator can feed them with anything. The rules they implement
are numbered as in docs/protocol.md.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from composer_prime.errors import ProtocolError
from composer_prime.outer.shares import multipliers
from composer_prime.store import keys
from composer_prime.sync.records import Commit, Offer, Refused, Taken, Terms

STAGGER_S = 1.0
"""Seconds between two sites' turns to commit the same round."""

Verdict = Literal["valid", "empty", "invalid"]


def due_fragment(versions: Sequence[int]) -> int:
    """Rule 3: whose turn it is, from the log alone: the lowest next version, ties to the lowest index."""
    return min(range(len(versions)), key=lambda index: (versions[index], index))


def training_is_over(versions: Sequence[int], terms: Terms) -> bool:
    """Rule 11: every fragment has had its training rounds; what is left is the closing round."""
    return min(versions) >= terms.rounds


def run_is_over(versions: Sequence[int], terms: Terms) -> bool:
    """Rule 11: every fragment has reached its final version."""
    return min(versions) >= terms.final_version


def commit_rank(site: str, live: Collection[str], fragment: int, version: int) -> int:
    """Rule 5: this site's place in the order, drawn anew for each round, in which live sites may commit it."""

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{fragment}:{version}:{name}".encode()).digest()

    mine = draw(site)
    return sum(draw(name) < mine for name in live if name != site)


@dataclass(frozen=True)
class RoundView:
    """What one site knows of an open round.

    verdicts      the offers seen so far and what they are worth; "empty" has nothing to merge
    live          sites to wait for (newest incarnation, state live, beat not timed out)
    since_quorum_s   seconds since this site first saw `quorum` valid offers; None when it hasn't
    since_all_s      seconds since this site first saw an offer of every live site; None when it hasn't
    """

    verdicts: Mapping[str, Verdict]
    live: frozenset[str]
    since_quorum_s: float | None
    since_all_s: float | None


@dataclass(frozen=True)
class RoundDecision:
    """`close` now or not; if so, which sites' offers are taken (none: a void round)."""

    close: bool
    take: tuple[str, ...] = ()
    wait_s: float = math.inf


def decide_round(view: RoundView, terms: Terms) -> RoundDecision:
    """Rule 5: when an open round may close, and on what.

    At once when every live site has offered and enough offers are valid, or none of them has anything to merge. After
    the grace window when enough are valid though some live site is missing. A round in which every live site has
    offered but too few are valid merges nothing, after grace: all work is carried.
    """
    valid = tuple(sorted(site for site, verdict in view.verdicts.items() if verdict == "valid"))
    num_invalid = sum(verdict == "invalid" for verdict in view.verdicts.values())
    everyone = view.live <= view.verdicts.keys()
    enough = len(valid) >= terms.quorum
    if enough and everyone:
        return RoundDecision(True, valid)
    if enough:
        left = terms.grace_s - (view.since_quorum_s or 0.0)
        return RoundDecision(True, valid) if left <= 0 else RoundDecision(False, wait_s=left)
    if everyone and len(view.verdicts) >= terms.quorum:
        if not valid and not num_invalid:
            return RoundDecision(True)
        left = terms.grace_s - (view.since_all_s or 0.0)
        return RoundDecision(True) if left <= 0 else RoundDecision(False, wait_s=left)
    return RoundDecision(False)


def write_commit(
    *,
    fragment: int,
    version: int,
    base_sha: str,
    previous: str,
    offers: Mapping[str, Offer],
    take: Sequence[str],
    refused: Mapping[str, str],
    terms: Terms,
    committer: str,
    incarnation: int,
) -> Commit:
    """The record that closes a round on the offers of `take`, with their final multipliers."""
    factors = multipliers({site: offers[site].tokens for site in take}, terms.weighting)
    taken = []
    for site in sorted(take):
        offer = offers[site]
        assert offer.payload is not None and offer.sha256 is not None
        taken.append(
            Taken(
                site=site,
                incarnation=offer.incarnation,
                payload=offer.payload,
                sha256=offer.sha256,
                tokens=offer.tokens,
                multiplier=factors[site],
            )
        )
    return Commit(
        fragment=fragment,
        version=version,
        base_sha=base_sha,
        taken=tuple(taken),
        refused=tuple(Refused(site=site, why=refused[site]) for site in sorted(refused)),
        previous=previous,
        committer=committer,
        incarnation=incarnation,
    )


def offer_fault(
    offer: Offer,
    *,
    site: str,
    fragment: int,
    version: int,
    base_sha: str,
    nbytes: int,
    taken: Collection[str],
    terms: Terms,
) -> str | None:
    """Why this offer can't be part of the round, from its record alone; None when it can.

    site, fragment, version   what the offer's key says
    nbytes                    bytes of a payload of this fragment in the run's codec
    taken                     payload keys that earlier commits took: a payload is taken at most once
    """
    if (offer.site, offer.fragment, offer.version) != (site, fragment, version):
        return f"record says {offer.site} {offer.fragment}/{offer.version}, its key {site} {fragment}/{version}"
    if offer.base_sha != base_sha:
        return f"stands on master {offer.base_sha[:16]}, the round on {base_sha[:16]}"
    if offer.payload is None:
        return None
    if offer.codec != terms.codec:
        return f"coded as {offer.codec}, the run uses {terms.codec}"
    if offer.nbytes != nbytes:
        return f"says {offer.nbytes} bytes, {terms.codec} of this fragment has {nbytes}"
    if offer.tokens <= 0:
        return "has a payload but no tokens behind it"
    return payload_fault(offer.payload, site=site, fragment=fragment, version=version, taken=taken, terms=terms)


def payload_fault(
    payload: str, *, site: str, fragment: int, version: int, taken: Collection[str], terms: Terms
) -> str | None:
    """Why this payload's key can't stand in this round; None when it can.

    A payload is taken at most once, and only within `max_stale_rounds` of the round it was captured on: so whoever
    starts from a snapshot needs to read no more than that many commits before it to judge as everyone else does.
    """
    try:
        captured_fragment, captured_version, captured_site = keys.parse_payload(payload)
    except ProtocolError as error:
        return str(error)
    if (captured_fragment, captured_site) != (fragment, site):
        return f"payload belongs to fragment {captured_fragment} of {captured_site}"
    if not 0 <= version - captured_version <= terms.max_stale_rounds:
        return f"payload is of round {captured_version}, at most {terms.max_stale_rounds} rounds may lie between"
    if payload in taken:
        return "payload was taken by an earlier round"
    return None


def commit_fault(
    commit: Commit,
    *,
    fragment: int,
    version: int,
    previous: str,
    offers: Mapping[str, Offer],
    taken: Collection[str],
    terms: Terms,
) -> str | None:
    """Why this commit doesn't follow from manifest and offers; None when it does. A faulty commit is a void round.

    offers   the records, by site, of the offers that the commit takes; a site without one is missing
    The base hash isn't judged here: a difference there may be this site's own fault, see `Replica`.
    """
    if (commit.fragment, commit.version) != (fragment, version):
        return f"record says {commit.fragment}/{commit.version}, its key {fragment}/{version}"
    if commit.previous != previous:
        return f"names {commit.previous[:16]} as the commit before, that one is {previous[:16]}"
    sites = [entry.site for entry in commit.taken]
    if sites != sorted(set(sites)):
        return "its offers are not sorted by site, or a site stands twice"
    if commit.taken and len(commit.taken) < terms.quorum:
        return f"takes {len(commit.taken)} offers, the quorum is {terms.quorum}"
    for entry in commit.taken:
        offer = offers.get(entry.site)
        if offer is None:
            return f"takes an offer of {entry.site} that isn't there"
        if (entry.payload, entry.sha256, entry.tokens) != (offer.payload, offer.sha256, offer.tokens):
            return f"takes another payload than {entry.site} offered"
        fault = payload_fault(
            entry.payload, site=entry.site, fragment=fragment, version=version, taken=taken, terms=terms
        )
        if fault is not None:
            return f"takes an offer of {entry.site} it may not: {fault}"
    factors = multipliers({entry.site: entry.tokens for entry in commit.taken}, terms.weighting)
    for entry in commit.taken:
        if entry.multiplier != factors[entry.site]:
            return f"weighs {entry.site} by {entry.multiplier}, the rule gives {factors[entry.site]}"
    return None


def is_stale(missed_rounds: int, terms: Terms) -> bool:
    """Rule 7: carried work that missed more than `max_stale_rounds` rounds with an offer out is dropped."""
    return missed_rounds > terms.max_stale_rounds


def wants_snapshot(version: int, terms: Terms) -> bool:
    """Rule 11: every K rounds, and the final one, the committer stores the master that its round made."""
    return version % terms.snapshot_rounds == 0 or version == terms.final_version
