"""The doctor's verdicts: each number against its limit, with a remedy where there is something to do."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.config import Recipe
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.errors import ModelError
from composer_prime.launch import preflight
from composer_prime.launch.preflight import gpu_bytes_beforehand
from composer_prime.plan.memory import gpu_bytes
from composer_prime.plan.traffic import Link
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers import doctor
from composer_prime.volunteers.doctor import Check, Diagnosis, Gpu, Task, Torch, diagnose, lines, to_json
from tests.no_makers import hide_makers, said_of
from tests.volunteers.owned_run import GIB, machine, run_recipe

SHAPES = [
    ("model.embed_tokens.weight", (1000, 64)),
    ("model.layers.0.self_attn.q_proj.weight", (64, 64)),
    ("model.layers.0.self_attn.k_proj.weight", (32, 64)),
    ("model.layers.0.mlp.up_proj.weight", (128, 64)),
    ("model.layers.0.input_layernorm.weight", (64,)),
    ("model.norm.weight", (64,)),
]
NUMEL = sum(math.prod(shape) for _, shape in SHAPES)
JOIN_BYTES = 4 * NUMEL
"""The newest masters, without momentum: what `plan` says too."""
LINK = Link(up_mbit=20.0, down_mbit=80.0, delay_s=0.03)


def task(**changes) -> Task:
    recipe = run_recipe()
    return Task(**({"recipe": recipe, "terms": terms_of(recipe), "shapes": SHAPES, "test_vector": "vector"} | changes))


def check(diagnosis: Diagnosis, name: str) -> Check:
    return next(each for each in diagnosis.checks if each.name == name)


def test_an_able_machine_passes_every_check() -> None:
    found = diagnose(machine(), task(), LINK)
    assert found.is_able and {each.verdict for each in found.checks} == {"ok"}
    names = [each.name for each in found.checks]
    assert len(names) == len(set(names)) and {"torch", "arithmetic", "memory", "link", "joining", "a round"} <= set(
        names
    )


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"torch": None, "torch_problem": "No module named 'torch'"}, "torch", "No module named"),
        ({"free_memory_bytes": 1000}, "memory", "0.0 GiB free"),
        ({"torch": Torch("2.13", "another")}, "arithmetic", "differs from the run's in its last bits"),
    ],
    ids=["torch", "memory", "arithmetic"],
)
def test_what_is_missing_fails_with_its_number_and_a_remedy(changes, name: str, said: str) -> None:
    found = diagnose(machine(**changes), task(), LINK)
    assert not found.is_able
    failed = check(found, name)
    assert failed.verdict == "fail" and said in failed.found
    refusal = str(found.refusal())
    assert said in refusal and "\n" not in refusal and "can't take part, thank you" in refusal


def test_an_environment_that_is_not_installed_fails() -> None:
    data = run_recipe().to_data()
    data["orchestrator"]["train"]["source"][0]["env"]["taskset"]["id"] = "not-there-at-all"
    recipe = type(run_recipe()).model_validate(data)
    found = check(diagnose(machine(), task(recipe=recipe), LINK), "packages")
    assert found.verdict == "fail" and "there is no module 'not_there_at_all'" in found.found


def test_a_model_whose_maker_is_not_installed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_makers(tmp_path, monkeypatch)
    found = diagnose(machine(), task(), LINK)
    assert not found.is_able and check(found, "packages").found == said_of(run_recipe().model.name)


def test_a_model_folder_that_only_the_host_has_fails(tmp_path: Path) -> None:
    recipe = run_recipe()
    model = recipe.model.model_copy(update={"name": str(tmp_path / "none")})
    found = check(diagnose(machine(), task(recipe=recipe.model_copy(update={"model": model})), LINK), "model")
    assert found.verdict == "fail" and "a folder that isn't here" in found.found


@pytest.mark.parametrize(("delay_s", "verdict"), [(0.03, "ok"), (0.25, "ok"), (0.26, "warn")])
def test_a_bucket_that_is_far_away_is_warned_of(delay_s: float, verdict: str) -> None:
    found = diagnose(machine(), task(), Link(20.0, 80.0, delay_s))
    link = check(found, "link")
    assert found.is_able and link.verdict == verdict and f"delay {1000 * delay_s:.0f} ms" in link.found
    assert ("far away" in link.remedy) == (verdict == "warn")


def test_the_link_tells_how_long_joining_takes() -> None:
    joining = check(diagnose(machine(), task(), Link(1.0, 0.001, 0.5)), "joining")
    assert joining.verdict == "warn"
    assert joining.found == f"at most {JOIN_BYTES / 1e6:.1f} MB in {8 * JOIN_BYTES / 1000:.0f} s"
    unmeasured = diagnose(machine(), task(), Link(None, None, 0.5, "sending was not tried"))
    assert "not measured" in check(unmeasured, "link").found and unmeasured.is_able


def test_a_capped_link_is_judged_by_what_the_site_may_use() -> None:
    wide = Link(1000.0, 1000.0, 0.03)
    capped = diagnose(machine(), task(), replace(wide, up_cap=0.5, down_cap=0.001))
    said = check(capped, "link").found
    assert "up 1000.0 Mbit/s (capped at 0.5 Mbit/s), down 1000.0 Mbit/s (capped at 0.001 Mbit/s)" in said
    narrow = diagnose(machine(), task(), Link(0.5, 0.001, 0.03))
    for name in ("joining", "a round"):
        assert check(capped, name) == check(narrow, name) != check(diagnose(machine(), task(), wide), name)
    assert check(capped, "joining").verdict == "warn"
    loose = diagnose(machine(), task(), replace(wide, up_cap=5000.0, down_cap=5000.0))
    assert check(loose, "a round") == check(diagnose(machine(), task(), wide), "a round")
    unknown = diagnose(machine(), task(), Link(None, None, 0.03, "not tried", up_cap=2.0))
    assert check(unknown, "link").found.startswith("up not measured (capped at 2 Mbit/s): not tried; down not measured")


def prime_task(**tables) -> Task:
    data = {"run": {"name": "r"}, "max_steps": 40, "model": {"name": "org/model"}, "site": {"backend": "prime-rl"},
            "outer": {"inner_steps": 4, "grace_s": 12}, "prime_rl": {"version": "0.8.0"}}  # fmt: skip
    recipe = PrimeRecipe.model_validate(data | tables)
    return task(recipe=recipe, terms=terms_of(recipe))


SMALL = Torch("2.13", "vector", (Gpu("card", 2**10), Gpu("card", 2**10)))


@pytest.mark.parametrize(
    ("torch", "name", "said"),
    [
        (Torch("2.13", "vector"), "gpu memory", "at least 0.0 GiB needed, and torch sees no GPU here"),
        (SMALL, "gpus", f"this machine has 2 GPUs with 0.0 GiB each, and {NUMEL:,} parameters need"),
    ],
    ids=["no GPU", "too small"],
)
def test_a_prime_rl_site_needs_gpus(prime_rl: Path, torch: Torch, name: str, said: str) -> None:
    able = diagnose(machine(), prime_task(), LINK)
    assert able.is_able and check(able, "gpu memory").verdict == "ok"
    assert check(able, "prime-rl").found == f"0.8.0, started by {prime_rl}"
    without = diagnose(machine(torch=torch), prime_task(), LINK)
    failed = check(without, name)
    assert failed.verdict == "fail" and failed.found.startswith(said)
    refusal = str(without.refusal())
    assert f"can't take part, thank you all the same: {name}: " in refusal and "join from a" in refusal


@pytest.mark.usefixtures("prime_rl")
def test_the_doctor_says_how_a_machines_gpus_are_shared_out() -> None:
    tables = {"inference": {}, "deployment": {"num_train_gpus": 4, "num_infer_gpus": 4}}
    pod = machine(torch=Torch("2.13", "vector", (Gpu("card", 24 * GIB),) * 2))
    found = diagnose(pod, prime_task(**tables), LINK)
    said = "\n".join(lines(found))
    assert found.is_able and "GPUs: 1 to train, 1 to generate, of 2 here" in said
    assert "orchestrator.batch_size 32, not 128: 25% of the recipe's GPUs" in said


@pytest.mark.usefixtures("prime_rl")
def test_gpu_memory_that_a_recipe_spares_refuses_nobody() -> None:
    sparing = prime_task(trainer={"model": {"lora": {"rank": 8}}})
    found = diagnose(machine(torch=SMALL), sparing, LINK)
    said = check(found, "gpu memory")
    assert found.is_able and said.verdict == "warn" and "trainer.model.lora is set" in said.found
    assert not diagnose(machine(torch=Torch("2.13", "vector")), sparing, LINK).is_able, "without any GPU"


def test_a_machine_without_prime_rl_is_refused_in_a_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = diagnose(machine(), prime_task(), LINK)
    assert not found.is_able and check(found, "prime-rl").found.startswith("prime_rl.command (rl) isn't on the PATH")
    refusal = str(found.refusal())
    assert "thank you all the same: prime-rl: " in refusal and "install PRIME-RL" in refusal and "\n" not in refusal


def test_gpu_memory_is_known_beforehand_unless_the_recipe_spares_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "named_shapes", lambda name: SHAPES)
    recipe = prime_task().recipe
    assert gpu_bytes_beforehand(recipe) == gpu_bytes(recipe, NUMEL) > 0 == gpu_bytes_beforehand(run_recipe())
    with pytest.raises(ModelError, match=r"trainer.model.lora is set"):
        gpu_bytes_beforehand(prime_task(trainer={"model": {"lora": {"rank": 8}}}).recipe)


def test_half_of_the_cores_train_a_model_that_is_worth_it() -> None:
    def threads(cores: int, width: int = 100_000) -> int:
        shapes = [("model.embed_tokens.weight", (width, 64)), ("model.layers.0.w", (64, 64))]
        found = diagnose(machine(cores=cores), task(shapes=shapes), LINK).recipe
        assert isinstance(found, Recipe) and found.site.threads >= 1
        return found.site.threads

    assert (threads(8), threads(1), threads(8, width=1000)) == (4, 1, 1)


def test_the_diagnosis_is_there_for_people_and_for_programs() -> None:
    found = diagnose(machine(free_memory_bytes=0), task(), LINK)
    printed = list(lines(found))
    assert any(line.startswith("fail  memory") and "-> close other programs" in line for line in printed)
    told = json.loads(to_json(found))
    assert told["able"] is False and {each["name"] for each in told["checks"]} == {each.name for each in found.checks}
    assert told["traffic"]["join_bytes"] == JOIN_BYTES


def test_this_very_machine_is_seen() -> None:
    found = doctor.look()
    assert found.torch is not None, found.torch_problem
    assert len(found.torch.test_vector) == 64 and found.free_memory_bytes > 0 and found.cores >= 1
    assert diagnose(found).is_able


def test_a_broken_torch_is_a_line_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    torch, problem = doctor.ask_torch()
    assert torch is None and "libcudart.so.12" in problem
