"""Held-out rewards: tasks that no site has, scored by the environment itself, of the very weights that were given."""

from pathlib import Path

import pytest
import torch

from composer_prime.ablate.held_out import final_weights, held_out_reward, held_out_sources
from composer_prime.config import recipe_from_data
from composer_prime.config.settings import settle_site
from composer_prime.errors import BadInput
from composer_prime.sites.embedded import model as models
from composer_prime.sites.embedded.broadcasts import weights
from composer_prime.store import open_store
from tests.config.recipes import recipe
from tests.servers.fake_teacher import FakeTeacher, serving_teacher
from tests.sites.tiny_folder import save_random_tiny
from tests.sync.harness import ThreadSite, make_net, make_terms, run_sites


def settings_of(task: str = "reverse-letters", count: int = 2, **taskset: object):
    source = {"name": "letters", "env": {"taskset": {"id": task, **taskset}}}
    made = recipe(
        orchestrator={"batch_size": 16, "train": {"source": [source], "sampling": {"max_completion_tokens": 8}}},
        sites={"count": count},
    )
    return settle_site(made, "a", inference_port=1, model_dir=Path("unused"), resume=False)


def test_held_out_tasks_are_those_of_shards_after_the_last_sites():
    (source,) = held_out_sources(settings_of(num_examples=100), 250)
    words = {str(task.data.prompt) for task in source.tasks}
    assert len(words) == 250
    for shard in (0, 1):
        site = settings_of(num_examples=100).model_copy(update={"data_shard": shard, "num_shards": 2})
        (shown,) = held_out_sources(site, 250)  # the shard of the caller's settings doesn't matter
        assert {str(task.data.prompt) for task in shown.tasks} == words


def test_tasks_of_one_prompt_that_differ_in_what_the_tools_know_are_different_tasks():
    (source,) = held_out_sources(settings_of("tool-letters"), 16)
    assert len({(task.data.box, task.data.letter, task.data.answer) for task in source.tasks}) == 16


def test_more_tasks_than_the_environment_has_left_are_refused_with_its_own_words():
    with pytest.raises(BadInput, match="must not exceed the 1296 words"):
        held_out_sources(settings_of(num_examples=256), 1000)


def test_tasks_that_a_site_has_too_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("composer_prime.ablate.held_out._on_shard", lambda settings, shard: settings)
    with pytest.raises(BadInput, match="100 of 100 tasks of environment 'letters' are also tasks of a site"):
        held_out_sources(settings_of(num_examples=100), 50)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    folder = save_random_tiny(tmp_path / "tiny")
    made = settings_of().recipe.model_copy(update={"model": recipe(model={"name": str(folder)}).model})
    with pytest.raises(BadInput, match="weights are not those of"):
        held_out_reward(made, {"strange": torch.zeros(2)}, prompts=4)


@pytest.mark.slow
def test_the_reward_is_that_of_the_weights_given(tmp_path: Path):
    folder = save_random_tiny(tmp_path / "tiny")
    made = settings_of().recipe.model_copy(update={"model": recipe(model={"name": str(folder)}).model})
    policy = models.load_policy(folder)
    assert held_out_reward(made, weights(policy), prompts=8, temperature=0.0) == 0.0  # at random: never right


@pytest.mark.slow
def test_neither_teachers_nor_hints_take_part_while_a_policy_is_judged(tmp_path: Path):
    folder, teacher = save_random_tiny(tmp_path / "tiny"), FakeTeacher()
    with serving_teacher(teacher) as url:
        made = settings_of().recipe.to_data() | {
            "model": {"name": str(folder)},
            "trainer": {"distill": {"top_k": 4}},
            "hints": {"base_url": url},
            "replay": {"teachers": [{"name": "big", "base_url": url}]},
        }
        policy = weights(models.load_policy(folder))
        assert held_out_reward(recipe_from_data(made), policy, prompts=2, temperature=0.0) == 0.0
    assert not teacher.requests


def test_final_weights_are_the_masters_on_which_all_sites_end(request: pytest.FixtureRequest):
    store = open_store(f"memory://{request.node.name}")
    with pytest.raises(BadInput, match="holds no run"):
        final_weights(store)
    sites = [ThreadSite(store, make_terms(), name, data_seed=index) for index, name in enumerate("ab")]
    run_sites(*sites)
    found = final_weights(store)
    assert found.keys() == dict(make_net().named_parameters()).keys()
    for name, parameter in sites[0].net.named_parameters():
        assert torch.equal(found[name], parameter.detach())


def test_a_run_that_goes_on_has_no_final_weights(request: pytest.FixtureRequest):
    store = open_store(f"memory://{request.node.name}")
    run_sites(ThreadSite(store, make_terms(), "a", stop_after=2))
    with pytest.raises(BadInput, match="let the run come to its end"):
        final_weights(store)
