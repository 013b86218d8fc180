"""Which flavor is chosen for what is asked."""

import pytest

from composer_prime.errors import BadInput
from composer_prime.executors.base import Resources
from composer_prime.executors.services import cheapest
from composer_prime.plan.prices import shipped


@pytest.mark.parametrize(
    ("wanted", "flavor"),
    [
        (Resources(), "cpu-basic"),
        (Resources(cpus=4), "cpu-upgrade"),
        (Resources(memory_gib=64), "cpu-xl"),
        (Resources(disk_gib=1010), "cpu-performance"),
        (Resources(gpu="T4", gpu_count=1), "t4-small"),
        (Resources(gpu="t4", gpu_count=1, cpus=8), "t4-medium"),
        (Resources(gpu="A100"), "a100-large"),
        (Resources(gpu="A100", gpu_count=8), "a100x8"),
        (Resources(gpu="h200", gpu_count=2), "h200x2"),
        (Resources(gpu="RTX-PRO-6000", gpu_count=4), "rtx-pro-6000x4"),
        (Resources(gpu="RTX PRO 6000"), "rtx-pro-6000"),
        (Resources(gpu="H200, A100"), "a100-large"),
        (Resources(gpu="a10g-large"), "a10g-large"),
        (Resources(gpu="a10g-largex2", gpu_count=2), "a10g-largex2"),
        (Resources(gpu="a10g-largex2", gpu_count=1), "a10g-largex2"),
    ],
)
def test_the_cheapest_that_has_what_is_asked_for(wanted: Resources, flavor: str) -> None:
    assert cheapest(shipped("hf-jobs"), wanted, "Hugging Face Jobs").name == flavor


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [
        (Resources(gpu="H100", gpu_count=1), r"no GPU 'H100': nearest are H200, A100, h200x8"),
        (Resources(gpu="H1000"), r"no GPU 'H1000': nearest are H200, A100, h200x8"),
        (Resources(gpu="h20"), r"no GPU 'h20': nearest are H200, h200x8"),
        (Resources(gpu="A1000"), r"no GPU 'A1000': nearest are A100, a100x8"),
        (Resources(gpu="RTX 6000"), r"no GPU 'RTX 6000': nearest are RTX-PRO-6000, rtx-pro-6000x8"),
        (Resources(gpu="a100-larg"), r"no GPU 'a100-larg': nearest are a100-large"),
        (Resources(gpu="Trainium"), r"no GPU 'Trainium': it has A100, A10G, H200, .* t4-small"),
        (Resources(gpu="A100", gpu_count=2), r"2 x A100: Hugging Face Jobs has machines with 1, 4, 8 of them"),
        (Resources(gpu="a10g-largex2", gpu_count=4), r"machines with 2 of them: ask for one"),
        (Resources(cpus=64), r"64 CPUs: Hugging Face Jobs has no such machine, of cpu-basic .*; cpu-performance"),
        (Resources(gpu="T4", memory_gib=64), r"^64 GiB of memory: .* no such machine, of t4-small \(1 x T4"),
    ],
)
def test_what_no_machine_has_is_refused_with_what_there_is(wanted: Resources, cause: str) -> None:
    with pytest.raises(BadInput, match=cause):
        cheapest(shipped("hf-jobs"), wanted, "Hugging Face Jobs")
