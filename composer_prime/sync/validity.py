"""What makes a record sound: every check of an offer, a commit and a merged part, as pure functions, no torch.

All readers run the same checks on the same bytes, so all come to the same verdict. None of them depends on a clock, on
who is alive, or on whether a payload can be read just now.
"""

import base64
import binascii
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from composer_prime.errors import ProtocolError
from composer_prime.outer.shares import GuestLimits, Weighed, clip_factors, shares
from composer_prime.outer.slices import DIGEST_BYTES, root_sha256
from composer_prime.store import keys
from composer_prime.sync.protocol import guest_fault, num_parts
from composer_prime.sync.records import Commit, Offer, Part, Refused, Taken
from composer_prime.sync.terms import Terms

ROWS_PER_ROLLOUT = 4
"""Rows of training that a rollout makes at most: more than one where its turns don't continue each other."""
MIN_COMPARED_BYTES = 64
"""Payloads under this are not compared: two honest sites may send equal ones by chance."""

TakenBefore = Mapping[str, str]
"""sha256 by key of the payloads that the last `max_stale_rounds` rounds took."""


@dataclass(frozen=True)
class FragmentFacts:
    """What checks need to know of a fragment.

    index          the fragment
    num_slices     of its payloads
    bounds         least and most bytes of a sound payload
    """

    index: int
    num_slices: int
    bounds: tuple[int, int]


def digests_of(offer: Offer) -> tuple[bytes, ...]:
    """The slices' hashes that an offer states. Raises ProtocolError when they aren't base64 of whole hashes."""
    return _digests(offer.slices, offer.site)


@lru_cache(maxsize=256)
def _digests(slices: str, site: str) -> tuple[bytes, ...]:
    """An offer is judged when it is seen, when it is decoded, and when a commit takes it."""
    try:
        raw = base64.b64decode(slices, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"slices of an offer of {site} are no base64: refuse it") from error
    if base64.b64encode(raw).decode() != slices:  # releases of Python differ in what else they take for it
        raise ProtocolError(f"slices of an offer of {site} aren't base64 in its one spelling: refuse it")
    if len(raw) % DIGEST_BYTES:
        raise ProtocolError(f"slices of an offer of {site} are {len(raw)} bytes, no multiple of {DIGEST_BYTES}")
    return tuple(raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES))


def offer_fault(
    offer: Offer,
    *,
    site: str,
    facts: FragmentFacts,
    version: int,
    base_sha: str,
    taken: TakenBefore,
    terms: Terms,
) -> str | None:
    """Why this offer can't be part of the round, from its record alone; None when it can.

    site, version   what the offer's key says
    base_sha        the hash of the master on which the round stands
    taken           what earlier commits took: a payload is taken at most once
    """
    if not offer.is_at(site, facts.index, version):
        return f"record says {offer.site} {offer.fragment}/{offer.version}, its key {site} {facts.index}/{version}"
    if offer.base_sha != base_sha:
        return f"stands on master {offer.base_sha[:16]}, the round on {base_sha[:16]}"
    if offer.payload is None:
        return None
    if offer.codec != terms.codec:
        return f"coded as {offer.codec}, the run uses {terms.codec}"
    least, most = facts.bounds
    if not least <= offer.nbytes <= most:
        return f"says {offer.nbytes} bytes, {terms.codec} of this fragment has {least} to {most}"
    if offer.tokens <= 0 or offer.steps <= 0:
        return f"has a payload but {offer.tokens} tokens in {offer.steps} steps behind it"
    if offer.tokens > offer.trained_tokens:
        return f"says {offer.tokens} tokens of {offer.trained_tokens} ever trained"
    if (fault := claim_fault(offer, version=version, taken=taken, terms=terms)) is not None:
        return fault
    if len(offer.norms) != facts.num_slices or min(offer.norms, default=0.0) < 0:
        return f"states {len(offer.norms)} norms, the fragment has {facts.num_slices} slices"
    if not math.isfinite(offer.norm):
        return f"states norms of up to {max(offer.norms)}, whose squares have no finite sum"
    if len(offer.slices) > 2 * DIGEST_BYTES * facts.num_slices:  # it would be remembered, decoded
        return f"states {len(offer.slices)} characters of hashes for {facts.num_slices} slices"
    try:
        digests = digests_of(offer)
    except ProtocolError as error:
        return str(error)
    if len(digests) != facts.num_slices or root_sha256(digests) != offer.sha256:
        return f"its {len(digests)} slices don't make the sha256 it states ({facts.num_slices} slices are due)"
    return payload_fault(offer, version=version, taken=taken, terms=terms)


