"""The twelve kinds of hostile offers, and two that a guest may make, each as the objects that it puts into the bucket.

All but the forged kind are signed by an admitted key, and each differs from a sound offer in one thing alone, so that
it is taken as seriously as can be. How a kind is answered is in docs/security.md.
"""

import base64
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from composer_prime.errors import ConfigError, CorruptObject
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.payloads import code, decode_whole
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.outer.sparse import dense
from composer_prime.store import keys
from composer_prime.sync.records import Offer, Taken
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import FragmentCoding
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import digests_of

SCALE = 1000.0
HUGE_NORM = 1e200
"""A number that JSON and fp64 hold, and whose square they don't."""
BOMB_BYTES = 8 * 2**20
"""Size of a payload object that is larger than its record says."""
STATED_BYTES = 2**40
"""What the other decompression bomb says of itself."""

_NAN_HEADS = {
    "fp32": struct.pack("<f", float("nan")),
    "bf16": b"\xc0\x7f",
    "int8": struct.pack("<f", float("nan")),
    "topk": b"\xff\xff\xff",
}
"""First bytes of a payload that isn't a number: a value, or the first block's scale or magnitudes."""


@dataclass(frozen=True)
class Scene:
    """What an adversary knows of an open round.

    movement    fp32, 1-D: what an honest offer would look like, with the sign of a gradient
    others      offers of this round that are already there, by site
    past        what the last rounds took, oldest first
    read        the payload bytes at a key
    outsider    a key that the run doesn't admit
    turn        how often this adversary has played; picks among variants
    """

    roster: Roster
    run_sha: str
    site: str
    incarnation: int
    coding: FragmentCoding
    terms: Terms
    version: int
    base_sha: str
    movement: Tensor
    others: Mapping[str, Offer]
    past: Sequence[Taken]
    read: Callable[[str], bytes]
    outsider: SigningKey
    turn: int

    @property
    def fragment(self) -> int:
        return self.coding.fragment.index


@dataclass(frozen=True)
class Hostile:
    """One hostile offer.

    site, version   under which its record stands: in the time-skew kind another round than the open one
    objects         (key, bytes) to put, in order: payload before record
    later           (key, bytes) to put over what stands, once others may have read it
    variant         which form of the kind this is
    """

    kind: str
    variant: str
    site: str
    fragment: int
    version: int
    objects: tuple[tuple[str, bytes], ...]
    later: tuple[tuple[str, bytes], ...] = ()


def craft(kind: str, scene: Scene) -> Hostile | None:
    """A hostile offer of that kind; None while the round doesn't give what it needs (an offer to copy, a past)."""
    return GUEST_KINDS[kind](scene)


# --- sound in form ---------------------------------------------------------------------------------------------------


def _scaled(scene: Scene) -> Hostile:
    return _coded("scale x1000", "", scene, scene.movement * SCALE)


def _flipped(scene: Scene) -> Hostile | None:
    if not scene.past:
        return None  # the run has gone nowhere yet: noise the other way is noise
    return _coded("sign flip", "", scene, -scene.movement)


def _equivocation(scene: Scene) -> Hostile:
    """Two sound, signed offers for one round: the second is put over the first."""
    first, second = (_coded("", "", scene, scene.movement * factor).objects for factor in (1.0, -1.0))
    return _hostile("equivocation", "put over", scene, (*first, second[0]), later=(second[1],))


def _wrong_base(scene: Scene) -> Hostile:
    """A sound payload on a master that isn't the round's: an invented one, or that of an earlier round."""
    bases = [taken.offer.base_sha for taken in scene.past if taken.offer.base_sha != scene.base_sha]
    old = bool(bases) and scene.turn % 2 == 0
    base = bases[-1] if old else "0" * 64
    return _coded("wrong base", "old" if old else "invented", scene, scene.movement, base_sha=base)


def _against(scene: Scene) -> Hostile | None:
    """Twice what this round's other offers move in the mean, the other way: summed without bounds it turns the step."""
    moved = [_decoded(scene, offer) for offer in scene.others.values()]
    return _coded("against", "", scene, torch.stack(moved).mean(0) * -2) if moved else None


def _endless_tokens(scene: Scene) -> Hostile:
    """Random values a thousand times as long as a sound offer, and a claim of all tokens that there are."""
    noise = torch.randn(scene.movement.numel(), generator=torch.Generator().manual_seed(scene.turn))
    noise *= scene.movement.norm() * SCALE / noise.norm()
    return _coded("endless tokens", "", scene, noise, tokens=2**53, trained_tokens=2**53)


# --- somebody's work again -------------------------------------------------------------------------------------------


def _replay(scene: Scene) -> Hostile | None:
    """An offer that an earlier round took: the own one under a new record, else another site's bytes as one's own."""
    own = [taken for taken in scene.past if taken.site == scene.site]
    if own:
        record = own[-1].offer.model_copy(update=_place(scene))
        return _hostile("replay", "own", scene, (_record(scene, record),))
    if not scene.past:
        return None
    return _stolen("replay", "another's", scene, scene.past[-1].offer)


