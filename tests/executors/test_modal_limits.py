"""What Modal would refuse, or bill otherwise than meant, is refused before anything is asked of it."""

from dataclasses import replace

import pytest

pytest.importorskip("modal")
from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.modal import ModalExecutor
from composer_prime.executors.modal_deploy import TIMEOUT_MARGIN_S, check_spec, gpu_option, object_name, price
from composer_prime.executors.modal_job_body import TIMEOUT_GRACE_S
from composer_prime.launch.budget import Limits, check_bounded
from composer_prime.plan.prices import shipped

SPEC = JobSpec(run="demo", site="a", attempt=1, command=("true",), timeout_s=60)


def test_the_gpu_is_spelled_as_modal_spells_it() -> None:
    assert gpu_option(Resources()) is None
    assert gpu_option(Resources(gpu="H100", gpu_count=1)) == "H100"
    assert gpu_option(Resources(gpu="h100", gpu_count=2)) == "H100:2"
    assert gpu_option(Resources(gpu="A100-80GB", gpu_count=8)) == "A100-80GB:8"
    assert gpu_option(Resources(gpu="h100, L40S", gpu_count=2)) == ["H100:2", "L40S:2"]


def test_every_gpu_of_the_table_passes_the_clients_own_parser() -> None:
    parse = pytest.importorskip("modal._utils.function_utils").parse_gpu_config
    for machine in shipped("modal")[1:]:
        parsed = parse(gpu_option(Resources(gpu=machine.gpu, gpu_count=int(machine.num_gpus))))
        assert (parsed.gpu_type, parsed.count) == (machine.gpu, machine.num_gpus)


def test_a_place_and_a_machine_that_stays_have_their_price() -> None:
    plain = Resources("H100", 1, cpus=4, memory_gib=8)
    usd = price(plain).usd_per_hour
    assert usd is not None
    for region, times in (("us", 1.5), ("us-west", 1.75)):
        assert price(replace(plain, region=region)).usd_per_hour == pytest.approx(times * usd)
    small = Resources(cpus=4, memory_gib=8)
    stays = price(replace(small, nonpreemptible=True)).usd_per_hour
    assert stays == pytest.approx(3 * (price(small).usd_per_hour or 0))
    assert price(replace(plain, gpu="L4,H100")).usd_per_hour == pytest.approx(usd), "the dearest may serve it"


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (Resources(gpu="H100", gpu_count=9), "9 x H100: Modal has machines with 1, 2, .*8 of them: ask for one"),
        (Resources(gpu="A10", gpu_count=8), "8 x A10: Modal has machines with 1, 2, 3, 4 of them"),
        (Resources(gpu="T4", gpu_count=1, nonpreemptible=True), "nonpreemptible .* isn't to be had with a GPU"),
        (Resources(gpu="T4,H1000", gpu_count=1), "Modal has no GPU 'H1000': nearest are H100"),
    ],
)
def test_sizes_that_modal_does_not_have_are_refused(resources: Resources, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_spec(replace(SPEC, resources=resources))


def test_a_timeout_outside_modals_is_refused() -> None:
    with pytest.raises(BadInput, match=r"timeout \(86401 s\) must be at most 86400 s \(24 h\)"):
        check_spec(replace(SPEC, timeout_s=24 * 3600 + 1))


def test_names_of_long_runs_fit_and_stay_apart() -> None:
    long = "r" * 63
    names = {object_name(run) for run in (long + "1", long + "2", "r" * 36, "short")}
    assert len(names) == 4
    assert all(len(f"{name}-0123456789ab") <= 64 for name in names)
    assert object_name("short") == "composer-prime-short"


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (Resources(), "launch.cpus and launch.memory_gib"),
        (Resources(cpus=4), "launch.memory_gib"),
        (Resources(cpus=4, memory_gib=16, disk_gib=1000), r"launch.disk_gib \(1000\) to 512 at most"),
    ],
)
def test_a_limit_on_cost_is_refused_where_use_beyond_the_reservation_is_billed(resources: Resources, said: str) -> None:
    found = ModalExecutor().price(JobSpec("r", "a", 1, ("x",), 60, resources=resources))
    assert found.overrun_s >= TIMEOUT_GRACE_S + TIMEOUT_MARGIN_S
    with pytest.raises(BadInput, match=f"--max-cost .* can't be kept on modal.*{said}.*or leave --max-cost out"):
        check_bounded(Limits(max_usd=5.0), found, "modal")
    check_bounded(Limits(max_hours=5.0), found, "modal")


def test_a_machine_whose_limits_are_its_reservation_has_a_price_that_holds() -> None:
    resources = Resources("H100", 1, cpus=4, memory_gib=16, disk_gib=512)
    check_bounded(
        Limits(max_usd=5.0), ModalExecutor().price(JobSpec("r", "a", 1, ("x",), 60, resources=resources)), "modal"
    )
