"""Bytes that a site moves through the bucket, counted from the codec and the fragments, and their time over a link.

Records of a round come on top: some kilobytes a fragment and site.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composer_prime.outer.fragments import NamedShape, plan_fragments
from composer_prime.sync.terms import Terms

BITS_PER_MBIT = 1e6


@dataclass(frozen=True)
class Traffic:
    """What one site moves.

    up_bytes, down_bytes   payloads and merged parts of a round of all fragments, at the site that moves most
    join_bytes             masters that a joiner fetches, at most: stored ones are packed, by how much isn't known
    """

    up_bytes: int
    down_bytes: int
    join_bytes: int

    def up_s(self, mbit: float) -> float:
        """Seconds that nothing can beat: a round's bytes by the link's rate."""
        return seconds(self.up_bytes, mbit)

    def down_s(self, mbit: float) -> float:
        """The same of what it fetches."""
        return seconds(self.down_bytes, mbit)


def seconds(nbytes: int, mbit: float) -> float:
    """Bytes divided by bandwidth."""
    return 8 * nbytes / (mbit * BITS_PER_MBIT)


def fragment_sizes(terms: Terms, shapes: Sequence[NamedShape]) -> list[int]:
    """Parameters of each fragment."""
    return [fragment.numel for fragment in plan_fragments(list(shapes), terms.fragments)]


def traffic(terms: Terms, numels: Sequence[int], num_sites: int, codec: str = "") -> Traffic:
    """What a site of `num_sites` moves; numels: parameters of each fragment; codec: instead of the terms' own.

    Up to `gather_sites` sites everyone reads everyone's payload; beyond, each merges a part of a round, and reads all
    merged parts. A payload of one slice can't be cut.
    """
    from composer_prime.outer.codecs import get_codec
    from composer_prime.outer.payloads import plan_slices

    coder, merger = get_codec(codec or terms.codec), get_codec("int8")
    up = down = 0
    for numel in numels:
        plan = plan_slices(numel, terms.slices, (coder, merger))
        sizes = [plan.size(index) for index in range(plan.num_slices)]
        payload, merged = (sum(each.nbytes(size) for size in sizes) for each in (coder, merger))
        if num_sites <= terms.gather_sites or plan.num_slices == 1:
            up, down = up + payload, down + (num_sites - 1) * payload
            continue
        parts = min(num_sites, plan.num_slices)
        up += payload + math.ceil(merged / parts)
        down += (num_sites - 1) * math.ceil(payload / parts) + merged
    return Traffic(up, down, terms.master_nbytes(sum(numels)))
