"""Claims for the simulated device alone: that it is late where a device may be, and what each planted bug would do.

A bug is planted in what our code calls, never in a copy of our code; gates make each outcome certain.
"""

import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from composer_prime.outer.device_copy import DeviceSide, side_stream
from composer_prime.outer.pseudograd import copy_to_host
from tests.outer.device_claims import OTHERS, copied_while_dropped, random, streams_after_two_threads_copied_at_once
from tests.outer.late_device.device import DELAY_S, LateDevice

NUMEL = 1000


def own_stream(device: LateDevice) -> torch.Stream:
    return torch.accelerator.current_stream(device.at(0))


def a_copy_into_pinned_memory_is_there_once_its_event_was_waited_for(device: LateDevice) -> None:
    start, own = random((NUMEL,), torch.float32), own_stream(device)
    values, pinned = start.to(device.at(0)), torch.zeros(NUMEL, pin_memory=True)
    assert pinned.is_pinned() and not start.is_pinned()
    with device.held(own):
        pinned.copy_(values, non_blocking=True)
        copied = own.record_event()
        assert not copied.query() and not own.query() and not pinned.any()
    copied.synchronize()
    assert copied.query() and torch.equal(pinned, start)


def pinned_values_are_read_when_the_device_comes_to_it(device: LateDevice) -> None:
    pinned, own = torch.zeros(NUMEL, pin_memory=True), own_stream(device)
    values = torch.empty(NUMEL, device=device.at(0))
    with device.held(own):
        values.copy_(pinned, non_blocking=True)
        pinned.fill_(1)
    assert torch.equal(values.cpu(), torch.ones(NUMEL))


def every_piece_of_work_is_late(device: LateDevice) -> None:
    values = torch.zeros(NUMEL, device=device.at(0))
    values.cpu()
    device.delay(0.03)
    began = time.perf_counter()
    for _ in range(3):
        values += 1
    assert torch.equal(values.cpu(), torch.full((NUMEL,), 3.0)) and time.perf_counter() - began > 4 * 0.03
    device.delay(DELAY_S)


def a_whole_device_can_be_waited_for(device: LateDevice) -> None:
    other = torch.Stream(device.at(1))
    device.pause(other)
    queued = other.record_event()
    assert not queued.query()
    torch.accelerator.synchronize(1)
    assert queued.query()


def streams_are_in_no_order_but_by_wait_stream(device: LateDevice) -> None:
    where, own = device.at(0), own_stream(device)
    values, other = torch.zeros(NUMEL, device=where), torch.Stream(where)
    own.synchronize()
    pinned = [torch.empty(NUMEL, pin_memory=True) for _ in range(2)]
    with device.held(own):
        values += 1
        with other:
            pinned[0].copy_(values, non_blocking=True)
        other.synchronize()
        other.wait_stream(own)
        with other:
            pinned[1].copy_(values, non_blocking=True)
        assert not other.query()
    other.synchronize()
    assert [float(each.mean()) for each in pinned] == [0, 1]


def an_event_is_as_it_was_when_it_was_waited_for(device: LateDevice) -> None:
    where, own = device.at(0), own_stream(device)
    event, other, values = torch.Event(where, enable_timing=False), torch.Stream(where), torch.zeros(3, device=where)
    event.record(own)
    other.wait_event(event)
    with device.held(own):
        event.record(own)
        with other:
            values += 1
        other.synchronize()  # the second record isn't done
        assert not event.query()


def freed_memory_is_poisoned_unless_a_stream_is_noted_that_is_not_past_it(device: LateDevice) -> None:
    """Of a size that no other claim asks for: nothing else is kept that could be handed out."""
    where, own = device.at(0), own_stream(device)
    other = torch.Stream(where)
    for noted in (False, True):
        pinned, values = torch.empty(9001, pin_memory=True), torch.ones(9001, device=where)
        own.synchronize()
        with device.held(other):
            with other:
                pinned.copy_(values, non_blocking=True)
            if noted:
                values.record_stream(other)
            place = values.data_ptr()
            del values
            own.synchronize()
            others = [torch.empty(9001, device=where) for _ in range(2)]
            assert (place in [each.data_ptr() for each in others]) == (not noted)
        other.synchronize()
        assert torch.equal(pinned, torch.ones(9001)) if noted else bool(pinned.isnan().all())