def claim_fault(offer: Offer, *, version: int, taken: TakenBefore, terms: Terms) -> str | None:
    """Why nobody can have trained what this offer claims, by the rounds since the last one of its site was captured."""
    if terms.step_tokens is None:
        return None
    captured = [captured for _, captured, site in map(keys.parse_payload, taken) if site == offer.site]
    for name, claimed, rounds in (
        ("tokens", offer.tokens, version - max(captured, default=0)),
        ("tokens ever trained", offer.trained_tokens, version),
    ):
        if claimed > (most := most_tokens(terms, rounds)):
            return f"says {claimed} {name}, the recipe makes at most {most} in {rounds} rounds"
    if offer.steps > (most := terms.most_steps(version - max(captured, default=0))):
        return f"says {offer.steps} steps, there is time for at most {most} since its last offer"
    return None


def most_tokens(terms: Terms, rounds: int) -> float:
    """Tokens that no site trains more of in so many rounds; infinity where the terms don't say what a step trains."""
    return math.inf if terms.step_tokens is None else ROWS_PER_ROLLOUT * terms.step_tokens * terms.most_steps(rounds)


def payload_fault(offer: Offer, *, version: int, taken: TakenBefore, terms: Terms) -> str | None:
    """Why this offer's payload can't stand in this round; None when it can.

    A payload is taken at most once, and only within `max_stale_rounds` of the round it was captured on: so whoever
    starts from a snapshot needs to read no more than that many commits before it to judge as everyone else does.
    """
    assert offer.payload is not None and offer.sha256 is not None
    try:
        captured_fragment, captured_version, captured_site = keys.parse_payload(offer.payload)
    except ProtocolError as error:
        return str(error)
    if (captured_fragment, captured_site) != (offer.fragment, offer.site):
        return f"payload belongs to fragment {captured_fragment} of {captured_site}"
    if offer.payload != keys.payload(captured_fragment, captured_version, captured_site, offer.sha256):
        return "payload's key is not that of its sha256"
    if not 0 <= version - captured_version <= terms.max_stale_rounds:
        return f"payload is of round {captured_version}, at most {terms.max_stale_rounds} rounds may lie between"
    if offer.payload in taken:
        return "payload was taken by an earlier round"
    owners = {keys.parse_payload(payload)[2] for payload, sha in taken.items() if sha == offer.sha256}
    if owners - {offer.site} and _is_telling(offer):
        return f"payload equals one of {min(owners)} that an earlier round took: a copy"
    return None


def _is_telling(offer: Offer) -> bool:
    """Whether an equal payload can't be chance; two sites that didn't move are equal honestly, too."""
    return offer.nbytes >= MIN_COMPARED_BYTES and any(offer.norms)


def copies(offers: Mapping[str, Offer]) -> dict[str, str]:
    """Offers that equal another site's of the same round: all but the first of each kind, in the order given."""
    first: dict[str, str] = {}
    found: dict[str, str] = {}
    for site, offer in offers.items():
        sha = offer.sha256
        if sha is None or not _is_telling(offer):
            continue
        if sha in first:
            found[site] = f"equals the offer of {first[sha]}: a copy"
        else:
            first[sha] = site
    return found


def commit_shares(offers: Mapping[str, Offer], terms: Terms, guests: Collection[str]) -> dict[str, float]:
    """The final multiplier of each offer in a round that takes these."""
    weighed = {site: Weighed(offer.tokens, offer.steps, offer.norm) for site, offer in offers.items()}
    limits = GuestLimits(guests, terms.guest_share, terms.guest_clip)
    return shares(weighed, weighting=terms.weighting, aggregate=terms.aggregate, clip=terms.clip, guests=limits)


def write_commit(
    *,
    facts: FragmentFacts,
    version: int,
    base_sha: str,
    previous: str,
    take: Mapping[str, Offer],
    refused: Mapping[str, str],
    voids: tuple[int, ...],
    terms: Terms,
    guests: Collection[str],
    admissions: int,
    admission_sha: str | None,
    committer: str,
    incarnation: int,
) -> Commit:
    """The record that closes a round on the offers of `take`, by site, with their final multipliers.

    guests   who is one, under the admission record of number `admissions`
    """
    factors = commit_shares(take, terms, guests) if take else {}
    return Commit(
        fragment=facts.index,
        version=version,
        base_sha=base_sha,
        taken=tuple(Taken(offer=take[site], multiplier=factors[site]) for site in sorted(take)),
        refused=tuple(Refused(site=site, why=refused[site]) for site in sorted(refused)),
        previous=previous,
        voids=voids,
        num_parts=num_parts(len(take), facts.num_slices, terms),
        admissions=admissions,
        admission_sha=admission_sha,
        committer=committer,
        incarnation=incarnation,
    )


