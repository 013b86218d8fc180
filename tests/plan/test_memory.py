"""What memory a process may have, and what a site holds of it: counted, beside the tensors that there are."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from composer_prime.config.paths import models_cache
from composer_prime.config.recipe import OptimConfig
from composer_prime.config.teachers import HintsConfig
from composer_prime.errors import MachineUnfit
from composer_prime.plan import memory
from composer_prime.sites.embedded.learner import inner_optimizer
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.store import open_store
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import terms_of
from tests.sync.harness import make_terms
from tests.volunteers.owned_run import run_recipe


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `meminfo`, `own` and `groups/` stand for what the kernel says."""
    for name, place in (("MEMINFO", "meminfo"), ("OWN_CGROUP", "own"), ("CGROUPS", "groups")):
        monkeypatch.setattr(memory, name, tmp_path / place)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    return tmp_path


def limit(group: Path, most: str, used: int = 0, cached: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in (("max", most), ("current", used), ("stat", f"anon 500\ninactive_file {cached}")):
        (group / f"memory.{name}").write_text(f"{value}\n")


def test_what_the_kernel_calls_available_is_free(machine: Path) -> None:
    assert memory.memory()[1] == 4000 * 1024


def test_the_lowest_limit_of_the_own_groups_and_those_above_counts(machine: Path) -> None:
    (machine / "own").write_text("1:cpu:/else\n0::/job/step\n")
    limit(machine / "groups/job", "1000")
    limit(machine / "groups/job/step", "max")
    limit(machine / "groups/else", "1")
    limit(machine, "1")
    assert memory.memory() == (1000, 1000)


def test_what_a_group_holds_is_not_free_but_for_files_that_nobody_reads(machine: Path) -> None:
    (machine / "own").write_text("0::/job\n")
    limit(machine / "groups/job", "1000", 700, 200)
    assert memory.memory() == (1000, 500)


def test_where_nothing_is_told_all_there_is_counts_and_a_model_is_taken(machine: Path) -> None:
    (machine / "meminfo").unlink()
    total, free = memory.memory()
    assert total == free > 0
    memory.check_memory(make_terms(momentum=0.9), 1000)


def test_a_model_that_does_not_fit_is_refused_with_need_and_limit(machine: Path) -> None:
    memory.check_memory(make_terms(codec="int8"), 500_000)
    memory.check_memory(make_terms(), 600_000)
    with pytest.raises(MachineUnfit, match=r"holds 0\.00 GiB .*600,000 parameters\), and 0\.00 GiB"):
        memory.check_memory(make_terms(codec="int8"), 600_000)


def held_bytes() -> int:
    """Of all tensors there are, each memory once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize(
    ("codec", "momentum", "fragments"), [("int8", 0.0, 1), ("int8", 0.9, 4), ("fp32", 0.9, 4), ("topk", 0.9, 1)]
)
def test_an_outer_loop_holds_between_rounds_what_is_counted(
    codec: str, momentum: float, fragments: int, request: pytest.FixtureRequest
) -> None:
    terms = make_terms(codec=codec, momentum=momentum, fragments=fragments, inner_steps=2 * fragments, rounds=20)
    named = [(f"model.layers.{place}.w", nn.Parameter(0.02 * torch.randn(100_000))) for place in range(8)]
    before = held_bytes()
    loop = OuterLoop(open_store(f"memory://{request.node.name}"), terms, run="r", site="a")
    loop.join(named)
    for _ in range(4 * fragments + 1):
        with torch.no_grad():
            for _, parameter in named:
                parameter.add_(1e-3 * torch.randn(parameter.shape))
        loop.after_inner_step(10, 1)
    held = held_bytes() - before
    loop.close()
    assert held == pytest.approx(memory.outer_bytes(terms, 800_000), rel=0.1)


def test_an_embedded_trainer_and_its_server_hold_what_is_counted() -> None:
    model = load_policy(resolve_model("tiny", 0, models_cache()))
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.nbytes for parameter in model.parameters()) == memory.FP32 * numel
    optimizer = inner_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    moments = sum(each.nbytes for state in optimizer.state_dict()["state"].values() for each in state.values())
    held = moments + 2 * memory.FP32 * numel
    assert held == pytest.approx(memory.TRAINER_BYTES["adamw"] * numel, rel=0.1)


def test_hints_of_the_sites_own_server_take_models_more() -> None:
    recipe = run_recipe()
    terms = terms_of(recipe)
    plain = memory.host_bytes(recipe, terms, 1000)
    assert plain == memory.outer_bytes(terms, 1000) + 20 * 1000
    for hints, models in (
        (HintsConfig(), 1),
        (HintsConfig(teacher="ema"), 2),
        (HintsConfig(teacher="live", allow_live=True), 0),
        (HintsConfig(base_url="https://teacher.example.org"), 0),
    ):
        hinted = recipe.model_copy(update={"hints": hints})
        assert memory.host_bytes(hinted, terms, 1000) - plain == models * 4 * 1000
