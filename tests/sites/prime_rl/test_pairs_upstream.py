"""Stored pairs through upstream's own code, from its dispatcher to the loss: what is learned is DPO, or SimPO.

    export PRIME_RL_SRC=<checkout> PYTHONPATH=envs/composer_prime_pairs
    python -m pytest -m prime_rl tests/sites/prime_rl/test_pairs_upstream.py

in an environment that can import PRIME-RL (Python 3.12, see `make test-prime-rl`). The environment's server is
verifiers' own, over a socket; the models that score are served on loopback.
"""

import asyncio
import importlib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig, create_renderer
from torch import Tensor
from transformers import AutoModelForCausalLM
from verifiers.v1.graph import MessageNode
from verifiers.v1.serve.server import EnvServer

from composer_prime.traces.pairs.encoding import Action, Encoder
from tests.architecture import REPOSITORY
from tests.sites.prime_rl.scoring import Told, pairs, serve, token_logprobs, write
from tests.sites.tiny_folder import save_random_tiny
from tiny_policy.qwen3 import tiny_tokenizer

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
    pytest.mark.skipif(
        "loss_weights" not in MessageNode.model_fields,
        reason="this verifiers has no loss_weights: pairs need PRIME-RL 0.8.1.dev52 or newer",
    ),
    pytest.mark.filterwarnings("default"),  # upstream's imports warn
]
NUM_PAIRS, SEQ_LEN = 6, 2048
ALONE = {"sft_tau": 0.0, "min_logprob": -1e9}
"""The preference term alone, also of what a random policy can't form."""
SETTINGS = {"dpo": {"beta": 0.7, "tau": 3.0}, "simpo": {"beta": 2.0, "gamma": 0.3}}
RENDERER = Qwen3RendererConfig(enable_thinking=False)
LOSSES = {
    "default": {},
    "ipo": {},
    "custom": {"import_path": "composer_prime.losses.composer.composer_loss"},
}


@dataclass
class Setting:
    """A policy and its reference, served and at hand, a file of pairs, and the checkout on the path."""

    folder: Path
    policy: Any
    reference: Any
    policy_url: str
    reference_url: str
    files: dict[str, str]
    pairs: list[Told]

    def actions(self) -> list[tuple[Action, Action]]:
        """The pairs in the policy's tokens."""
        encoder = Encoder(create_renderer(tiny_tokenizer(), RENDERER), SEQ_LEN)
        found = [(encoder.encode(p.messages, p.tools, p.chosen), encoder.encode(p.messages, p.tools, p.rejected))
                 for p in self.pairs]  # fmt: skip
        assert all(one and other for one, other in found)
        return found  # pyright: ignore[reportReturnType]


def upstream(name: str) -> Any:
    return importlib.import_module(f"prime_rl.{name}")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    root = Path(os.environ["PRIME_RL_SRC"])
    folder = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for part in ("src", "packages/prime-rl-configs/src"):
            patch.syspath_prepend(str(root / part))
        folders = [save_random_tiny(folder / name, seed=seed) for seed, name in enumerate(("policy", "reference"))]
        models = [AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in folders]
        urls = [serve(stack, model) for model in models]
        made = pairs(NUM_PAIRS)
        yield Setting(folders[0], models[0], models[1], urls[0], urls[1], write(folder / "pairs", made), made)


def source(setting: Setting, loss: str, **settings: Any) -> Any:
    """The table of a source of pairs, as upstream reads it."""
    env: dict[str, Any] = {
        "taskset": {"id": "composer-prime-pairs", **setting.files},
        "seq_len": SEQ_LEN,
        "pairs": {"loss": loss, "max_lead": 1e6, **ALONE, **SETTINGS[loss], **settings},
    }
    if loss == "dpo":
        env["reference"] = {"base_url": setting.reference_url}
    table = {"name": "pairs", "group_size": 1, "algo": {"type": "grpo"}, "env": env}
    return upstream("configs.orchestrator").TrainSourceConfig.model_validate(table)