def commit_fault(
    commit: Commit,
    *,
    facts: FragmentFacts,
    version: int,
    previous: str,
    taken: TakenBefore,
    voids: tuple[int, ...],
    terms: Terms,
    guests: Collection[str],
) -> str | None:
    """Why this commit doesn't follow from the log and its offers; None when it does. A faulty commit is a void round.

    voids    which of the last `max_stale_rounds` commits were void
    guests   who is one, under the admission record that the commit honours

    Signatures, and whether the base hash is ours, are judged by the caller.
    """
    if not commit.is_at(facts.index, version):
        return f"record says {commit.fragment}/{commit.version}, its key {facts.index}/{version}"
    if commit.previous != previous:
        return f"names {commit.previous[:16]} as the commit before, that one is {previous[:16]}"
    if commit.voids != voids:
        return f"says that commits {commit.voids} were void, those were {voids}"
    if (fault := guest_fault(commit.committer, guests, "made")) is not None:
        return fault
    sites = [entry.site for entry in commit.taken]
    if sites != sorted(set(sites)):
        return "its offers are not sorted by site, or a site stands twice"
    num_members = sum(site not in guests for site in sites)
    if sites and num_members < terms.quorum:
        return f"takes {num_members} offers of members, the quorum is {terms.quorum}"
    for entry in commit.taken:
        if entry.offer.payload is None:
            return f"takes an offer of {entry.site} that has nothing to merge"
        fault = offer_fault(
            entry.offer,
            site=entry.site,
            facts=facts,
            version=version,
            base_sha=commit.base_sha,
            taken=taken,
            terms=terms,
        )
        if fault is not None:
            return f"takes an offer of {entry.site} it may not: {fault}"
    listed = {entry.site: entry.offer for entry in commit.taken}
    if copied := copies(listed):
        site, why = next(iter(copied.items()))
        return f"takes an offer of {site} it may not: {why}"
    factors = commit_shares(listed, terms, guests) if listed else {}
    for entry in commit.taken:
        if entry.multiplier != factors[entry.site]:
            return f"weighs {entry.site} by {entry.multiplier}, the rule gives {factors[entry.site]}"
    if commit.num_parts != num_parts(len(sites), facts.num_slices, terms):
        return f"is cut into {commit.num_parts} parts, the rule gives {num_parts(len(sites), facts.num_slices, terms)}"
    return None


def part_fault(
    part: Part, *, commit: Commit, commit_sha: str, index: int, bounds: tuple[int, int], guests: Collection[str]
) -> str | None:
    """Why this record can't be part `index` of the round; None when it can. A faulty part counts as a part of zeros.

    bounds   least and most bytes of a sound merged part of this size
    """
    if (part.fragment, part.version, part.part) != (commit.fragment, commit.version, index):
        return f"record says {part.fragment}/{part.version}/{part.part}, its key another place"
    if part.commit_sha != commit_sha:
        return f"stands on commit {part.commit_sha[:16]}, the round on {commit_sha[:16]}"
    if (fault := guest_fault(part.reducer, guests, "merged")) is not None:
        return fault
    sites = [entry.site for entry in commit.taken]
    excluded = [entry.site for entry in part.excluded]
    if excluded != sorted(set(excluded)) or not set(excluded) <= set(sites):
        return "excludes sites that the commit doesn't take, or not in order"
    if part.payload is not None and excluded == sites:
        return "has a payload, though no offer is left to merge"
    if part.payload is None:
        return None if excluded == sites else "has no payload, though offers are left to merge"
    if part.sha256 is None or part.payload != keys.merged_payload(part.fragment, part.version, index, part.sha256):
        return "its payload's key is not that of its sha256"
    if not bounds[0] <= part.nbytes <= bounds[1]:
        return f"says {part.nbytes} bytes, a sound part has {bounds[0]} to {bounds[1]}"
    return None


def part_shares(commit: Commit, excluded: Collection[str], terms: Terms, guests: Collection[str]) -> dict[str, float]:
    """The multipliers of one part: the commit's own, or drawn anew over the offers that are sound in this part."""
    if not excluded:
        return {entry.site: entry.multiplier for entry in commit.taken}
    left = {entry.site: entry.offer for entry in commit.taken if entry.site not in excluded}
    return commit_shares(left, terms, guests)


def clipped(taken: Sequence[Taken], terms: Terms, guests: Collection[str]) -> dict[str, float]:
    """By which factor the norm clip shortened an offer of a round, by site, for those that it shortened.

    In a round of parts, those parts' factors differ that leave an offer out.
    """
    limits = GuestLimits(guests, terms.guest_share, terms.guest_clip)
    factors = clip_factors({entry.site: entry.offer.norm for entry in taken}, terms.aggregate, terms.clip, limits)
    return {site: factor for site, factor in factors.items() if factor < 1}
