"""Multipliers, merge rules and the outer step, in the document's order of operations."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def offer_norm(norms: list[float]) -> float:
    """Of an offer, from its slices' norms; inf where the squares have no finite sum."""
    total = 0.0
    for norm in norms:
        total += norm * norm
    return math.sqrt(total)


def multipliers(offers: list[dict[str, Any]], terms: dict[str, Any], guests: Collection[str] = ()) -> list[float]:
    """One for each offer of a commit, or of those that are left in a part; each a fp32 number."""
    guest = [offer["site"] in guests for offer in offers]
    num_members = len(offers) - sum(guest)
    if not num_members:
        return [0.0 for _ in offers]
    norms = [offer_norm(offer["norms"]) for offer in offers]
    members_norms = sorted(norm for norm, is_guest in zip(norms, guest, strict=True) if not is_guest)
    median = members_norms[(num_members - 1) // 2]
    most, factors = terms["guest_share"], []
    for norm, is_guest in zip(norms, guest, strict=True):
        limit = terms["guest_clip"] * median if is_guest else terms["clip"] * median
        is_cut = norm > limit and (is_guest or terms["aggregate"] != "mean")
        factors.append(limit / norm if is_cut else 1.0)
    weights = [1 if terms["weighting"] == "equal" else offer[terms["weighting"]] for offer in offers]
    if not any(weight for weight, is_guest in zip(weights, guest, strict=True) if not is_guest):
        weights = [1 for _ in offers]
    total = sum(weights)
    theirs = sum(weight for weight, is_guest in zip(weights, guest, strict=True) if is_guest)
    shares = [weight / total for weight in weights]
    if 0 < theirs < total and theirs / total > most:
        shares = [
            most * (weight / theirs) if is_guest else (1 - most) * (weight / (total - theirs))
            for weight, is_guest in zip(weights, guest, strict=True)
        ]
    return [float(np.float32(share * factor)) for share, factor in zip(shares, factors, strict=True)]


def merge(vectors: list[Vector], factors: list[float], guest: list[bool], terms: dict[str, Any]) -> Vector:
    """fp32 movement of the round, of decoded offers sorted by site, with whether each is a guest's; not finite where it
    overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = [np.float32(factor) * vector for factor, vector in zip(factors, vectors, strict=True)]
        theirs = [product for product, is_guest in zip(products, guest, strict=True) if is_guest]
        own = [product for product, is_guest in zip(products, guest, strict=True) if not is_guest]
        if not own:
            return np.zeros_like(products[0])
        merged = _summed(own)
        if not theirs:
            return merged
        limit = merged * np.float32(terms["guest_share"] / (1 - terms["guest_share"]))
        zero = np.float32(0)
        added = np.minimum(np.maximum(_summed(theirs), np.minimum(limit, zero)), np.maximum(limit, zero))
        return merged + (added + zero)


def _summed(products: list[Vector]) -> Vector:
    total = products[0].copy()
    for product in products[1:]:
        total = total + product
    return total


def outer_step(master: list[Vector], merged: Vector, terms: dict[str, Any]) -> list[Vector]:
    """Weights, and momentum where the run has any, one round on."""
    lr, mu = np.float32(terms["lr"]), np.float32(terms["momentum"])
    with np.errstate(over="ignore", invalid="ignore"):
        if terms["momentum"] == 0:
            return [_rounded(master[0] - lr * merged)]
        momentum = _rounded(mu * master[1] + merged)
        return [_rounded(master[0] - lr * (merged + mu * momentum)), momentum]


def _rounded(values: npt.NDArray[np.floating]) -> Vector:
    """numpy's fp32 arithmetic rounds each operation; here its type only is asserted."""
    assert values.dtype == np.float32
    return values.astype(np.float32, copy=False)
