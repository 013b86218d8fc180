"""How the offers that a commit takes become one pseudo-gradient: a mean or a robust mean, every rounding spelled out.

Every site computes this for itself and all must get the same bits, so products, sums, minima and maxima are separate
fp32 operations in a fixed order (sites sorted by name), never a fused multiply-add, whose use differs between machines.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from composer_prime.outer.chunks import empty, scratch, spans
from composer_prime.outer.shares import Rule
from composer_prime.outer.sparse import Sparse, Vector, dense, weighted_sum

SORT_ELEMENTS = 64 * 2**10
"""Coordinates sorted at a time: the rows of ten sites stay in a core's cache. Over 2 Mi values, 3 times as fast as rows
of full length and 9 times as fast as torch.sort across sites."""


def aggregate(rule: Rule, parts: Sequence[tuple[float, Vector]], *, trim: float) -> Tensor:
    """One pseudo-gradient from the offers of a round, by the run's rule.

    rule   "mean", "clipped": `weighted_mean` (the clipping is inside the multipliers, see shares.py). Coordinate by
           coordinate over y = multiplier * x, without weights: "trimmed", the mean of what is left after the
           floor(trim * sites) lowest and as many highest values are dropped, never the middle one or two; "median",
           the middle value, or half of each of the two middle ones (arXiv:1803.01498).
    parts  at least one (multiplier, x): multiplier an fp32 value, x fp32 [n] contiguous on the CPU or its sparse form,
           all finite (one NaN would win over every honest value). Callers sort by site name; trimmed and median give
           the same bits in any order.
    trim   share of the sites dropped at each end, 0 to 0.5; read by "trimmed" alone.
    Returns fp32 [n], new memory; inputs stay. Raises ValueError on another rule or trim, empty `parts`, other lengths.
    """
    if rule not in get_args(Rule):
        raise ValueError(f'aggregate knows the rules {", ".join(get_args(Rule))}, got "{rule}"')
    length = _common_length([x for _, x in parts])
    if rule in ("mean", "clipped"):
        return _weighted_mean_of(parts)
    if rule == "trimmed" and not 0 <= trim <= 0.5:
        raise ValueError(f"aggregate can drop no more than half at each end, 0 <= trim <= 0.5, got {trim}")
    whole = [(multiplier, dense(x)) for multiplier, x in parts]
    result = empty(length)
    num_dropped = min(math.floor(trim * len(parts)), (len(parts) - 1) // 2) if rule == "trimmed" else None
    rows = [torch.empty(min(result.numel(), SORT_ELEMENTS)) for _ in range(len(parts) + 1)]
    for start in range(0, result.numel(), SORT_ELEMENTS):
        chunk = result[start : start + SORT_ELEMENTS]
        ordered = _sorted_products(whole, start, [row[: chunk.numel()] for row in rows])
        if num_dropped is None:
            _median(ordered, chunk)
        else:
            _mean(ordered[num_dropped : len(ordered) - num_dropped], chunk)
    return result


def add_guests(merged: Tensor, guests: Sequence[tuple[float, Vector]], share: float) -> None:
    """Add what a round's guests offer to what its members' make, in place: value by value it lengthens the members'
    step by up to `share / (1 - share)` of it, and never shortens it or turns it around.

    merged  fp32 [n] contiguous, of the members alone. Updated.
    guests  at least one (multiplier, x), as `aggregate` has them; summed left to right: the order decides the bits.
    share   of a step, the most that guests make; above 0, below 1.

    After the sign election of TIES-Merging (arXiv:2306.01708), where the members alone elect.
    """
    theirs = weighted_mean([(multiplier, dense(x)) for multiplier, x in guests])
    most, limits = float(np.float32(share / (1 - share))), scratch(merged.numel())
    for start, stop in spans(merged.numel()):
        own, added, limit = merged[start:stop], theirs[start:stop], limits[: stop - start]
        torch.mul(own, most, out=limit)
        torch.maximum(added, limit.clamp(max=0.0), out=added)
        torch.minimum(added, limit.clamp_(min=0.0), out=added)
        torch.add(added, 0.0, out=added)  # whichever zero it is: the same bits everywhere
        torch.add(own, added, out=own)


def _weighted_mean_of(parts: Sequence[tuple[float, Vector]]) -> Tensor:
    """As `weighted_mean`, the same bits; the zeros of sparse vectors are passed over where all are sparse."""
    few = [(multiplier, x) for multiplier, x in parts if isinstance(x, Sparse)]
    total = weighted_sum(few) if len(few) == len(parts) else None
    return weighted_mean([(multiplier, dense(x)) for multiplier, x in parts]) if total is None else total


def weighted_mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum(multiplier * x), left to right, each product and each sum rounded to fp32 on its own.

    parts  at least one (multiplier, x): multiplier an fp32 value, x fp32 [n] contiguous on the CPU. The order decides
           the bits: callers sort by site name.
    Returns fp32 [n], new memory. Raises ValueError when `parts` is empty or lengths differ.
    """
    total = empty(_common_length([x for _, x in parts]))
    products = scratch(total.numel())
    for start, stop in spans(total.numel()):
        chunk, product = total[start:stop], products[: stop - start]
        torch.mul(parts[0][1][start:stop], parts[0][0], out=chunk)
        for multiplier, x in parts[1:]:
            torch.mul(x[start:stop], multiplier, out=product)
            torch.add(chunk, product, out=chunk)
    return total


