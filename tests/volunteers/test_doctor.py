"""The doctor's verdicts: each number against its limit, with a remedy where there is something to do."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.errors import ModelError
from composer_prime.outer.forecast import FIRST_BYTES, TRAINED_BYTES
from composer_prime.outer.fragments import plan_fragments
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers import machine as machines
from composer_prime.volunteers.doctor import Check, Diagnosis, Task, diagnose, lines, to_json
from composer_prime.volunteers.link import Link
from composer_prime.volunteers.machine import Gpu, Torch
from composer_prime.volunteers.needs import gpu_bytes, gpu_bytes_beforehand, model_of, needs_of
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
JOIN_BYTES = round(TRAINED_BYTES * NUMEL)
BEGIN_BYTES = round(FIRST_BYTES * NUMEL)
"""The newest masters as they are stored, without momentum: what `plan` says too."""
LINK = Link(up_mbit=20.0, down_mbit=80.0, delay_s=0.03)


def task(**changes) -> Task:
    recipe = run_recipe()
    return Task(**({"recipe": recipe, "terms": terms_of(recipe), "shapes": SHAPES, "test_vector": "vector"} | changes))


def check(diagnosis: Diagnosis, name: str) -> Check:
    return next(each for each in diagnosis.checks if each.name == name)


def test_an_able_machine_passes_every_check() -> None:
    found = diagnose(machine(), task(), LINK, 0.4)
    assert found.is_able and {each.verdict for each in found.checks} == {"ok"}
    names = [each.name for each in found.checks]
    assert len(names) == len(set(names)) and {"python", "torch", "memory", "disk", "link", "clock"} <= set(names)


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"torch": None, "torch_problem": "No module named 'torch'"}, "torch", "No module named"),
        ({"free_memory_bytes": GIB}, "memory", "1.0 GiB of memory free"),
        ({"free_disk_bytes": GIB // 2}, "disk", "0.5 GiB free"),
        ({"torch": Torch("2.13", 5e10, "another")}, "arithmetic", "differs from the run's in its last bits"),
    ],
    ids=["torch", "memory", "disk", "arithmetic"],
)
def test_what_is_missing_fails_with_its_number_and_a_remedy(changes, name: str, said: str) -> None:
    found = diagnose(machine(**changes), task(), LINK, 0.0)
    assert not found.is_able
    failed = check(found, name)
    assert failed.verdict == "fail" and said in failed.found
    refusal = str(found.refusal())
    assert said in refusal and "\n" not in refusal and "can't take part, thank you" in refusal


def test_less_disk_than_needed_is_lent() -> None:
    found = check(diagnose(machine(), task(max_disk_bytes=GIB // 2), LINK, 0.0), "disk")
    assert found.verdict == "fail" and "0.5 GiB lent" in found.found and "--max-disk-gib" in found.remedy


def test_an_environment_that_is_not_installed_fails() -> None:
    data = run_recipe().to_data()
    data["orchestrator"]["train"]["source"][0]["env"]["taskset"]["id"] = "not-there-at-all"
    recipe = type(run_recipe()).model_validate(data)
    found = check(diagnose(machine(), task(recipe=recipe), LINK, 0.0), "environment")
    assert found.verdict == "fail" and "there is no module 'not_there_at_all'" in found.found


def test_a_model_whose_maker_is_not_installed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_makers(tmp_path, monkeypatch)
    found = diagnose(machine(), task(), LINK, 0.0)
    assert not found.is_able and check(found, "model").found == said_of(run_recipe().model.name)


def test_a_model_folder_that_only_the_host_has_fails(tmp_path: Path) -> None:
    recipe = run_recipe()
    model = recipe.model.model_copy(update={"name": str(tmp_path / "none")})
    found = check(diagnose(machine(), task(recipe=recipe.model_copy(update={"model": model})), LINK, 0.0), "model")
    assert found.verdict == "fail" and "a folder that isn't here" in found.found


def test_a_clock_that_is_off_is_only_warned_of() -> None:
    for ahead_s, way in ((3600.0, "ahead of"), (-3600.0, "behind")):
        found = diagnose(machine(), task(), LINK, ahead_s)
        assert found.is_able and check(found, "clock").verdict == "warn"
        assert f"3600 s {way} the bucket's" in check(found, "clock").found


@pytest.mark.parametrize(("delay_s", "verdict"), [(0.03, "ok"), (0.25, "ok"), (0.26, "warn")])
def test_a_bucket_that_is_far_away_is_warned_of(delay_s: float, verdict: str) -> None:
    found = diagnose(machine(), task(), Link(20.0, 80.0, delay_s), 0.0)
    link = check(found, "link")
    assert found.is_able and link.verdict == verdict and f"delay {1000 * delay_s:.0f} ms" in link.found
    assert ("far away" in link.remedy) == (verdict == "warn")


def test_the_link_tells_how_long_joining_takes() -> None:
    found = diagnose(machine(), task(), Link(1.0, 0.001, 0.5), 0.0)
    joining = check(found, "joining")
    said = f"{JOIN_BYTES / 1e6:.1f} MB in about {8 * JOIN_BYTES / 1000:.0f} s"
    assert joining.verdict == "warn" and said in joining.found
    begin = f"; training begins after {BEGIN_BYTES / 1e6:.1f} MB, about {8 * BEGIN_BYTES / 1000:.0f} s"
    assert joining.found.endswith(begin)
    assert "begins" not in check(diagnose(machine(), task(), Link(1.0, 1000.0, 0.5), 0.0), "joining").found
    unmeasured = diagnose(machine(), task(), Link(None, None, 0.5, "sending was not tried"), 0.0)
    assert "not measured" in check(unmeasured, "link").found and unmeasured.is_able


def test_a_capped_link_is_judged_by_what_the_site_may_use() -> None:
    wide = Link(1000.0, 1000.0, 0.03)
    capped = diagnose(machine(), task(), replace(wide, up_cap=0.5, down_cap=0.001), 0.0)
    said = check(capped, "link").found
    assert "up 1000.0 Mbit/s (capped at 0.5 Mbit/s), down 1000.0 Mbit/s (capped at 0.001 Mbit/s)" in said
    narrow = diagnose(machine(), task(), Link(0.5, 0.001, 0.03), 0.0)
    for name in ("joining", "a round"):
        assert check(capped, name) == check(narrow, name) != check(diagnose(machine(), task(), wide, 0.0), name)
    assert check(capped, "joining").verdict == "warn"
    loose = diagnose(machine(), task(), replace(wide, up_cap=5000.0, down_cap=5000.0), 0.0)
    assert check(loose, "a round") == check(diagnose(machine(), task(), wide, 0.0), "a round")
    unknown = diagnose(machine(), task(), Link(None, None, 0.03, "not tried", up_cap=2.0), 0.0)
    assert check(unknown, "link").found.startswith("up not measured (capped at 2 Mbit/s): not tried; down not measured")


SLOW = machine(torch=Torch("2.13", 1e5, "vector"))
"""So slow that a step takes minutes even of a model of these shapes."""


def paced(**outer) -> Task:
    recipe = run_recipe(**outer)
    return task(recipe=recipe, terms=terms_of(recipe))


def test_a_machine_too_slow_for_steps_that_all_share_is_warned_with_value_limit_and_remedy() -> None:
    found = diagnose(SLOW, paced(grace_s=30.0), LINK, 0.0)
    said = check(found, "pace")
    assert found.is_able and said.verdict == "warn" and found.fit is not None and found.fit.step_s is not None
    assert f"2 inner steps between offers, about {2 * found.fit.step_s:.1f} s here" in said.found
    assert "wait at most 30 s (outer.grace_s)" in said.found and 'outer.pace = "seconds"' in said.remedy
    patient = diagnose(SLOW, paced(grace_s=2 * found.fit.step_s + 1), LINK, 0.0)
    assert check(patient, "pace").verdict == "ok" and not check(patient, "pace").remedy


def test_with_timed_turns_the_doctor_says_how_many_steps_this_machine_makes() -> None:
    quick = diagnose(machine(), paced(pace="seconds", inner_seconds=60.0), LINK, 0.0)
    assert quick.fit is not None and quick.fit.step_s is not None
    steps = round(30.0 / quick.fit.step_s)
    assert check(quick, "pace").found == f"at most {steps} inner steps between offers, which the run makes every 30 s"
    slow = check(diagnose(SLOW, paced(pace="seconds", inner_seconds=60.0), LINK, 0.0), "pace")
    assert slow.verdict == "ok" and slow.found.startswith("at most 1 inner step between offers")


def prime_task(**tables) -> Task:
    data = {"run": {"name": "r"}, "max_steps": 40, "model": {"name": "org/model"}, "site": {"backend": "prime-rl"},
            "outer": {"inner_steps": 4, "grace_s": 12}, "prime_rl": {"version": "0.8.0"}}  # fmt: skip
    recipe = PrimeRecipe.model_validate(data | tables)
    return task(recipe=recipe, terms=terms_of(recipe))


@pytest.mark.usefixtures("prime_rl")
def test_the_doctor_says_that_the_pace_of_a_prime_rl_site_is_not_known_beforehand() -> None:
    said = check(diagnose(machine(), prime_task(), LINK, 0.0), "pace")
    assert said.verdict == "warn" and "isn't known before it trains" in said.found
    assert "waited for 12 s (outer.grace_s) at most" in said.remedy
    timed = check(diagnose(machine(), prime_task(outer=TIMED), LINK, 0.0), "pace")
    assert timed.verdict == "ok" and "as many as there is time for" in timed.found


TIMED = {"inner_steps": 4, "pace": "seconds", "inner_seconds": 60}
SMALL = Torch("2.13", 5e10, "vector", (Gpu("card", 2**10), Gpu("card", 2**10)))


@pytest.mark.parametrize(
    ("torch", "name", "said"),
    [
        (Torch("2.13", 5e10, "vector"), "gpu memory", "0.0 GiB needed, and torch sees no GPU here"),
        (SMALL, "gpus", f"this machine's 2 GPUs have 0.0 GiB each at the least, and a model of {NUMEL:,} parameters"),
    ],
    ids=["no GPU", "too small"],
)
def test_a_prime_rl_site_needs_gpus(prime_rl: Path, torch: Torch, name: str, said: str) -> None:
    able = diagnose(machine(), prime_task(), LINK, 0.0)
    assert able.is_able and check(able, "gpu memory").verdict == "ok"
    assert check(able, "prime-rl").found == f"0.8.0, started by {prime_rl}"
    without = diagnose(machine(torch=torch), prime_task(), LINK, 0.0)
    failed = check(without, name)
    assert failed.verdict == "fail" and failed.found.startswith(said)
    refusal = str(without.refusal())
    assert f"can't take part, thank you all the same: {name}: " in refusal and "join from a" in refusal


@pytest.mark.usefixtures("prime_rl")
def test_the_doctor_says_how_a_machines_gpus_are_shared_out() -> None:
    tables = {"inference": {}, "deployment": {"num_train_gpus": 4, "num_infer_gpus": 4}}
    pod = machine(torch=Torch("2.13", 5e10, "vector", (Gpu("card", 24 * GIB),) * 2))
    found = diagnose(pod, prime_task(**tables), LINK, 0.0)
    said = "\n".join(lines(found))
    assert found.is_able and "GPUs: 1 to train, 1 to generate, of 2 here" in said
    assert "orchestrator.batch_size 32, not 128: 25% of the recipe's GPUs" in said


@pytest.mark.usefixtures("prime_rl")
def test_gpu_memory_that_a_recipe_spares_refuses_nobody() -> None:
    sparing = prime_task(trainer={"model": {"lora": {"rank": 8}}})
    found = diagnose(machine(torch=SMALL), sparing, LINK, 0.0)
    said = check(found, "gpu memory")
    assert found.is_able and said.verdict == "warn" and "trainer.model.lora is set" in said.found
    assert not diagnose(machine(torch=Torch("2.13", 5e10, "vector")), sparing, LINK, 0.0).is_able, "without any GPU"


def test_a_machine_without_prime_rl_is_refused_in_a_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = diagnose(machine(), prime_task(), LINK, 0.0)
    assert not found.is_able and check(found, "prime-rl").found.startswith("prime_rl.command (rl) isn't on the PATH")
    refusal = str(found.refusal())
    assert "thank you all the same: prime-rl: " in refusal and "install PRIME-RL" in refusal and "\n" not in refusal


def test_gpu_memory_is_known_beforehand_unless_the_recipe_spares_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_prime.sites.embedded.shapes.named_shapes", lambda name: SHAPES)
    data = {"run": {"name": "r"}, "max_steps": 40, "model": {"name": "org/model"}, "site": {"backend": "prime-rl"}}
    recipe = PrimeRecipe.model_validate(data)
    assert gpu_bytes_beforehand(recipe) == gpu_bytes(recipe, NUMEL) > 0 == gpu_bytes_beforehand(run_recipe())
    sparing = PrimeRecipe.model_validate({**data, "trainer": {"model": {"lora": {"rank": 8}}}})
    with pytest.raises(ModelError, match=r"trainer.model.lora is set"):
        gpu_bytes_beforehand(sparing)


def test_needs_follow_from_the_shapes() -> None:
    recipe = run_recipe()
    needs = needs_of(recipe, terms_of(recipe), SHAPES, 3)
    assert needs.join_bytes == JOIN_BYTES and needs.begin_bytes == BEGIN_BYTES
    assert needs.up_bytes >= 4 * NUMEL and needs.down_bytes >= 2 * 4 * NUMEL, "fp32, two others"
    model = model_of(SHAPES)
    assert model.numel == sum(fragment.numel for fragment in plan_fragments(SHAPES, 2)) == NUMEL
    assert (model.vocabulary, model.width, model.cache_bytes) == (1000, 64 + 32 + 128, 2 * 4 * 32)


def test_the_diagnosis_is_there_for_people_and_for_programs() -> None:
    found = diagnose(machine(free_disk_bytes=0), task(), LINK, 0.0)
    printed = list(lines(found))
    assert any(line.startswith("fail  disk") and "-> free some space" in line for line in printed)
    told = json.loads(to_json(found))
    assert told["able"] is False and {each["name"] for each in told["checks"]} == {each.name for each in found.checks}
    assert told["needs"]["join_bytes"] == JOIN_BYTES


def test_this_very_machine_is_seen(tmp_path: Path) -> None:
    found = machines.look(tmp_path / "not" / "there")
    assert found.torch is not None, found.torch_problem
    assert found.torch.flops > 1e8 and len(found.torch.test_vector) == 64
    assert 0 < found.free_memory_bytes <= found.memory_bytes and found.cores >= 1 and found.free_disk_bytes > 0
    assert not (tmp_path / "not").exists()
    assert diagnose(found, None, None, None).is_able


def test_a_broken_torch_is_a_line_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    torch, problem = machines.ask_torch()
    assert torch is None and "libcudart.so.12" in problem
