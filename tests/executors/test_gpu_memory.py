"""A recipe that needs more GPU memory than it asks for is refused beforehand; what isn't known is said, not refused."""

from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import RecipeBase
from composer_prime.errors import BadInput, ModelError, StoreUnusable
from composer_prime.launch.preflight import GIB, Estimate, memory_lines
from composer_prime.plan.prices import GPUS, gpu_gib, shipped
from tests.executors.launches import small_plan

MATH_4B = str(Path(__file__).parents[2] / "recipes/multi_site/math_4b_4.toml")


def needing(gib: int) -> Estimate:
    return lambda recipe: gib * GIB


def machine(gpu: str | None, count: int | None) -> dict[str, Any]:
    return {} if gpu is None else {"gpu": gpu, "gpu_count": count}


@pytest.mark.parametrize(
    ("on", "gpu", "count", "said"),
    [
        ("modal", "H100", 1, r"about 100 GiB .* 1 x H100 \(launch.gpu\) has 80: 7 x T4, .* would do"),
        ("modal", "a100", 2, "2 x a100 .* has 80: "),
        ("hf-jobs", "A100", 1, "1 x A100 .* has 80: h200, "),
        ("hf-jobs", "a10g-largex4", 1, "has 96: h200, "),
        ("ssh:gpu1", "H100", 1, "has 80: take more GPUs"),
        ("modal", None, None, "launch.gpu is not set: "),
    ],
)
def test_a_recipe_that_does_not_fit_its_gpus_is_refused_with_those_that_would(
    on: str, gpu: str | None, count: int | None, said: str
) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        list(memory_lines(small_plan(on, launch=machine(gpu, count)), needing(100)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("on", "gpu", "said"),
    [
        ("modal", "H200", "about 100 GiB a site, and 1 x H200 (launch.gpu) has 141"),
        ("hf-jobs", "rtx-pro-6000x2", "1 x rtx-pro-6000x2 (launch.gpu) has 192"),
        ("ssh:gpu1", "MI300X", "not checked, since how much launch.gpu (MI300X) has isn't known"),
        ("hf-jobs", "of-tomorrow", "not checked"),
        ("local", None, "not checked, since how much launch.gpu (None) has isn't known"),
    ],
)
def test_a_recipe_that_fits_or_can_not_be_checked_is_said_to(on: str, gpu: str | None, said: str) -> None:
    *_, line = memory_lines(small_plan(on, launch={"gpu": gpu}), needing(100))
    assert line.startswith("GPU memory: ") and said in line


@pytest.mark.parametrize(("gpu", "count", "num_bytes"), [("H100", 2, 0), ("of-tomorrow", 1, 100)])
def test_that_this_machine_gives_out_no_gpus_is_said(gpu: str, count: int, num_bytes: int) -> None:
    line, *rest = memory_lines(small_plan("local", launch={"gpu": gpu, "gpu_count": count}), needing(num_bytes))
    assert line == "GPUs: launch.gpu is neither looked for nor given out on local: a site sees all GPUs of its machine"
    assert len(rest) == (num_bytes > 0)


def test_a_model_that_is_not_known_here_is_not_refused() -> None:
    def unknown(recipe: RecipeBase) -> int:
        raise ModelError("no configuration to be had")

    (line,) = memory_lines(small_plan("modal", launch={"gpu": "T4"}), unknown)
    assert line == "GPU memory: not checked (no configuration to be had)"


def test_a_site_that_needs_no_gpu_is_not_spoken_of() -> None:
    assert list(memory_lines(small_plan("modal"), needing(0))) == []


def test_every_gpu_that_platforms_offer_has_a_known_memory() -> None:
    for platform in ("modal", "hf-jobs"):
        names = [each.name for each in shipped(platform) if each.gpu]
        assert [name for name in names if not gpu_gib(platform, [name], 1)] == []
    assert GPUS["source"] and len(GPUS["date"]) == len("2026-01-01")


@pytest.mark.parametrize(
    ("count", "more", "why"),
    [
        (1, ["--dry-run"], "about 37 GiB of GPU memory a site, and 1 x L4 (launch.gpu) has 24: "),
        (1, [], "about 37 GiB of GPU memory a site, and 1 x L4 (launch.gpu) has 24: "),
        (2, ["--trainer.model.optim_cpu_offload", "false"], "about 67 GiB of GPU memory a site, and 2 x L4 "),
    ],
    ids=["dry run", "launch", "optimizer on the GPUs"],
)
def test_the_command_refuses_a_recipe_that_does_not_fit_and_starts_nothing(
    cli, count: int, more: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shapes(model: str) -> list[tuple[str, tuple[int, ...]]]:
        return [("layers.0.weight", (4000, 1_000_000))]

    def nobody(*_: Any) -> None:
        raise StoreUnusable("no way to the bucket")

    monkeypatch.setattr("composer_prime.launch.preflight.named_shapes", shapes)
    monkeypatch.setattr("composer_prime.sites.preflight.open_store", nobody)
    options = ("--on", "modal", "--gpu", "L4", "--gpu-count", count, "--image", "any", "--outer.store", "s3://b/r")
    answer = cli("launch", MATH_4B, *options, *more)
    assert answer.code == 2 and "site a on" not in answer.out
    assert f"needs {why}" in answer.err
