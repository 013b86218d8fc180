"""Corners of the document that a run seldom reaches: hostile bytes, equal values, weak keys, changed objects."""

import base64
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer_prime.errors import ConfigError, CorruptObject
from composer_prime.outer.aggregate import add_guests, weighted_mean
from composer_prime.outer.arithmetic import test_vector as our_test_vector
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.masters import master_sha256, pack_master
from composer_prime.outer.outer_optimizer import nesterov_next
from composer_prime.outer.shares import GuestLimits, Weighed, shares
from composer_prime.store import keys, open_store
from composer_prime.sync.signatures import FIELD_PRIME, WEAK_Y, check_public
from tests.spec.arithmetic import merge, multipliers, outer_step
from tests.spec.codecs import Undecodable, decode, encode, size_bounds
from tests.spec.layout import decode_master, master_sha
from tests.spec.reader import read_run
from tests.spec.runs import KEYS, verify
from tests.spec.signing import public_key
from tests.spec.vector import vector_sha
from tests.sync.harness import ThreadSite, make_terms, run_sites

CODECS = ["fp32", "bf16", "int8", "int4", "topk"]


def decoded(decoder: Callable[..., Any], *args: object) -> bytes | None:
    """The bytes of what was decoded; None where it was refused."""
    try:
        return np.asarray(decoder(*args)).tobytes()
    except (CorruptObject, Undecodable):
        return None


def movement(generator: np.random.Generator, size: int, kind: int = 0) -> torch.Tensor:
    """Values of all magnitudes, zeros and minus zeros among them; kind 1: few but zeros, kind 2: of one magnitude."""
    values = generator.standard_normal(size) * 10.0 ** generator.integers(-44, 36, size)
    values[generator.random(size) < (0.3, 0.995, 0.0)[kind]] *= 0.0
    return torch.from_numpy((np.sign(values) if kind == 2 else values).astype(np.float32))


def spoiled(data: bytearray, generator: np.random.Generator, num_changes: int) -> bytearray:
    """So many bytes changed, mostly to such as mean something; with 4 it is a zero byte behind the last instead."""
    if num_changes == 4:
        return data + b"\0"
    for place in generator.integers(0, len(data), num_changes):
        data[place] = (0, 1, 0x55, 0x7F, 0x80, 0x88, 0xFF, int(generator.integers(256)))[generator.integers(8)]
    return data


@pytest.mark.parametrize("codec", CODECS)
def test_both_decode_the_same_bytes_to_the_same_bits_and_refuse_the_same(codec):
    generator, ours, num_refused = np.random.default_rng(10), get_codec(codec), 0
    for size in (1, 63, 257, 4096, 4131):
        assert size_bounds(codec, size) == ours.size_bounds(size)
        for number in range(60):
            data = spoiled(bytearray(ours.encode(movement(generator, size, number % 3))), generator, number % 5)
            read = decoded(decode, codec, bytes(data), size)
            assert read == decoded(ours.decode, bytes(data), size)
            num_refused += read is None
    assert num_refused > 5


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_both_code_a_vector_to_the_same_bytes(codec):
    generator = np.random.default_rng(8)
    for size in (1, 255, 1000):
        values = movement(generator, size)
        assert encode(codec, values.numpy()) == get_codec(codec).encode(values)


@pytest.mark.parametrize("rule", ["mean", "clipped"])
@pytest.mark.parametrize(
    ("count", "guests"), [(1, ""), (2, ""), (5, ""), (8, ""), (2, "a"), (2, "ab"), (5, "bde"), (8, "h")]
)
def test_both_merge_to_the_same_bits(rule, count, guests):
    generator = np.random.default_rng(count)
    vectors = [movement(generator, 2000) for _ in range(count)]
    for vector in vectors[1:]:
        vector[::7] = vectors[0][::7]
    norms, tokens = generator.random(count).tolist(), generator.integers(0, 9, count).tolist()
    offers = [
        {"site": chr(97 + at), "tokens": tokens[at], "steps": 1 + at, "norms": [norms[at], 0.1]} for at in range(count)
    ]
    terms = {"aggregate": rule, "clip": 0.7, "weighting": "tokens", "lr": 0.7, "momentum": 0.9}
    terms |= {"guest_share": 0.3, "guest_clip": 0.6}
    factors = multipliers(offers, terms, guests)
    norms = [math.sqrt(offer["norms"][0] * offer["norms"][0] + 0.1 * 0.1) for offer in offers]
    pairs = zip(offers, norms, strict=True)
    weighed = {chr(97 + place): Weighed(o["tokens"], o["steps"], norm) for place, (o, norm) in enumerate(pairs)}
    limits = GuestLimits(guests, share=0.3, clip=0.6)
    assert factors == [*shares(weighed, weighting="tokens", aggregate=rule, clip=0.7, guests=limits).values()]
    guest = [offer["site"] in guests for offer in offers]
    merged = merge([vector.numpy() for vector in vectors], factors, guest, terms)
    parts = list(zip(factors, vectors, guest, strict=True))
    members = [(factor, vector) for factor, vector, is_guest in parts if not is_guest]
    ours = weighted_mean(members) if members else torch.zeros(2000)
    if any(guest) and members:
        add_guests(ours, [(factor, vector) for factor, vector, is_guest in parts if is_guest], 0.3)
    assert merged.tobytes() == ours.numpy().tobytes()
    weights, momentum = movement(generator, 2000), movement(generator, 2000)
    stepped = nesterov_next(weights, ours, momentum, lr=0.7, mu=0.9)
    assert stepped is not None and stepped[1] is not None
    made = outer_step([weights.numpy(), momentum.numpy()], merged, terms)
    assert [each.tobytes() for each in made] == [each.numpy().tobytes() for each in (stepped[0], stepped[1])]