def pinned_memory_is_not_handed_out_again_while_a_copy_into_it_is_queued(device: LateDevice) -> None:
    """Of a size that no other claim asks for: nothing else is kept that could be handed out."""
    values, own = torch.ones(7001, device=device.at(0)), own_stream(device)
    own.synchronize()
    pinned = torch.empty(7001, pin_memory=True)
    place = pinned.data_ptr()
    with device.held(own):
        pinned.copy_(values, non_blocking=True)
        del pinned
        others = [torch.empty(7001, pin_memory=True) for _ in range(2)]
        assert place not in [each.data_ptr() for each in others]
    own.synchronize()
    again = torch.empty(7001, pin_memory=True)
    assert again.data_ptr() == place and bool(again.isnan().all())


def stages_of_earlier_copies_are_used_again(device: LateDevice) -> None:
    values, target = random((NUMEL,), torch.float64).to(device.at(0)), torch.empty(NUMEL)
    copy_to_host(values, target)
    torch.accelerator.synchronize(0)
    num_reused = device.num_reused
    copy_to_host(values, target)
    assert device.num_reused > num_reused


class Deaf(torch.Stream):
    """A stream that waits for no other."""

    def wait_stream(self, other: torch.Stream) -> None:
        pass


class Unwaited(torch.Event):
    """An event for which nobody waits."""

    def synchronize(self) -> None:
        pass


class Elsewhere(torch.Event):
    """An event of the device's own stream, whichever it should be of."""

    def record(self, stream: torch.Stream | None = None) -> None:
        assert stream is not None
        super().record(torch.accelerator.current_stream(stream.device))


def copied_behind(device: LateDevice, held: Callable[[DeviceSide], torch.Stream]) -> Tensor:
    """What a copy of ones returns, where the values were zeros and a stream is held that it should wait for."""
    where = device.at(0)
    values, target = torch.zeros(NUMEL, device=where), torch.empty(NUMEL)
    torch.accelerator.synchronize(0)
    with device.held(held(side_stream(where))):
        values += 1
        copy_to_host(values, target)
    return target


def without_waiting_for_the_current_stream_the_values_would_be_the_old_ones(device: LateDevice) -> None:
    side = side_stream(device.at(0))
    of = side._stream
    deaf = Deaf(stream_id=of.stream_id, device_index=of.device_index, device_type=of.device_type)
    with patch.object(side, "_stream", deaf):
        target = copied_behind(device, lambda _: own_stream(device))
    assert not target.any()


def without_waiting_for_a_copys_event_the_values_would_not_be_there(device: LateDevice) -> None:
    with patch.object(torch, "Event", Unwaited):
        target = copied_behind(device, lambda side: side._stream)
    assert bool(target.isnan().all())


def with_its_event_on_another_stream_the_values_would_not_be_there(device: LateDevice) -> None:
    with patch.object(torch, "Event", Elsewhere):
        target = copied_behind(device, lambda side: side._stream)
    assert bool(target.isnan().all())


def without_record_stream_the_values_would_be_poison_or_somebody_elses(device: LateDevice) -> None:
    with patch.object(torch.Tensor, "record_stream", lambda self, stream: None):
        for shape in ((1, 5000), (50, 100)):
            copied = copied_while_dropped(device, random(shape, torch.float32))
            assert bool((copied.isnan() | (copied == OTHERS)).all())


def with_one_stream_object_for_all_threads_one_would_go_on_in_anothers_stream(device: LateDevice) -> None:
    with patch.object(DeviceSide, "_current", lambda self: self._stream):
        assert streams_after_two_threads_copied_at_once(device) != [True, True]


LATE_CLAIMS: tuple[Callable[[LateDevice], None], ...] = (
    a_copy_into_pinned_memory_is_there_once_its_event_was_waited_for,
    pinned_values_are_read_when_the_device_comes_to_it,
    every_piece_of_work_is_late,
    a_whole_device_can_be_waited_for,
    streams_are_in_no_order_but_by_wait_stream,
    an_event_is_as_it_was_when_it_was_waited_for,
    freed_memory_is_poisoned_unless_a_stream_is_noted_that_is_not_past_it,
    pinned_memory_is_not_handed_out_again_while_a_copy_into_it_is_queued,
    stages_of_earlier_copies_are_used_again,
    without_waiting_for_the_current_stream_the_values_would_be_the_old_ones,
    without_waiting_for_a_copys_event_the_values_would_not_be_there,
    with_its_event_on_another_stream_the_values_would_not_be_there,
    without_record_stream_the_values_would_be_poison_or_somebody_elses,
    with_one_stream_object_for_all_threads_one_would_go_on_in_anothers_stream,
)