@cache
def comparators(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Pairs (i, j), i < j: putting the lesser of rows i and j into i, pair after pair, sorts any `num_rows` rows.

    Source: Batcher's odd-even mergesort for any number of rows (Knuth, volume 3, algorithm 5.2.2M).
    """
    return tuple(_merge_exchange(num_rows))


def _merge_exchange(num_rows: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(num_rows - 1, 0).bit_length() >> 1
    p = top
    while p:
        q, r, distance = top, 0, p
        while True:
            yield from ((i, i + distance) for i in range(num_rows - distance) if i & p == r)
            if q == p:
                break
            distance, q, r = q - p, q >> 1, p
        p >>= 1


def _sorted_products(parts: Sequence[tuple[float, Tensor]], start: int, rows: list[Tensor]) -> list[Tensor]:
    """fp32(multiplier * x) of `parts` from `start` on, sorted per coordinate, in the memory of `rows` (one to spare).

    Adding 0.0 turns -0.0 into 0.0: then equal values have equal bits, and sorted rows are the same on every machine,
    whichever zero its minimum takes.
    """
    *ordered, spare = rows
    for row, (multiplier, x) in zip(ordered, parts, strict=True):
        torch.mul(x[start : start + row.numel()], multiplier, out=row)
        torch.add(row, 0.0, out=row)
    for low, high in comparators(len(ordered)):
        torch.minimum(ordered[low], ordered[high], out=spare)
        torch.maximum(ordered[low], ordered[high], out=ordered[high])
        ordered[low], spare = spare, ordered[low]
    return ordered


def _mean(ordered: Sequence[Tensor], out: Tensor) -> None:
    """fp32(1 / rows) times the rows' sum from least to greatest, into `out`."""
    out.copy_(ordered[0])
    for row in ordered[1:]:
        torch.add(out, row, out=out)
    torch.mul(out, float(np.float32(1 / len(ordered))), out=out)


def _median(ordered: Sequence[Tensor], out: Tensor) -> None:
    """The middle row, or half of each of the two middle ones (halved first, their sum can't overflow), into `out`."""
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    if below is above:
        out.copy_(below)
        return
    torch.mul(below, 0.5, out=out)
    torch.mul(above, 0.5, out=above)
    torch.add(out, above, out=out)


def _common_length(vectors: Sequence[Vector]) -> int:
    lengths = [x.numel() for x in vectors]
    if len(set(lengths)) != 1:
        raise ValueError(f"an aggregate needs 1 or more vectors of one length, got {lengths}")
    return lengths[0]