@pytest.mark.parametrize("has_momentum", [False, True])
def test_both_name_and_read_the_same_master(has_momentum):
    generator = np.random.default_rng(9)
    values = [torch.from_numpy(generator.standard_normal(2**20 + 5).astype(np.float32)) for _ in range(2)]
    momentum = values[1] if has_momentum else None
    vectors = decode_master(pack_master(values[0], momentum), 2**20 + 5, 1 + has_momentum)
    assert master_sha(vectors) == master_sha256(values[0], momentum)


def test_the_test_vector_can_be_computed_from_the_document():
    assert vector_sha() == our_test_vector()


def spelled(number: int) -> str:
    return f"ed25519:{base64.b64encode(number.to_bytes(32, 'little')).decode()}"


SIGN = 1 << 255
GOOD = KEYS["a"].public
SPELLINGS = {
    "a site's": GOOD,
    **{f"weak, y {y % 1000}": spelled(y) for y in WEAK_Y},
    **{f"weak, y {y % 1000}, other sign": spelled(y | SIGN) for y in WEAK_Y},
    "y of the prime": spelled(FIELD_PRIME),
    "y above the prime": spelled(FIELD_PRIME + 3),
    "y 2, sound or not": spelled(2),
    "another kind": GOOD.replace("ed25519", "rsa"),
    "without padding": GOOD.rstrip("="),
    "more padding": GOOD + "=",
    "a space": GOOD + " ",
    "other last bits": GOOD[:-2] + chr(ord(GOOD[-2]) + 1) + "=",
    "a byte fewer": f"ed25519:{base64.b64encode(bytes([7] * 31)).decode()}",
    "nothing": "",
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_both_take_the_same_public_keys(kind):
    try:
        is_one = bool(check_public(SPELLINGS[kind]))
    except ConfigError:
        is_one = False
    assert (public_key(SPELLINGS[kind]) is not None) == is_one


# --- objects that were changed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sites that ended: three training rounds and the closing one of two fragments."""
    folder = tmp_path_factory.mktemp("ended")
    store, terms = open_store(f"file://{folder}"), make_terms(quorum=2)
    run_sites(*(ThreadSite(store, terms, name, data_seed=place) for place, name in enumerate("ab")))
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


COMMIT, OFFER = keys.commit(0, 1), keys.offer(0, 1, "a")
PAYLOAD, FIRST, NEWEST = keys.round_prefix(0, 1) + "payload/a-*", "masters/0000/00000000-*", "masters/0000/00000004-*"
CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped byte in a payload": (PAYLOAD, flip),
    "a payload that is gone": (PAYLOAD, Path.unlink),
    "a payload that goes on": (PAYLOAD, lambda path: path.write_bytes(path.read_bytes() + b"more")),
    "another multiplier": (COMMIT, lambda path: replace_in(path, b'"multiplier":0.5', b'"multiplier":0.75')),
    "another previous": (COMMIT, lambda path: replace_in(path, b'"previous":"', b'"previous":"0')),
    "another offer's record": (OFFER, lambda path: replace_in(path, b'"steps":', b'"steps":1')),
    "an offer's record that is gone": (OFFER, Path.unlink),
    "a commit that is cut": (COMMIT, lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "a flipped byte in the first master": (FIRST, flip),
    "a flipped byte in a snapshot": (NEWEST, flip),
    "another master in the close record": (
        "close.json",
        lambda path: replace_in(path, b'"masters":["', b'"masters":["f'),
    ),
    "another void round in the close record": ("close.json", lambda path: replace_in(path, b"[[],[]]", b"[[2],[]]")),
    "another version in the close record": (
        "close.json",
        lambda path: path.write_bytes(re.sub(rb'"versions":\[\d+', b'"versions":[9', path.read_bytes())),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_reader_and_verify_name_the_same_object_after(ended, tmp_path, kind):
    shutil.copytree(ended, tmp_path / "run")
    pattern, change = CHANGES[kind]
    (path,) = (tmp_path / "run").glob(pattern)
    key = str(path.relative_to(tmp_path / "run"))
    change(path)
    reading = read_run(tmp_path / "run")
    told = [wrong.split(":")[0] for wrong in reading.wrong] + [keys.commit(*place) for place in reading.voids]
    try:
        verdict = verify(tmp_path / "run").wrong
    except CorruptObject as error:  # a close record is read before all else
        verdict = [str(error)]
    assert any(key in message for message in verdict), verdict
    assert key in told, told