def _copycat(scene: Scene) -> Hostile | None:
    """An offer of this very round, byte for byte, as one's own. Not in a fragment's first round: there no site has a
    standing yet, and whose an offer is can't be told (docs/security.md)."""
    if not scene.others or not scene.past:
        return None
    victim = random.Random(f"{scene.site}/{scene.fragment}/{scene.version}").choice(sorted(scene.others))
    return _stolen("copycat", "", scene, scene.others[victim])


def _stolen(kind: str, variant: str, scene: Scene, offer: Offer) -> Hostile | None:
    assert offer.payload is not None and offer.sha256 is not None
    payload = keys.payload(scene.fragment, scene.version, scene.site, offer.sha256)
    record = offer.model_copy(update={**_place(scene), "site": scene.site, "payload": payload})
    return _hostile(kind, variant, scene, ((payload, scene.read(offer.payload)), _record(scene, record)))


# --- bytes that no sound site writes ---------------------------------------------------------------------------------


def _not_a_number(scene: Scene) -> Hostile:
    """A payload whose hashes are right and whose first number isn't one; or norms that are, and whose sum isn't."""
    codec = scene.coding.codec.name
    if scene.turn % 2:
        return _raw("NaN", "norms", scene, _sound_bytes(scene), norms=(HUGE_NORM,) * scene.coding.plan.num_slices)
    if codec not in _NAN_HEADS:
        raise ConfigError(f"outer.codec ({codec}) isn't one the adversaries can poison: {', '.join(_NAN_HEADS)}")
    head, data = _NAN_HEADS[codec], _sound_bytes(scene)
    return _raw("NaN", "value", scene, head + data[len(head) :])


def _index_bomb(scene: Scene) -> Hostile:
    """Positions beyond the vector's end. A codec without positions is sent a topk payload, said to be one or not."""
    if scene.coding.codec.name == "topk":
        data = _sound_bytes(scene)
        start, stop = _topk_gaps(scene.coding.fragment.numel)
        return _raw("index bomb", "positions", scene, data[:start] + b"\xff" * (stop - start) + data[stop:])
    data = get_codec("topk").encode(scene.movement.contiguous())
    said = scene.turn % 2 == 0
    return _raw("index bomb", "as topk" if said else "unsaid", scene, data, **({"codec": "topk"} if said else {}))


def _decompression_bomb(scene: Scene) -> Hostile:
    """More than the fragment can be: an object larger than stated, a stated size beyond all bounds, endless runs."""
    variants = ["object", "stated"] + ["endless run"] * (scene.coding.codec.name == "topk")
    variant = variants[scene.turn % len(variants)]
    if variant == "endless run":
        data = _sound_bytes(scene)
        stop = _topk_gaps(scene.coding.fragment.numel)[1]
        return _raw("decompression bomb", variant, scene, data[:stop] + bytes(len(data) - stop))
    (payload, data), record = _coded("", "", scene, scene.movement).objects
    if variant == "object":
        return _hostile("decompression bomb", variant, scene, ((payload, data + bytes(BOMB_BYTES)), record))
    return _raw("decompression bomb", variant, scene, data, nbytes=STATED_BYTES)


