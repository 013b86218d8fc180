"""Copies off a device that is truly asynchronous: a simulated one, in a process of its own, compiled here.

The claims that hold for every device are in device_claims.py; those on this one, and planted bugs, in late_device/.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.outer.device_claims import CLAIMS
from tests.outer.late_device.claims import LATE_CLAIMS
from tests.outer.late_device.device import Process
from tests.outer.late_device.running import running


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    yield from running(tmp_path_factory.mktemp("late_device"))


@pytest.mark.parametrize("claim", [*LATE_CLAIMS, *CLAIMS], ids=lambda claim: claim.__name__)
def test_on_the_simulated_device(claim: Callable[..., None], late: Process) -> None:
    if (failure := late.failure(claim)) is not None:
        pytest.fail(failure, pytrace=False)


def a_claim_that_fails(device: object) -> None:
    assert torch.zeros(1, device="late").cpu().item() == 1, "zero isn't one"


def a_claim_that_leaves_its_stream_current(device: object) -> None:
    torch.accelerator.set_stream(torch.Stream("late:0"))


@pytest.mark.parametrize(
    ("claim", "words"),
    [(a_claim_that_fails, "zero isn't one"), (a_claim_that_leaves_its_stream_current, "left its stream current")],
)
def test_a_claim_that_fails_is_told_and_the_next_begins_afresh(
    claim: Callable[..., None], words: str, late: Process
) -> None:
    assert words in (late.failure(claim) or "")
    assert late.failure(CLAIMS[-1]) is None


def test_the_simulated_device_is_not_in_this_process() -> None:
    assert torch._C._get_privateuse1_backend_name() != "late"
