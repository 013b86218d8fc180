"""Each site's share of a round: the multipliers that a commit records and the aggregates use.

Apart from aggregate.py because decisions need it, and they run where there is no torch.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Weighting = Literal["tokens", "steps", "equal"]
Rule = Literal["mean", "clipped"]


@dataclass(frozen=True)
class Weighed:
    """What decides one offer's multiplier.

    tokens  it was trained on, 0 or more.
    steps   inner steps behind it, 0 or more.
    norm    L2 norm of the decoded pseudo-gradient. Not the sender's claim: a site that understates it isn't clipped.
    """

    tokens: int
    steps: int
    norm: float


@dataclass(frozen=True)
class GuestLimits:
    """How little a round's guests may do, all together and each of them alone.

    sites   who is a guest, in the round or not
    share   of the round's weight, the most that all guests have together; above 0, below 1
    clip    the most that a guest's norm may be, in medians of the norms of those that are no guests; above 0
    """

    sites: Collection[str]
    share: float
    clip: float


NO_GUESTS = GuestLimits((), 0.5, 1.0)


def shares(
    offers: Mapping[str, Weighed],
    *,
    weighting: Weighting,
    aggregate: Rule,
    clip: float,
    guests: GuestLimits = NO_GUESTS,
) -> dict[str, float]:
    """The multiplier of each site's pseudo-gradient, final, as commits record it.

    offers     site -> what its offer weighs; empty for a void round.
    weighting  "tokens" or "steps": in proportion to them (arXiv:2604.21428), and equal when no site that is no guest
               has any; "equal": 1/n. Tokens and steps are what a site says of itself.
    aggregate  "mean": the share. "clipped": the share times s = min(1, clip * median of norms / norm), so no site moves
               the mean further than its share of clip * median.
    clip       norms allowed, in medians, above 0; not read by "mean".
    guests     With any rule a guest's s is min(1, guests.clip * median / norm), and the guests' shares come to at most
               `guests.share`. The median is that of the other sites' norms, so that no guest moves it. Guests
               alone get 0: nothing bounds them.

    Of an even number of norms the median is the lower middle one. Either middle one is bounded by honest norms on both
    sides while less than half of the sites are adversaries. When half of them are (1 of 2), the lower one is still at
    most the largest honest norm, so what they inflate stays bounded; by deflating theirs they can only hold the round
    still. With the upper one it would be the reverse, and a blow-up costs more than a lost round. Norms of 0 count
    too: leaving them out would hand the majority to adversaries when honest sites didn't move.

    Returns site -> exact fp32 value, sorted by site: float64 quotients and products, rounded to fp32 once.
    """
    factors = clip_factors({site: offers[site].norm for site in sorted(offers)}, aggregate, clip, guests)
    present = [site for site in factors if site in guests.sites]
    fractions = _fractions(_weights(offers, weighting, guests.sites), present, guests.share)
    factors = {site: fractions[site] * factor for site, factor in factors.items()}
    return {site: struct.unpack("f", struct.pack("f", factor))[0] for site, factor in factors.items()}


def _weights(offers: Mapping[str, Weighed], weighting: Weighting, guests: Collection[str]) -> dict[str, int]:
    counts = {site: offer.steps if weighting == "steps" else offer.tokens for site, offer in offers.items()}
    have_some = any(count for site, count in counts.items() if site not in guests)
    return counts if weighting != "equal" and have_some else dict.fromkeys(counts, 1)


def _fractions(weights: Mapping[str, int], guests: Sequence[str], share: float) -> dict[str, float]:
    """Each site's part of all weight; where the guests' is more than `share`, theirs of that and the others' of the
    rest."""
    total = sum(weights.values())  # of integers, so exact; and their quotient is rounded once, however large they are
    theirs = sum(weights[site] for site in guests)
    if theirs in (0, total) or theirs / total <= share:
        return {site: weight / total for site, weight in weights.items()}
    return {
        site: share * (weight / theirs) if site in guests else (1 - share) * (weight / (total - theirs))
        for site, weight in weights.items()
    }


def clip_factors(norms: Mapping[str, float], aggregate: Rule, clip: float, guests: GuestLimits) -> dict[str, float]:
    """By what each site's movement is shortened, see `shares`; 1 for a norm of 0."""
    own = sorted(norm for site, norm in norms.items() if site not in guests.sites)
    if not own:
        return dict.fromkeys(norms, 0.0)
    median = own[(len(own) - 1) // 2]
    limits = {
        site: guests.clip * median if site in guests.sites else math.inf if aggregate == "mean" else clip * median
        for site in norms
    }
    return {site: 1.0 if norm <= limits[site] else limits[site] / norm for site, norm in norms.items()}
