"""Each site's share of a round: the multipliers that a commit records and the aggregates use.

Apart from aggregate.py because decisions need it, and they run where there is no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from composer_prime.errors import ConfigError, ProtocolError

Weighting = Literal["tokens", "steps", "equal"]
Rule = Literal["mean", "clipped", "trimmed", "median"]


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


def shares(offers: Mapping[str, Weighed], *, weighting: Weighting, aggregate: Rule, clip: float) -> dict[str, float]:
    """The multiplier of each site's pseudo-gradient, final, as commits record it.

    offers     site -> what its offer weighs; empty for a void round.
    weighting  "tokens" or "steps": in proportion to them (arXiv:2604.21428), and equal when no site has any; "equal":
               1/n. Tokens and steps are what a site says of itself.
    aggregate  "mean": the share. "clipped": the share times s = min(1, clip * median of norms / norm), so no site moves
               the mean further than its share of clip * median. "trimmed", "median": s alone; the rule does the
               averaging and knows no weights.
    clip       norms allowed, in medians, above 0; not read by "mean".

    Of an even number of norms the median is the lower middle one. Either middle one is bounded by honest norms on both
    sides while less than half of the sites are adversaries. When half of them are (1 of 2), the lower one is still at
    most the largest honest norm, so what they inflate stays bounded; by deflating theirs they can only hold the round
    still. With the upper one it would be the reverse, and a blow-up costs more than a lost round. Norms of 0 count
    too: leaving them out would hand the majority to adversaries when honest sites didn't move.

    Returns site -> exact fp32 value, sorted by site: float64 quotients and products, rounded to fp32 once.
    Raises ConfigError on another weighting, aggregate or clip, ProtocolError on a negative count or a norm that is
    negative or not finite.
    """
    _check_rules(weighting, aggregate, clip)
    for site, offer in offers.items():
        _check_offer(site, offer)
    factors = {site: 1.0 for site in sorted(offers)}
    if aggregate != "mean":
        factors = clip_factors({site: offers[site].norm for site in factors}, clip)
    if aggregate in ("mean", "clipped"):
        fractions = _fractions(offers, weighting)
        factors = {site: fractions[site] * factor for site, factor in factors.items()}
    return {site: float(np.float32(factor)) for site, factor in factors.items()}


def multipliers(tokens: Mapping[str, int], weighting: Literal["tokens", "equal"]) -> dict[str, float]:
    """`shares` of the plain mean by tokens alone: site -> tokens in, site -> exact fp32 value out."""
    offers = {site: Weighed(count, 0, 0.0) for site, count in tokens.items()}
    return shares(offers, weighting=weighting, aggregate="mean", clip=1.0)


def _fractions(offers: Mapping[str, Weighed], weighting: Weighting) -> dict[str, float]:
    counts = {site: offer.steps if weighting == "steps" else offer.tokens for site, offer in offers.items()}
    total = sum(counts.values())  # of integers, so exact; and their quotient is rounded once, however large they are
    if weighting == "equal" or total == 0:
        return {site: 1 / len(counts) for site in counts}
    return {site: count / total for site, count in counts.items()}


def clip_factors(norms: Mapping[str, float], clip: float) -> dict[str, float]:
    """min(1, clip * median / norm) of each site, and 1 for a norm of 0."""
    limit = clip * sorted(norms.values())[(len(norms) - 1) // 2] if norms else 0.0
    return {site: 1.0 if norm <= limit else limit / norm for site, norm in norms.items()}


def _check_rules(weighting: str, aggregate: str, clip: float) -> None:
    for name, value, known in (
        ("outer.weighting", weighting, get_args(Weighting)),
        ("outer.aggregate", aggregate, get_args(Rule)),
    ):
        if value not in known:
            choices = ", ".join(f'"{choice}"' for choice in known)
            raise ConfigError(f'{name} ("{value}") must be one of {choices}: choose one of them')
    if aggregate != "mean" and not 0 < clip < math.inf:
        raise ConfigError(f"outer.clip ({clip}) must be a finite number above 0: 2 allows twice the median norm")


def _check_offer(site: str, offer: Weighed) -> None:
    for unit, count in (("tokens", offer.tokens), ("steps", offer.steps)):
        if count < 0:
            raise ProtocolError(f"site {site} offers {count} {unit}, 0 is the least there can be: refuse its offer")
    if not 0 <= offer.norm < math.inf:
        raise ProtocolError(f"site {site} offers a norm of {offer.norm}, not finite and 0 or more: refuse its offer")
