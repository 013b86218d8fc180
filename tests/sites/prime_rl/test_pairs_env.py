"""The environment of stored pairs under verifiers' own server, and what it refuses."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import verifiers.v1 as vf
from pydantic import ValidationError
from renderers import Qwen3RendererConfig
from transformers import AutoModelForCausalLM
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.serve.server import EnvServer

from composer_prime.errors import BadInput, ConfigError
from composer_prime.losses.preferences import Scored, pull
from composer_prime.sites.prime_rl.pairs_env import PairsEnvConfig, PairsTaskset, PairsTasksetConfig
from composer_prime.sites.prime_rl.toml import SiteFiles, render
from tests.servers.fake_teacher import FakeTeacher, serving_teacher
from tests.sites.prime_rl.recipes import minimal, prime_recipe
from tests.sites.prime_rl.scoring import ScoringTeacher, pairs, serve, token_logprobs, write
from tests.sites.tiny_folder import save_random_tiny

RENDERER = Qwen3RendererConfig(enable_thinking=False)


class Models:
    """A policy and a reference with random weights, at hand and served."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.folder = save_random_tiny(root / "policy")
        folders = self.folder, save_random_tiny(root / "reference", seed=1)
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in folders
        )
        self.policy_url, self.reference_url = (serve(stack, one) for one in (self.policy, self.reference))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with ExitStack() as stack:
        yield Models(tmp_path_factory.mktemp("models"), stack)


ALONE = {"sft_tau": 0.0, "min_logprob": -1e9}
"""The preference term alone, also of what a random policy can't form."""


def env_config(files: Mapping[str, str], **tables: Any) -> PairsEnvConfig:
    taskset = {"id": "composer-prime-pairs", **files}
    tables["pairs"] = ALONE | tables.get("pairs", {"loss": "simpo"})
    return PairsEnvConfig.model_validate({"taskset": taskset, "seq_len": 2048, **tables})


async def served(
    config: PairsEnvConfig,
    models: Models,
    *,
    url: str = "",
    template: Mapping[str, Any] | None = None,
    is_training: bool = True,
    times: int = 1,
    **sampling: Any,
) -> WireEpisode:
    """The first pair's last episode, asked for as PRIME-RL's orchestrator does. Raises RuntimeError with a refusal."""
    server = EnvServer(config=config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(address=server.address)
    endpoint = vf.TrainClientConfig.model_validate(
        {
            "base_url": f"{url or models.policy_url}/v1",
            "api_key_var": "UNSET",
            "renderer": RENDERER if template is None else Qwen3RendererConfig(),
            "renderer_model_name": str(models.folder),
        }
    )
    if not is_training:
        endpoint = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="UNSET")
    (task, *_) = server.env.taskset.load()
    extra = {} if template is None else {"extra_body": {"chat_template_kwargs": template}}
    wanted = vf.SamplingConfig.model_validate({"temperature": 1.0, **extra, **sampling})
    try:
        asked = {"task_data": task.data.model_dump(mode="json"), "client": endpoint, "model": "policy"}
        return [await client.run(**asked, sampling=wanted) for _ in range(times)][-1]
    finally:
        await client.close()
        serving.cancel()
        await serving


def totals(episode: WireEpisode, model: Any) -> list[float]:
    """Logprobs of the two actions under a model."""
    found = []
    for trace in episode.traces:
        (node,) = trace.nodes
        with torch.no_grad():
            told = token_logprobs(model, list(node.token_ids))
        found.append(float(told[torch.tensor(list(node.mask[1:]))].double().sum()))
    return found


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_a_pair_comes_back_as_two_traces_with_opposite_rewards(tmp_path: Path, models: Models, loss: str) -> None:
    (pair,) = made = pairs(1)
    reference = {"reference": {"base_url": f"{models.reference_url}/v1"}} if loss == "dpo" else {}
    config = env_config(
        write(tmp_path / "pairs", made), pairs={"loss": loss, "sft_tau": 0.25, "max_lead": 1e6}, **reference
    )
    episode = asyncio.run(served(config, models))
    chosen, rejected = episode.traces
    assert episode.ok and [trace.num_turns for trace in (chosen, rejected)] == [1, 1]
    assert [json.loads(trace.last_reply) for trace in (chosen, rejected)] == [pair.chosen, pair.rejected]
    own = totals(episode, models.policy)
    lengths = [sum(trace.nodes[0].mask) for trace in (chosen, rejected)]
    references = totals(episode, models.reference) if loss == "dpo" else [0.0, 0.0]
    scored = [Scored(*each) for each in zip(own, lengths, references, strict=True)]
    expected = pair.weight * pull(loss, *scored, beta=0.1 if loss == "dpo" else 2.0)  # pyright: ignore[reportArgumentType]
    assert expected > 0
    assert [chosen.reward, rejected.reward] == pytest.approx([expected, -expected], rel=1e-6)
    for trace, total in zip((chosen, rejected), own, strict=True):
        assert sum(trace.nodes[0].logprobs) == pytest.approx(total, rel=1e-6)
    weights = [trace.nodes[0].loss_weights or {} for trace in (chosen, rejected)]
    assert ["ce" in one for one in weights] == [True, False]
    assert sum(weights[0]["ce"]) == pytest.approx(0.25 * pair.weight * lengths[0])
    assert [round(float(sum(one["rl"])), 6) for one in weights if "rl" in one] == ([] if loss == "dpo" else [1.0, 1.0])