async def batch_of(setting: Setting, table: Any, num_traces: int, *, num_pairs: int = NUM_PAIRS) -> list[Any]:
    """The samples of upstream's training batch of so many traces, by its own dispatcher and sink."""
    names = ("envs", "dispatcher", "train_source", "train_sink", "types")
    of = SimpleNamespace(**{name: upstream(f"orchestrator.{name}") for name in names})
    pool = upstream("utils.client").InferencePool(
        upstream("configs.shared").ClientConfig(base_url=f"{setting.policy_url}/v1"),
        model_name=str(setting.folder),
        train_client_type="renderer",
        renderer_config=RENDERER,
    )
    server = EnvServer(config=table.env, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    envs = of.envs.TrainEnvs([table], {("train", "pairs"): server.address}, policy_pool=pool)
    try:
        await envs.start()
        tasks, progress = of.train_source.TrainSource(envs), of.types.Progress()
        dispatcher = of.dispatcher.Dispatcher(
            train_envs=envs,
            eval_envs=None,
            train_source=tasks,
            eval_source=None,
            policy_pool=pool,
            policy=of.types.Policy(version=0, model_name="policy"),
            progress=progress,
            initial_max_inflight=num_pairs,
            max_inflight_ceiling=None,
            tasks_per_minute=None,
            max_off_policy_steps=4,
            run_id="run",
            run_name=None,
        )
        train = SimpleNamespace(filter_zero_advantages=True)
        sink = of.train_sink.TrainSink(
            SimpleNamespace(train=train, max_off_policy_steps=4, seq_len=SEQ_LEN),
            tokenizer=None,
            train_envs=envs,
            mm_token_type_ids_mapping=None,
            progress=progress,
            batch_size=num_traces,
            token_batch_size=None,
            on_result=tasks.on_result,
        )
        for _ in range(num_pairs):
            assert await dispatcher.try_schedule("train")
        for task in await gathered(list(dispatcher.inflight)):
            await dispatcher.handle_completed_episode(task)
        batches = [await sink.add(dispatcher.out_q.get_nowait()) for _ in range(num_pairs)]
        (batch,) = [one for one in batches if one is not None]
        assert not sink.pending_batch
        return batch.samples
    finally:
        await envs.get("pairs").env_client.close()
        serving.cancel()
        await serving
        await pool.stop()


async def gathered(tasks: list[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    await asyncio.wait(tasks)
    return tasks


def trained(setting: Setting, samples: Sequence[Any], loss: str) -> list[Tensor]:
    """The gradient of one step of upstream's trainer: packed, scaled and summed by its own code."""
    of_loss, configs = upstream("trainer.rl.loss"), upstream("configs.trainer")
    kind = {"default": "DefaultLossConfig", "ipo": "IPOLossConfig", "custom": "CustomLossConfig"}[loss]
    function = of_loss.setup_rl_loss_fn(getattr(configs, kind)(**LOSSES[loss]))
    (batches,) = upstream("trainer.batch").prepare_batch(list(samples), SEQ_LEN, 1, lambda lengths: sum(lengths))
    rl_scale, ce_scale = (max(sum(counts), 1) for counts in zip(*map(scales, batches), strict=True))
    total = torch.zeros(())
    for batch in batches:
        parts = {
            name: torch.tensor(values).split(batch.sequence_lengths)
            for name in ("inference_logprobs", "advantages", "loss_mask", "rl_weights", "ce_weights")
            if (values := getattr(batch, name)) is not None
        }
        ids = torch.tensor(batch.input_ids).split(batch.sequence_lengths)
        first = torch.zeros(1)  # of a sequence's first token, which nobody is asked for
        of_policy = [torch.cat([first, token_logprobs(setting.policy, one.tolist())]) for one in ids]
        streams = {name: parts.get(name) for name in ("rl_weights", "ce_weights")}
        part, _ = of_loss.compute_loss(
            trainer_logprobs=of_policy,
            inference_logprobs=parts["inference_logprobs"],
            ref_logprobs=None,
            advantages=parts["advantages"],
            loss_mask=parts["loss_mask"],
            **streams,
            ref_kl_weights=None,
            rl_loss_fn=function,
            rl_scale=rl_scale,
            ce_scale=ce_scale,
            ref_kl_scale=1,
        )
        total = total + part
    return list(torch.autograd.grad(total, list(setting.policy.parameters())))


def scales(batch: Any) -> tuple[int, int]:
    """Tokens of the RL component and of the cross entropy, as upstream's trainer counts them."""
    rl = batch.rl_weights or [1.0] * len(batch.loss_mask)
    num_rl = sum(mask and weight != 0 for mask, weight in zip(batch.loss_mask, rl, strict=True))
    return num_rl, sum(weight != 0 for weight in batch.ce_weights or ())


def total_logprob(model: Any, action: Action) -> Tensor:
    """Of an action's own tokens: fp32 each, summed in fp64, since a hundred of them round off by 1e-5 nats in fp32."""
    return token_logprobs(model, action.token_ids)[torch.tensor(action.mask[1:])].double().sum()


def preference_loss(setting: Setting, loss: str) -> Tensor:
    """The papers' losses, over the tokens of all actions."""
    table, total = SETTINGS[loss], torch.zeros((), dtype=torch.float64)
    for pair, actions in zip(setting.pairs, setting.actions(), strict=True):
        chosen, rejected = (total_logprob(setting.policy, one) for one in actions)
        if loss == "dpo":
            first, second = (total_logprob(setting.reference, one).detach() for one in actions)
            margin = table["beta"] * ((chosen - first) - (rejected - second))
        else:
            lengths = [one.num_tokens for one in actions]
            margin = table["beta"] * (chosen / lengths[0] - rejected / lengths[1]) - table["gamma"]
        total = total - table.get("tau", 1.0) * pair.weight * torch.nn.functional.logsigmoid(margin)
    return total / sum(one.num_tokens for actions in setting.actions() for one in actions)


def apart(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """How far the worst parameter's gradient is off, in its norm."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("trainers", LOSSES)
@pytest.mark.parametrize("loss", SETTINGS)
def test_upstreams_step_on_pairs_has_the_preference_losss_gradient(setting: Setting, loss: str, trainers: str) -> None:
    samples = asyncio.run(batch_of(setting, source(setting, loss), 2 * NUM_PAIRS))
    assert len(samples) == 2 * NUM_PAIRS
    wanted = torch.autograd.grad(preference_loss(setting, loss), list(setting.policy.parameters()))
    assert apart(trained(setting, samples, trainers), wanted) < 1e-6


def test_the_chosen_actions_cross_entropy_is_upstreams_own(setting: Setting) -> None:
    samples = asyncio.run(batch_of(setting, source(setting, "simpo", sft_tau=0.5), 2 * NUM_PAIRS))
    chosen = [one for one, _ in setting.actions()]
    imitation = -sum(
        0.5 * pair.weight * total_logprob(setting.policy, one) for pair, one in zip(setting.pairs, chosen, strict=True)
    )
    loss = preference_loss(setting, "simpo") + imitation / sum(one.num_tokens for one in chosen)
    wanted = torch.autograd.grad(loss, list(setting.policy.parameters()))
    assert apart(trained(setting, samples, "default"), wanted) < 1e-6


def leads(setting: Setting) -> list[float]:
    with torch.no_grad():
        both = [[float(total_logprob(setting.policy, one)) for one in actions] for actions in setting.actions()]
    return [chosen - rejected for chosen, rejected in both]


@pytest.mark.parametrize("sft_tau", [0.0, 0.5])
def test_a_pair_that_rests_leaves_its_place_in_upstreams_batch_to_others(setting: Setting, sft_tau: float) -> None:
    top = sorted(leads(setting))[-2]
    assert top > 0
    num_learning = NUM_PAIRS - 2
    num_traces = 2 * num_learning + (2 if sft_tau else 0)
    table = source(setting, "simpo", sft_tau=sft_tau, max_lead=top - 1e-3)
    samples = asyncio.run(batch_of(setting, table, num_traces))
    assert len(samples) == num_traces
    resting = [actions for actions, lead in zip(setting.actions(), leads(setting), strict=True) if lead >= top - 1e-3]
    by_tokens = {tuple(sample.token_ids): sample for sample in samples}
    for chosen, rejected in resting:
        assert tuple(rejected.token_ids) not in by_tokens
        kept = by_tokens.get(tuple(chosen.token_ids))
        assert (kept is not None) == bool(sft_tau)
        assert kept is None or not any(kept.rl_weights)  # it is only imitated


def test_the_table_in_the_docs_is_read_by_upstreams_config(setting: Setting) -> None:
    text = (REPOSITORY / "docs/pairs.md").read_text()
    (block,) = [found for found in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "composer-prime-pairs" in found]
    (table,) = tomllib.loads(block)["orchestrator"]["train"]["source"]
    table["env"]["taskset"] |= setting.files
    read = upstream("configs.orchestrator").TrainSourceConfig.model_validate(table)
    assert type(read.env).__name__ == "PairsEnvConfig" and read.group_size == 1
    assert read.env.pairs.loss == "dpo" and read.env.reference is not None
    assert isinstance(read.env.taskset, vf.TasksetConfig)
