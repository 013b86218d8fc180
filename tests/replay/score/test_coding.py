"""The cache's coding: what it keeps and loses, its size, and that damaged bytes raise CorruptObject alone."""

import struct

import numpy as np
import pytest

from composer_prime.bench.score_coding import (
    MAX_ADDED_NATS,
    MAX_CACHE_BYTES,
    VOCABULARIES,
    coding_kl,
    cut_kl,
    main,
    measure,
)
from composer_prime.config.distill import MAX_K
from composer_prime.errors import CorruptObject
from composer_prime.replay.score import coding
from composer_prime.replay.score.candidates import Candidates
from composer_prime.replay.score.coding import MAX_TOKENS, decode, encode

from .drawn import as_dict, draw, same


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_benchs_bars_hold_at_2000_tokens(vocabulary: int) -> None:
    found = measure(2_000, vocabulary)
    assert found.wire_bytes == 64
    assert found.cache_bytes <= MAX_CACHE_BYTES
    assert 0 < found.added.mean() <= MAX_ADDED_NATS
    assert found.lost[32].mean() < found.lost[8].mean()


def test_the_bench_prints_a_row_for_each_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    main(num_tokens=5)
    printed = capsys.readouterr().out
    assert all(f"{vocabulary:,}" in printed for vocabulary in VOCABULARIES)
    assert "bars: cache 64 bytes, added mean 0.001 nats" in printed


def test_truncation_loses_what_a_uniform_tail_cannot_say() -> None:
    p = np.array([0.5, 0.2, 0.2, 0.1])
    entropy = float(-(p * np.log(p)).sum())
    exact = 0.4 * np.log(1.2) + 0.1 * np.log(0.6)  # a third of the tail is 1/6
    assert cut_kl(entropy, np.log(p[:1]), 3) == pytest.approx(exact, abs=1e-15)
    assert cut_kl(entropy, np.log(p[[0, 3]]), 2) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("seed", range(6))
def test_ids_return_exactly_and_probabilities_nearly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = draw(rng, 60, int(rng.integers(1, MAX_K + 1)), 151_936)
    after = decode(encode(before))
    assert np.array_equal(after.has_teacher, before.has_teacher), seed
    for token in range(60):
        assert set(as_dict(before, token)) == set(as_dict(after, token)), seed
    assert (after.logprobs[:, :-1] >= after.logprobs[:, 1:]).all(), seed
    added = coding_kl(before, after)
    assert added.min() > -1e-6 and added.max() < 2e-3, seed


def test_a_certain_teacher_and_a_diffuse_one_keep_their_tail() -> None:
    certain = Candidates(np.array([[5, 6]], np.int32), np.array([[0.0, -60.0]], np.float32))
    diffuse = Candidates(np.array([[5, 6]], np.int32), np.array([[-11.0, -11.5]], np.float32))
    for before in (certain, diffuse):
        assert abs(coding_kl(before, decode(encode(before)))[0]) < 1e-4


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (7, MAX_K)])
def test_no_teacher_anywhere_returns_as_it_was(shape: tuple[int, int]) -> None:
    assert same(decode(encode(Candidates.none(*shape))), Candidates.none(*shape))


def test_a_token_whose_number_is_none_is_coded_as_without_a_teacher() -> None:
    before = draw(np.random.default_rng(0), 5, 4, 100, absent=0)
    before.logprobs[3, 0] = np.nan
    assert decode(encode(before)).has_teacher.tolist() == [True, True, True, False, True]


def test_the_largest_id_returns() -> None:
    before = Candidates(np.array([[2**31 - 1, 0]], np.int32), np.array([[-0.5, -2.0]], np.float32))
    assert decode(encode(before)).ids.tolist() == before.ids.tolist()


def test_too_many_tokens_and_negative_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="cut the sequence or k"):
        encode(Candidates.none(MAX_TOKENS + 1, 1))
    with pytest.raises(ValueError, match="an id is -2"):
        encode(Candidates(np.array([[-2]], np.int32), np.zeros((1, 1), np.float32)))


def test_every_flipped_bit_and_every_cut_is_told() -> None:
    block = encode(draw(np.random.default_rng(0), 6, 3, 100))
    for place in range(len(block)):
        with pytest.raises(CorruptObject):
            decode(block[:place])
        with pytest.raises(CorruptObject):
            decode(block[:place] + bytes([block[place] ^ 1 << place % 8]) + block[place + 1 :])


def signed(body: bytes) -> bytes:
    """A block whose digest fits, whatever its body holds."""
    return body + coding._digest(body)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_changed_under_a_sound_digest_raise_corrupt_object_or_decode_within_limits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    body = encode(draw(rng, 30, 5, 60))[:-8]
    told = 0
    for _ in range(400):
        changed = bytearray(body)
        for place in rng.integers(len(body), size=int(rng.integers(1, 4))):
            changed[place] = int(rng.integers(256))
        try:
            found = decode(
                signed(bytes(changed[: int(rng.integers(1, len(body) + 1))] if rng.random() < 0.2 else changed))
            )
        except CorruptObject:
            told += 1
        else:
            assert len(found) <= MAX_TOKENS and found.k <= MAX_K and np.isfinite(found.logprobs[found.ids >= 0]).all()
    assert told > 100, seed


def test_lengths_beyond_the_limits_are_told_before_anything_is_decoded() -> None:
    body = encode(draw(np.random.default_rng(0), 6, 3, 100))[:-8]
    tokens = body[:6] + struct.pack("<I", MAX_TOKENS + 1) + body[10:]
    with pytest.raises(CorruptObject, match=rf"\({MAX_TOKENS + 1}, 3\) candidates, at most"):
        decode(signed(tokens))
    table = body[:10] + struct.pack("<I", 2**32 - 1) + body[14:]
    with pytest.raises(CorruptObject, match="a table of 4294967295 ids"):
        decode(signed(table))
    section = body[:14] + struct.pack("<I", 2**32 - 1) + body[18:]
    with pytest.raises(CorruptObject, match="a section of 4294967295 bytes"):
        decode(signed(section))
    kind = b"ELSE" + body[4:]
    with pytest.raises(CorruptObject, match="scores of kind b'ELSE'"):
        decode(signed(kind))