def test_a_files_pairs_are_mixed_once_and_each_comes_once(tmp_path: Path) -> None:
    made = pairs(12)
    config = PairsTasksetConfig.model_validate({"id": "composer-prime-pairs", **write(tmp_path / "pairs", made)})
    orders = [[json.loads(task.data.lesson)["messages"] for task in PairsTaskset(config).load()] for _ in range(2)]
    assert orders[0] == orders[1] != [pair.messages for pair in made]
    assert sorted(map(str, orders[0])) == sorted(str(pair.messages) for pair in made)


def test_files_that_cant_be_learned_from_are_refused_in_one_line(tmp_path: Path) -> None:
    files = write(tmp_path / "pairs", pairs(1))
    absent = tmp_path / "absent"
    with pytest.raises(ValidationError, match=rf"env.taskset: {absent} can't be read.*replay pairs"):
        env_config({**files, "file": str(absent)})
    with pytest.raises(ValidationError, match=rf"env.taskset: {absent} is no store of traces"):
        env_config({**files, "store": str(absent)})
    none = write(tmp_path / "none", [])
    with pytest.raises(BadInput, match=r"pairs.jsonl has no action that teachers agree on: ask more teachers"):
        list(PairsTaskset(PairsTasksetConfig.model_validate({"id": "composer-prime-pairs", **none})).load())


def test_by_default_the_agreed_action_alone_comes_back_to_be_imitated(tmp_path: Path, models: Models) -> None:
    (pair,) = made = pairs(1)
    config = env_config(write(tmp_path / "pairs", made), pairs={"loss": "simpo", "sft_tau": 1.0, "min_logprob": -1.0})
    (chosen,) = asyncio.run(served(config, models)).traces
    node = chosen.nodes[0]
    assert json.loads(chosen.last_reply) == pair.chosen and chosen.reward == 0
    assert node.loss_weights is not None and sum(node.loss_weights["ce"]) == pytest.approx(pair.weight * sum(node.mask))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"pairs": {}}, 'env.reference.base_url must be given with env.pairs.loss = "dpo": serve the model'),
        ({"reference": {"base_url": "http://127.0.0.1:1"}}, 'env.reference is for env.pairs.loss = "dpo" with a tau'),
        (
            {"pairs": {"loss": "simpo", "tau": {"start": 1.0, "end": 0.0, "steps": 9}}},
            "env.pairs.tau must be one number",
        ),
        ({"seq_len": None}, "seq_len"),
    ],
)
def test_settings_that_cant_be_meant_are_refused(tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        env_config(write(tmp_path / "pairs", pairs(1)), **tables)


@pytest.mark.parametrize(
    ("tables", "temperature", "message"),
    [
        ({"seq_len": 40}, 1.0, r"a lesson of 1 messages doesn't fit env.seq_len \(40 tokens\): raise seq_len"),
        ({}, 0.7, r"sampling.temperature \(0.7\) of this source must be 1"),
    ],
)
def test_a_pair_that_cant_be_scored_as_it_is_trained_fails_in_one_line(
    tmp_path: Path, models: Models, tables: dict[str, Any], temperature: float, message: str
) -> None:
    config = env_config(write(tmp_path / "pairs", pairs(1)), **tables)
    with pytest.raises(RuntimeError, match=rf"^BadInput: {message}[^\n]*$"):
        asyncio.run(served(config, models, temperature=temperature))


def test_a_pair_is_written_by_the_template_that_the_source_sets(tmp_path: Path, models: Models) -> None:
    config = env_config(write(tmp_path / "pairs", pairs(1)))
    by_kwargs = asyncio.run(served(config, models, template={"enable_thinking": False}))
    by_renderer = asyncio.run(served(config, models))
    thinking = asyncio.run(served(config, models, template={}))
    found = [[trace.nodes[0] for trace in each.traces] for each in (by_kwargs, by_renderer, thinking)]
    sampled = [[(list(node.token_ids), list(node.mask)) for node in nodes] for nodes in found]
    assert sampled[0] == sampled[1] != sampled[2]  # with thinking the empty block is the policy's to write


@pytest.mark.parametrize("loss", ["simpo", "dpo"])
def test_a_server_that_never_answers_fails_the_episode_in_one_line(tmp_path: Path, models: Models, loss: str) -> None:
    held = threading.Event()
    with ExitStack() as stack:
        url = stack.enter_context(serving_teacher(FakeTeacher("policy", hold=held.wait)))
        stack.callback(held.set)
        reference = {"reference": {"base_url": url}} if loss == "dpo" else {}
        config = env_config(
            write(tmp_path / "pairs", pairs(1)), pairs={"loss": loss}, timeout={"episode": 1.0}, **reference
        )
        line = r"no scores within env.timeout.episode \(1 s\) of http[^\n]*: look whether it answers, or raise it"
        with pytest.raises(RuntimeError, match=rf"^TeacherError: {line}$"):
            asyncio.run(served(config, models, url=url if loss == "simpo" else ""))


def test_a_source_of_evaluation_is_refused(tmp_path: Path, models: Models) -> None:
    config = env_config(write(tmp_path / "pairs", pairs(1)))
    with pytest.raises(RuntimeError, match=r"^BadInput: pairs are for training sources, and this one's client is of"):
        asyncio.run(served(config, models, is_training=False))


def test_the_reference_which_doesnt_move_is_asked_once_for_a_pair(tmp_path: Path, models: Models) -> None:
    files, counts = write(tmp_path / "pairs", pairs(1)), []
    for times in (1, 3):
        teacher = ScoringTeacher(model="reference", scorer=models.reference)
        with serving_teacher(teacher) as url:
            asyncio.run(served(env_config(files, pairs={}, reference={"base_url": url}), models, times=times))
        counts.append(teacher.requests)
    assert counts[0] == counts[1]


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path, models: Models) -> None:
    with serving_teacher(FakeTeacher(decode=lambda text: text.upper())) as url:
        config = env_config(write(tmp_path / "pairs", pairs(1)), pairs={}, reference={"base_url": url})
        with pytest.raises(RuntimeError, match=r"^TeacherRefused: teacher reference has another tokenizer"):
            asyncio.run(served(config, models))