def _half_uploaded(scene: Scene) -> Hostile:
    """A sound record whose payload ends in the middle, or isn't there at all."""
    (payload, data), record = _coded("", "", scene, scene.movement).objects
    half = ((payload, data[: len(data) // 2]),) if scene.turn % 2 == 0 else ()
    return _hostile("half-uploaded", "half" if half else "nothing", scene, (*half, record))


# --- not who it says, not when it says -------------------------------------------------------------------------------


def _forged(scene: Scene) -> Hostile:
    """A sound offer without a signature, with a key that isn't the site's, or of a site that the run doesn't know."""
    (payload, data), (key, _) = _coded("", "", scene, scene.movement).objects
    offer, variant = _sound_offer(scene, data), ("unsigned", "other key", "outsider")[scene.turn % 3]
    site = scene.site
    if variant == "outsider":
        site = f"outsider-{scene.site}"
        payload = keys.payload(scene.fragment, scene.version, site, offer.sha256 or "")
        key = keys.offer(scene.fragment, scene.version, site)
        offer = offer.model_copy(update={"site": site, "payload": payload})
    if variant != "unsigned":
        offer = offer.model_copy(update={"signature": scene.outsider.sign(offer.message(scene.run_sha))})
    objects = ((payload, data), (key, offer.to_bytes()))
    return Hostile("forged or unsigned", variant, site, scene.fragment, scene.version, objects)


def _time_skew(scene: Scene) -> Hostile | None:
    """A site whose time runs ahead: its offer stands in the round after the open one, on today's master. Its beat,
    which the adversary writes meanwhile, counts from the far future."""
    if scene.version + 1 >= scene.terms.final_version:
        return None
    version = scene.version + 1
    offer = _sound_offer(scene, _sound_bytes(scene)).model_copy(update={"version": version})
    assert offer.payload is not None
    record = (keys.offer(scene.fragment, version, scene.site), scene.roster.sign(offer).to_bytes())
    objects = ((offer.payload, _sound_bytes(scene)), record)
    return Hostile("time skew", "a round ahead", scene.site, scene.fragment, version, objects)


KINDS: dict[str, Callable[[Scene], Hostile | None]] = {
    "scale x1000": _scaled,
    "sign flip": _flipped,
    "NaN": _not_a_number,
    "wrong base": _wrong_base,
    "replay": _replay,
    "copycat": _copycat,
    "index bomb": _index_bomb,
    "decompression bomb": _decompression_bomb,
    "forged or unsigned": _forged,
    "equivocation": _equivocation,
    "half-uploaded": _half_uploaded,
    "time skew": _time_skew,
}

GUEST_KINDS = KINDS | {"against": _against, "endless tokens": _endless_tokens}
"""What one guest alone may try to ruin a run with (tests/bench/guest_attack.py)."""


# --- parts -----------------------------------------------------------------------------------------------------------


def _place(scene: Scene) -> dict[str, object]:
    """What ties a record to this adversary's process and to the open round."""
    return {
        "incarnation": scene.incarnation,
        "version": scene.version,
        "base_sha": scene.base_sha,
        "signature": None,
    }


def _record(scene: Scene, offer: Offer) -> tuple[str, bytes]:
    return keys.offer(scene.fragment, scene.version, scene.site), scene.roster.sign(offer).to_bytes()


def _hostile(
    kind: str,
    variant: str,
    scene: Scene,
    objects: tuple[tuple[str, bytes], ...],
    later: tuple[tuple[str, bytes], ...] = (),
) -> Hostile:
    return Hostile(kind, variant, scene.site, scene.fragment, scene.version, objects, later)


def _coded(kind: str, variant: str, scene: Scene, movement: Tensor, **changes: object) -> Hostile:
    """A sound payload of that movement, and its record but for `changes`."""
    data = bytes(code(scene.coding.codec, movement.contiguous(), scene.coding.plan).data)
    return _raw(kind, variant, scene, data, **changes)


def _raw(kind: str, variant: str, scene: Scene, data: bytes, **changes: object) -> Hostile:
    """Any bytes as a payload, with a record whose hashes are theirs."""
    offer = _sound_offer(scene, data).model_copy(update=changes)
    assert offer.payload is not None
    return _hostile(kind, variant, scene, ((offer.payload, data), _record(scene, offer)))


def _decoded(scene: Scene, offer: Offer) -> Tensor:
    """fp32, 1-D: what a sound offer moves."""
    assert offer.payload is not None
    data, coding = scene.read(offer.payload), scene.coding
    return dense(decode_whole(coding.codec, data, digests_of(offer), offer.norms, coding.plan))


def _sound_bytes(scene: Scene) -> bytes:
    return bytes(code(scene.coding.codec, scene.movement.contiguous(), scene.coding.plan).data)


def _sound_offer(scene: Scene, data: bytes) -> Offer:
    """The record that these bytes would have: hashes that are right, and norms where they decode to any."""
    plan, codec = scene.coding.plan, scene.coding.codec
    sizes = [len(data)] if plan.num_slices == 1 else [codec.nbytes(plan.size(i)) for i in range(plan.num_slices)]
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    pieces = [data[start:stop] for start, stop in pairwise(bounds)]
    digests = [slice_digest(piece) for piece in pieces]
    sha = root_sha256(digests)
    return Offer(
        site=scene.site,
        incarnation=scene.incarnation,
        fragment=scene.fragment,
        version=scene.version,
        base_sha=scene.base_sha,
        tokens=1000,
        steps=scene.terms.inner_steps,
        trained_tokens=10**6,
        codec=scene.terms.codec,
        payload=keys.payload(scene.fragment, scene.version, scene.site, sha),
        sha256=sha,
        slices=base64.b64encode(b"".join(digests)).decode(),
        nbytes=len(data),
        norms=tuple(_norm(scene, piece, index) for index, piece in enumerate(pieces)),
    )


def _norm(scene: Scene, piece: bytes, index: int) -> float:
    """The norm of a slice as it decodes; 1.0 for one that doesn't."""
    try:
        decoded = scene.coding.codec.decode(piece, scene.coding.plan.size(index))
    except CorruptObject:
        return 1.0
    return float(f"{float(torch.linalg.vector_norm(decoded.double())):.5g}")


def _topk_gaps(numel: int) -> tuple[int, int]:
    """Where the low bits of the gaps begin and end in a topk payload: 3 bytes a block, 2 bits a value before."""
    rows, rest = divmod(numel, 4096)
    kept = 64 * rows + -(-64 * rest // 4096)
    start = 3 * (rows + bool(rest)) + -(-2 * kept // 8)
    return start, start + -(-5 * kept // 8)
