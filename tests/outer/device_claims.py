"""What copies off a device must do, as functions of a device: one text for a GPU and for the simulated device.

A GPU: tests/outer/test_device_copy.py, marker gpu. The simulated device: tests/outer/test_late_device.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest
import torch
from torch import Tensor

from composer_prime.outer.chunks import CHUNK_ELEMENTS
from composer_prime.outer.device_copy import DeviceSide, side_stream
from composer_prime.outer.fragments import plan_fragments
from composer_prime.outer.pseudograd import copy_to_host, flatten, write_back

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WAIT_S = 600
OTHERS = -1e3
"""What others write into memory that was freed."""


class Device(Protocol):
    """An accelerator, and how to make it late."""

    @property
    def count(self) -> int: ...

    def at(self, index: int) -> torch.device: ...

    def pause(self, stream: torch.Stream) -> None:
        """Queue a pause on a stream, which ends by itself."""
        ...

    def held(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """What is queued on a stream inside this block isn't done before it ends."""
        ...


class Gpu:
    """CUDA's or ROCm's devices; late by kernels that spin for a number of clock cycles."""

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def at(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def pause(self, stream: torch.Stream) -> None:
        with stream:
            torch.cuda._sleep(200_000_000)

    @contextmanager
    def held(self, stream: torch.Stream) -> Iterator[None]:
        with stream:
            torch.cuda._sleep(4_000_000_000)
        yield
        assert not stream.query(), "the device came past its pause before the claim was shown"
        stream.synchronize()


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def copied_before(values: Tensor) -> None:
    """Copy once, since CUDA's first allocations of a kind wait for the device: later ones find memory that is kept."""
    copy_to_host(values, torch.empty(values.numel()))
    torch.accelerator.synchronize(values.device)


def a_copy_is_what_the_cpu_has_and_the_values_may_be_overwritten_at_once(device: Device) -> None:
    """More than two spans, so that pinned buffers are reused, behind queued work that writes the values late."""
    where = device.at(0)
    numel = 2 * CHUNK_ELEMENTS + 5
    (fragment,) = plan_fragments([("a", (numel,)), ("b", (6, 4))], 1)
    for dtype in DTYPES:
        start, small = random((numel,), dtype), random((4, 6), dtype).t()
        expected = flatten({"a": start + 1, "b": small}, fragment)
        params = {"a": start.to(where), "b": small.to(where)}
        device.pause(torch.accelerator.current_stream(where))
        params["a"] += 1
        flat = flatten(params, fragment)
        for values in params.values():
            values.zero_()  # the optimizer's next step
        torch.accelerator.synchronize(where)
        assert torch.equal(flat, expected), dtype


def strided_values_are_copied_in_their_logical_order(device: Device) -> None:
    where = device.at(0)
    for dtype in DTYPES:
        start = random((5, 3, 4), dtype)
        values = start.to(where).permute(2, 0, 1)
        assert not values.is_contiguous()
        device.pause(torch.accelerator.current_stream(where))
        values += 1
        target = torch.empty(60)
        copy_to_host(values, target)
        values.zero_()
        assert torch.equal(target, (start + 1).permute(2, 0, 1).reshape(-1).float()), dtype


def a_copy_waits_for_no_other_stream(device: Device) -> None:
    where = device.at(0)
    start = random((1000,), torch.float32)
    values, others, target = start.to(where), torch.zeros(3, device=where), torch.empty(1000)
    other = torch.Stream(where)
    copied_before(values)
    with device.held(other):
        with other:
            others += 1
        later = other.record_event()
        copy_to_host(values, target)
        assert torch.equal(target, start) and not later.query()
    torch.accelerator.synchronize(where)
    assert torch.equal(others.cpu(), torch.ones(3))


def values_of_a_device_that_is_not_the_current_one_are_copied(device: Device) -> None:
    if device.count < 2:
        pytest.skip("one device here")
    here, there = device.at(0), device.at(1)
    start, target = random((1000,), torch.bfloat16), torch.empty(1000)
    with torch.accelerator.device_index(0):
        values = start.to(there)
        copied_before(values)
        device.pause(torch.accelerator.current_stream(there))
        values += 1
        with device.held(torch.accelerator.current_stream(here)):
            copy_to_host(values, target)
        assert torch.accelerator.current_device_index() == 0
    assert torch.equal(target, (start + 1).float())


def the_stream_that_is_current_when_a_copy_is_asked_for_is_the_one_it_waits_for(device: Device) -> None:
    where = device.at(0)
    start, target = random((1000,), torch.float32), torch.empty(1000)
    values, own = start.to(where), torch.Stream(where)
    with own:
        device.pause(own)
        values += 1
        copy_to_host(values, target)
        assert torch.accelerator.current_stream(where) == own
    assert torch.equal(target, start + 1)


def parameters_hold_what_those_on_the_cpu_do_after_a_write(device: Device) -> None:
    shapes = [("a", (7, 3)), ("b", ()), ("c", (2, 3, 5))]
    (fragment,) = plan_fragments(shapes, 1)
    master = random((fragment.numel,), torch.float32)
    for dtype in DTYPES:
        here = {name: random(shape, dtype) for name, shape in shapes}
        there = {name: value.to(device.at(0)) for name, value in here.items()}
        assert torch.equal(write_back(master, here, fragment), write_back(master, there, fragment)), dtype
        assert torch.equal(flatten(there, fragment), flatten(here, fragment)), dtype


def copied_while_dropped(device: Device, start: Tensor) -> Tensor:
    """What a side stream copies of values that nobody holds any more while that is still queued."""
    where = device.at(0)
    side = side_stream(where)
    own = torch.accelerator.current_stream(where)
    copied_before(start.to(where).t())
    values = start.to(where).t()
    numel, size, dtype = values.numel(), values.shape, values.dtype
    torch.accelerator.synchronize(where)
    stage = side.stage(numel, dtype)
    with device.held(side._stream):
        flat = side.enter(values)
        copied = side.copy(flat, stage)
        del flat, values
        own.synchronize()
        others = [torch.empty(size, dtype=dtype, device=where).fill_(OTHERS) for _ in range(8)]
        own.synchronize()
    copied()
    del others
    return stage


def values_that_are_dropped_while_their_copy_is_queued_are_copied_all_the_same(device: Device) -> None:
    contiguous, strided = random((1, 5000), torch.float32), random((50, 100), torch.float32)
    assert torch.equal(copied_while_dropped(device, contiguous), contiguous.view(-1))
    assert torch.equal(copied_while_dropped(device, strided), strided.t().reshape(-1))


class Meeting:
    """Values whose `reshape`, which a side stream runs inside its `with`, is a place for threads to meet."""

    def __init__(self, values: Tensor, at: Callable[[], object]) -> None:
        self._values, self._at = values, at
        self.device, self.record_stream = values.device, values.record_stream

    def reshape(self, *shape: int) -> Tensor:
        self._at()
        return self._values.reshape(*shape)


def streams_after_two_threads_copied_at_once(device: Device) -> list[bool]:
    """Whether each of two threads had its own current stream again, where the first to come left first."""
    where = device.at(0)
    side, values = DeviceSide(where), torch.zeros(3, device=where)
    streams = [torch.Stream(where), torch.Stream(where)]
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    kept = [False, False]

    def first() -> None:
        with streams[0]:
            side.enter(Meeting(values, lambda: (first_is_in.set(), second_is_in.wait(WAIT_S))))  # type: ignore[arg-type]
            kept[0] = torch.accelerator.current_stream(where) == streams[0]
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(WAIT_S)
        with streams[1]:
            side.enter(Meeting(values, lambda: (second_is_in.set(), first_is_out.wait(WAIT_S))))  # type: ignore[arg-type]
            kept[1] = torch.accelerator.current_stream(where) == streams[1]

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return kept


def threads_that_copy_at_once_keep_their_own_streams(device: Device) -> None:
    assert streams_after_two_threads_copied_at_once(device) == [True, True]


CLAIMS: tuple[Callable[[Device], None], ...] = (
    a_copy_is_what_the_cpu_has_and_the_values_may_be_overwritten_at_once,
    strided_values_are_copied_in_their_logical_order,
    a_copy_waits_for_no_other_stream,
    values_of_a_device_that_is_not_the_current_one_are_copied,
    the_stream_that_is_current_when_a_copy_is_asked_for_is_the_one_it_waits_for,
    parameters_hold_what_those_on_the_cpu_do_after_a_write,
    values_that_are_dropped_while_their_copy_is_queued_are_copied_all_the_same,
    threads_that_copy_at_once_keep_their_own_streams,
)
