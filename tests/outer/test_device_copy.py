"""Copies off a device wait for what they must and for nothing else: on a side stream that is as late as it may be.

On a GPU, marker gpu, the same claims as on the simulated device of test_late_device.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from composer_prime.outer import device_copy
from composer_prime.outer.chunks import CHUNK_ELEMENTS
from composer_prime.outer.device_copy import STAGES, DeviceSide, copy_off, has_side_streams
from tests.outer.device_claims import CLAIMS, Device, Gpu


class LazySide(DeviceSide):
    """Lazy: work queued before is done when entered, a copy when it is waited for.

    queued   writes the values, as an optimizer's step that the device has not come to yet
    """

    def __init__(self, queued: Callable[[], object]) -> None:
        self._queued = queued
        self._stages: list[Tensor] = []
        self.most_pending = 0
        self.pending: list[tuple[Tensor, Tensor]] = []

    def enter(self, values: Tensor) -> Tensor:
        self._queued()
        return values.reshape(-1)

    def stage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """One of STAGES buffers in turn, full of NaN: who reads it too early, or has it filled twice, sees that."""
        if len(self._stages) < STAGES:
            self._stages.append(torch.empty(CHUNK_ELEMENTS, dtype=dtype))
        else:
            self._stages.append(self._stages.pop(0))
        return self._stages[-1].fill_(torch.nan)[:numel]

    def copy(self, source: Tensor, stage: Tensor) -> Callable[[], None]:
        entry = (source, stage)
        self.pending.append(entry)
        self.most_pending = max(self.most_pending, len(self.pending))

        def wait() -> None:
            while any(each is entry for each in self.pending):  # a stream keeps its order
                first, landed = self.pending.pop(0)
                landed.copy_(first)

        return wait


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_sees_what_was_queued_before_it_and_is_over_when_it_returns(dtype: torch.dtype) -> None:
    numel = (STAGES + 1) * CHUNK_ELEMENTS + 5
    values = torch.zeros(numel, dtype=dtype)
    final = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    side = LazySide(lambda: values.copy_(final))
    target = torch.empty(numel)
    copy_off(values, target, side)
    assert side.pending == [] and side.most_pending == STAGES
    values.zero_()
    assert torch.equal(target, final.float())


def test_a_copy_is_in_the_values_own_order_whatever_their_strides() -> None:
    values = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    target = torch.empty(24)
    copy_off(values, target, LazySide(lambda: None))
    assert torch.equal(target, values.reshape(-1))


def test_without_waiting_for_a_copy_its_values_would_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_land", lambda wait, stage, target: target.copy_(stage))
    values, target = torch.ones(3), torch.empty(3)
    copy_off(values, target, LazySide(lambda: None))
    assert bool(torch.isnan(target).all())


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_a_device_without_streams_of_its_own_has_no_side_stream(device: str) -> None:
    assert not has_side_streams(torch.device(device))


@pytest.mark.gpu
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_on_a_gpu(claim: Callable[[Device], None]) -> None:
    claim(Gpu())
