"""Copies off a device by spans through pinned memory, on a stream of their own: only these copies are waited for.

They stay in the dtype of the values up to the CPU: half the traffic for bf16, and the CPU's own conversion.
"""

import functools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from composer_prime.outer.chunks import spans

STAGES = 2
"""Buffers of a copy: one fills while the other is emptied."""


class DeviceSide:
    """A queue of copies beside a device's own work, in torch's words for any accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def enter(self, values: Tensor) -> Tensor:
        """`values`, flat [n], as they are once everything queued on the device before has been done.

        Values that are freed meanwhile keep their memory until the stream is past it.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(values.device))
        with self._current():
            flat = values.reshape(-1)  # new memory when not contiguous, and then the side stream's
        values.record_stream(self._stream)
        return flat

    def stage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer [numel] on the CPU, pinned; torch keeps its memory for the next time. At most STAGES are in use."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, source: Tensor, stage: Tensor) -> Callable[[], None]:
        """Queue a copy, and return what waits for it."""
        copied = torch.Event(source.device, enable_timing=False)
        with self._current():
            stage.copy_(source, non_blocking=True)
        copied.record(self._stream)
        return copied.synchronize

    def _current(self) -> torch.Stream:
        """The stream for one `with`: a torch.Stream keeps in itself what was current, so threads can't share one."""
        of = self._stream
        return torch.Stream(stream_id=of.stream_id, device_index=of.device_index, device_type=of.device_type)


def copy_off(values: Tensor, target: Tensor, side: DeviceSide) -> None:
    """Copy a device's tensor to the CPU; done when this returns, so `values` may be overwritten at once.

    values  any shape and float dtype
    target  fp32 [values.numel()] on the CPU. Written, in the logical order of `values`.
    """
    landing: deque[tuple[Callable[[], None], Tensor, Tensor]] = deque()
    flat = side.enter(values)
    for start, stop in spans(flat.numel()):
        if len(landing) == STAGES:
            _land(*landing.popleft())
        stage = side.stage(stop - start, flat.dtype)
        landing.append((side.copy(flat[start:stop], stage), stage, target[start:stop]))
    for landed in landing:
        _land(*landed)


def _land(wait: Callable[[], None], stage: Tensor, target: Tensor) -> None:
    wait()
    target.copy_(stage)


def has_side_streams(device: torch.device) -> bool:
    """Whether a device is an accelerator with streams beside the default one: any but MPS."""
    if device.type in ("cpu", "mps"):
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


@functools.cache
def side_stream(device: torch.device) -> DeviceSide:
    """The side stream of a device, made once."""
    return DeviceSide(device)
