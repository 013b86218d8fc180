"""Memory that is given out again: never while anybody can still see it, and never more of it than was in use."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_prime.outer import chunks
from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.chunks import LARGE_BYTES, SLACK, Reserve, empty
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.outer_optimizer import nesterov_next
from composer_prime.outer.payloads import code, decode_whole, plan_slices

N = 2 * LARGE_BYTES // 4
"""Elements of a vector that is long enough."""


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> Reserve:
    """A reserve of this test alone, from which `empty` takes."""
    own = Reserve()
    monkeypatch.setattr(chunks, "RESERVE", own)
    return own


def test_what_nobody_uses_any_more_is_given_out_again(reserve: Reserve) -> None:
    first = empty(N)
    place = first.data_ptr()
    del first
    assert empty(N).data_ptr() == place
    assert reserve.fresh == 4 * N


def _views(x: Tensor) -> dict[str, object]:
    return {
        "slice": x[5:9],
        "detached": x.detach().view(-1),
        "other dtype": x.view(torch.int32),
        "array": x.numpy(),
        "view of a view": np.asarray(x.numpy()[3:])[2:].view(np.int32),
        "memoryview": x.numpy().data,
        "toreadonly": x.numpy().data.toreadonly()[8:],
        "frombuffer": torch.frombuffer(x.numpy().data, dtype=torch.float32),
    }


@pytest.mark.parametrize("kind", _views(torch.zeros(16)))
def test_memory_that_any_view_still_sees_is_not_given_out(reserve: Reserve, kind: str) -> None:
    whole = empty(N)
    place, view = whole.data_ptr(), _views(whole)[kind]
    del whole
    gc.collect()
    assert empty(N).data_ptr() != place
    del view
    again = [empty(N) for _ in range(2)]
    assert place in [x.data_ptr() for x in again]


@pytest.mark.parametrize("kind", ["array", "view of it", "memoryview"])
def test_memory_taken_as_bytes_is_kept_by_every_view_too(reserve: Reserve, kind: str) -> None:
    whole = reserve.take(LARGE_BYTES)
    place = whole.ctypes.data
    view = {"array": whole[:], "view of it": np.asarray(whole[7:])[1:], "memoryview": whole.data.toreadonly()}[kind]
    del whole
    assert reserve.take(LARGE_BYTES).ctypes.data != place
    assert len(view) > 0


def test_idle_and_lent_memory_never_exceed_what_was_lent_at_once(reserve: Reserve) -> None:
    held, most, rng = [], 0, np.random.default_rng(0)
    sizes = rng.choice(np.linspace(LARGE_BYTES, 3 * LARGE_BYTES, 5).astype(int), size=300)
    for nbytes in sizes.tolist():
        held.append(reserve.take(nbytes))
        most = max(most, sum(len(x) for x in held))
        while len(held) > rng.integers(4, 10):
            held.pop(int(rng.integers(len(held))))
        idle = sum(memory.nbytes for memory in reserve._idle)
        assert idle + sum(len(x) for x in held) <= most * (1 + SLACK)
    assert reserve.fresh < sum(sizes) / 2  # and it did save something


def test_a_much_shorter_vector_does_not_take_a_long_ones_memory(reserve: Reserve) -> None:
    place = empty(N).data_ptr()
    little = empty(int(N / (1 + 2 * SLACK)))
    assert little.data_ptr() != place


def test_short_vectors_are_the_allocators_business(reserve: Reserve) -> None:
    reserve.take(LARGE_BYTES - 1)
    assert reserve.fresh == 0


def test_threads_never_share_a_vector(reserve: Reserve) -> None:
    torn = []

    def work(number: int) -> None:
        for turn in range(60):
            x = empty(N)
            x.fill_(number)
            half = x[: N // 2]
            del x
            if not bool((half == number).all()):
                torn.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
    assert reserve.fresh < 60 * 4 * N  # of 240 vectors


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_a_round_asks_the_system_for_no_vector_that_the_last_one_had(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    own = Reserve()
    for module in ("chunks", "payloads"):
        monkeypatch.setattr(f"composer_prime.outer.{module}.RESERVE", own)
    used, plan = get_codec(codec), plan_slices(4 * N, 32, [get_codec(codec)])
    weights = empty(4 * N).zero_()

    def a_round(weights: Tensor) -> Tensor:
        movement = empty(4 * N).normal_()
        coded = code(used, movement, plan)
        theirs = decode_whole(used, coded.data, coded.digests, coded.norms, plan)
        merged = weighted_mean([(0.5, coded.decoded), (0.5, theirs)])
        stepped = nesterov_next(weights, merged, None, lr=1.0, mu=0.0)
        assert stepped is not None
        return stepped[0]

    weights = a_round(a_round(weights))
    asked = own.fresh
    for _ in range(3):
        weights = a_round(weights)
    assert own.fresh == asked > 0