def recipe_of_pairs(**env: Any) -> dict[str, Any]:
    """A recipe of PRIME-RL sites with a source of pairs beside its rollouts."""
    recipe = minimal()
    taskset = {"id": "composer-prime-pairs", "store": "traces", "file": "pairs.jsonl"}
    table = {"name": "pairs", "group_size": 1, "env": {"taskset": taskset, "pairs": {"loss": "simpo"}, **env}}
    recipe["orchestrator"]["train"]["source"].append(table)
    return recipe


def test_a_recipes_pairs_are_told_how_long_a_sample_may_be() -> None:
    def sources(given: Mapping[str, Any] = MappingProxyType({}), **env: Any) -> list[dict[str, Any]]:
        recipe = recipe_of_pairs(**env)
        for name, value in given.items():
            recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
            if value is None:
                del recipe[name]
        data = render(prime_recipe(**recipe), "559b447", SiteFiles("b", Path("/runs/b")))
        return data["orchestrator"]["train"]["source"]

    assert [source["env"].get("seq_len") for source in sources()] == [None, 2048]
    assert sources(seq_len=1024)[1]["env"]["seq_len"] == 1024
    for given in ({}, {"seq_len": None, "trainer": {"model": {"seq_len": 2048}}, "orchestrator": {"seq_len": 2048}}):
        assert sources(given)[1]["env"]["seq_len"] == 2048
        with pytest.raises(ConfigError, match=r"source pairs: env.seq_len \(4096\) must be at most seq_len \(2048\)"):
            sources(given, seq_len=4096)
    assert sources(seq_len="4096")[1]["env"]["seq_len"] == "4096"  # upstream's to refuse


def test_router_replay_which_no_stored_pair_has_is_refused() -> None:
    recipe = recipe_of_pairs()
    recipe["trainer"] = {**recipe.get("trainer", {}), "enable_router_replay": True}
    with pytest.raises(ConfigError, match=r"trainer.enable_router_replay must be off with env.taskset.id = "):
        render(prime_recipe(**recipe), "559b447", SiteFiles("b", Path("/runs/b")))


def test_an_algorithm_that_would_change_a_pairs_advantages_is_refused() -> None:
    recipe = recipe_of_pairs()
    recipe["orchestrator"]["algo"] = {"type": "max_rl"}
    pairs_source = recipe["orchestrator"]["train"]["source"][1]
    with pytest.raises(ConfigError, match=r'source pairs: algo.type \("max_rl"\) must be "grpo" for pairs'):
        render(prime_recipe(**recipe), "559b447", SiteFiles("b", Path("/runs/b")))
    pairs_source["algo"] = {"type": "grpo"}
    render(prime_recipe(**recipe), "559b447", SiteFiles("b", Path("/runs/b")))


def test_a_version_that_has_no_place_for_pairs_refuses_them() -> None:
    with pytest.raises(ConfigError, match=r"0\.8\.0.*composer-prime-pairs.*drop the source"):
        render(prime_recipe(**recipe_of_pairs()), "0.8.0", SiteFiles("b", Path("/runs/b")))
