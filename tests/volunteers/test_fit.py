"""What is fitted to a machine, and what is never touched."""

import pytest

from composer_prime.config import Recipe
from composer_prime.config.teachers import HintsConfig
from composer_prime.errors import MachineUnfit
from composer_prime.sites.embedded.inference import decoder
from composer_prime.sync.terms import Terms, terms_of
from composer_prime.volunteers.fit import fit
from composer_prime.volunteers.machine import Torch
from composer_prime.volunteers.needs import SCORE_TOKENS, Model, memory_bytes
from tests.volunteers.owned_run import GIB, machine, run_recipe

SMALL = Model(numel=500_000, width=4_000, vocabulary=600, cache_bytes=4_096)
LARGE = Model(numel=500_000_000, width=250_000, vocabulary=150_000, cache_bytes=100_000)


def terms(recipe: Recipe) -> Terms:
    return terms_of(recipe)


def test_a_machine_with_room_trains_the_recipe_as_it_is() -> None:
    recipe = run_recipe()
    found = fit(recipe, terms(recipe), SMALL, machine())
    assert found.recipe == recipe and found.memory_bytes < 4 * GIB


def test_half_of_the_cores_train_a_model_that_is_worth_it() -> None:
    recipe = run_recipe()
    free = machine(cores=8, free_memory_bytes=200 * GIB)
    assert fit(recipe, terms(recipe), LARGE, free).recipe.site.threads == 4
    assert fit(recipe, terms(recipe), SMALL, free).recipe.site.threads == 1
    assert fit(recipe, terms(recipe), LARGE, machine(cores=1, free_memory_bytes=200 * GIB)).recipe.site.threads == 1


@pytest.mark.parametrize("share", [0.99, 0.9, 0.82])
def test_a_machine_with_less_memory_takes_less_at_once_and_stays_below_it(share: float) -> None:
    recipe = run_recipe()
    wanted = memory_bytes(recipe, terms(recipe), LARGE)
    small = machine(free_memory_bytes=int(share * wanted / 0.85))
    found = fit(recipe, terms(recipe), LARGE, small)
    site, inference = found.recipe.site, found.recipe.inference
    assert found.memory_bytes <= 0.85 * small.free_memory_bytes
    assert (site.micro_batch_tokens, inference.max_batch_size) < (1536, 64)
    assert site.micro_batch_tokens >= recipe.seq_len, "a sample may be so long"
    assert any("GiB of memory are free" in reason for reason in found.reasons)


def test_a_machine_without_the_memory_is_refused_with_the_numbers() -> None:
    recipe = run_recipe()
    with pytest.raises(MachineUnfit, match=r"has 2\.0 GiB of memory free, of which a site may take 1\.7.*500,000,000"):
        fit(recipe, terms(recipe), LARGE, machine(free_memory_bytes=2 * GIB))


def test_a_slow_machine_takes_fewer_rollouts_where_turns_are_timed() -> None:
    recipe = run_recipe(pace="seconds", inner_seconds=60.0)
    slow = machine(torch=Torch("2", 2e9, "vector"), free_memory_bytes=200 * GIB, cores=2)
    model = Model(numel=4_000_000, width=20_000, vocabulary=600, cache_bytes=4_096)
    found = fit(recipe, terms(recipe), model, slow)
    fitted = found.recipe.orchestrator.batch_size
    assert 8 <= fitted < 64 and fitted % recipe.orchestrator.group_size == 0
    assert found.step_s is not None and found.step_s <= 15.0
    assert found.recipe.inference.max_batch_size == fitted
    assert any("orchestrator.batch_size" in reason and "not 64" in reason for reason in found.reasons)
    assert fit(recipe, terms(recipe), model, slow, keep_batch=True).recipe.orchestrator.batch_size == 64


def test_a_slow_machine_takes_fewer_rollouts_where_the_others_would_not_wait_for_its_steps() -> None:
    recipe = run_recipe()
    shared = terms(recipe).model_copy(update={"grace_s": 60.0})
    slow = machine(torch=Torch("2", 2e9, "vector"), free_memory_bytes=200 * GIB, cores=2)
    model = Model(numel=4_000_000, width=20_000, vocabulary=600, cache_bytes=4_096)
    whole = fit(recipe, shared, model, slow, keep_batch=True)
    assert whole.recipe.orchestrator.batch_size == 64
    assert whole.step_s is not None and whole.step_s * shared.steps_per_turn > 60.0
    found = fit(recipe, shared, model, slow)
    fitted = found.recipe.orchestrator.batch_size
    assert 8 <= fitted < 64 and fitted % recipe.orchestrator.group_size == 0
    assert found.step_s is not None and found.step_s * shared.steps_per_turn <= 60.0
    assert any("who is behind is waited for 60 s" in reason for reason in found.reasons)
    hopeless = shared.model_copy(update={"grace_s": 0.001})
    assert fit(recipe, hopeless, model, slow).recipe.orchestrator.batch_size == recipe.orchestrator.group_size
    patient = shared.model_copy(update={"grace_s": 1e6})
    assert fit(recipe, patient, model, slow).recipe.orchestrator.batch_size == 64


def test_what_all_sites_share_is_never_touched() -> None:
    recipe = run_recipe(pace="seconds", inner_seconds=60.0)
    slow = machine(torch=Torch("2", 1e8, "vector"), free_memory_bytes=int(6 * GIB), cores=2)
    model = Model(numel=60_000_000, width=60_000, vocabulary=30_000, cache_bytes=20_000)
    fitted = fit(recipe, terms(recipe), model, slow).recipe
    assert fitted != recipe and terms_of(fitted) == terms_of(recipe)
    for name in ("model", "trainer", "seq_len", "max_steps", "run"):
        assert getattr(fitted, name) == getattr(recipe, name)


@pytest.mark.parametrize(
    ("hints", "num_copies", "scores"),
    [
        (HintsConfig(), 1, True),
        (HintsConfig(teacher="ema"), 2, True),
        (HintsConfig(teacher="live", allow_live=True), 0, True),
        (HintsConfig(base_url="https://teacher.example.org"), 0, False),
    ],
    ids=["frozen", "ema", "live", "elsewhere"],
)
@pytest.mark.parametrize("seq_len", [512, 4096])
def test_hints_second_model_an_average_and_the_logits_count_where_the_sites_own_server_is_asked(
    hints: HintsConfig, num_copies: int, scores: bool, seq_len: int
) -> None:
    plain = run_recipe().model_copy(update={"seq_len": seq_len})
    hinted = plain.model_copy(update={"hints": hints})
    logits = 2 * 4 * max(decoder.SCORE_TOKENS, seq_len) * LARGE.vocabulary if scores else 0
    more = memory_bytes(hinted, terms(plain), LARGE) - memory_bytes(plain, terms(plain), LARGE)
    assert more == num_copies * 4 * LARGE.numel + logits
    assert SCORE_TOKENS == decoder.SCORE_TOKENS
