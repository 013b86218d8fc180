"""Stamped traces through upstream's own code: trace_to_samples -> prepare_batch -> compute_loss, with our loss.

    PRIME_RL_SRC=<checkout> python -m pytest -m prime_rl tests/sites/prime_rl/test_stamps_upstream.py

in an environment that can import PRIME-RL (Python 3.12, see `make test-prime-rl`).
"""

import importlib
import math
import os
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace

from composer_prime.losses.composer import composer_loss
from composer_prime.losses.records import LossInputs
from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.pool import Score
from composer_prime.teachers.stamp import scoring_paths, stamp, stamp_candidates
from composer_prime.teachers.wire import Scores
from tests.architecture import REPOSITORY
from tests.traces.turns import node, trace

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
    pytest.mark.skipif(
        "reference_logprobs" not in MessageNode.model_fields,
        reason="this verifiers has no reference_logprobs: teacher streams need PRIME-RL 0.8.1.dev52 or newer",
    ),
    pytest.mark.filterwarnings("default"),  # upstream's imports warn
]
REPLAY_TAU = 0.3


class Upstream:
    """The modules of the checkout that stand between a finished trace and the loss."""

    def __init__(self) -> None:
        self.trajectories = _module("orchestrator.trajectories")
        self.routing = _module("orchestrator.algo.routing")
        self.batch = _module("trainer.batch")
        self.loss = _module("trainer.rl.loss")
        self.configs = _module("configs.trainer")
        self.orchestrator = _module("configs.orchestrator")

    def micro_batches(self, traces: list[WireTrace]) -> list[Any]:
        """The traces as one trainer gets them."""
        samples = []
        for one in traces:
            for sample in self.trajectories.trace_to_samples(one, env_name="letters"):
                sample.temperatures = [1.0] * len(sample.token_ids)
                samples.append(sample)
        (batches,) = self.batch.prepare_batch(samples, 64, 1, lambda lengths: sum(lengths))
        return batches

    def loss_of(self, micro_batch: Any, trainer_logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Upstream's loss of one micro batch, with ours as its rl component."""
        streams = {name: getattr(micro_batch, name) for name in ("rl_weights", "ce_weights", "ref_kl_weights")}
        function = self.loss.setup_rl_loss_fn(
            self.configs.CustomLossConfig(
                import_path="composer_prime.losses.composer.composer_loss", kwargs={"replay_tau": REPLAY_TAU}
            )
        )
        return self.loss.compute_loss(
            trainer_logprobs=[trainer_logprobs],
            inference_logprobs=[torch.tensor(micro_batch.inference_logprobs)],
            ref_logprobs=None if micro_batch.ref_logprobs is None else [torch.tensor(micro_batch.ref_logprobs)],
            advantages=[torch.tensor(micro_batch.advantages)],
            loss_mask=[torch.tensor(micro_batch.loss_mask)],
            **{name: None if values is None else [torch.tensor(values)] for name, values in streams.items()},
            rl_loss_fn=function,
            rl_scale=1,
            ce_scale=1,
            ref_kl_scale=1,
        )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"prime_rl.{name}")


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    root = Path(os.environ["PRIME_RL_SRC"])
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("src", "packages/prime-rl-configs/src"):
            patch.syspath_prepend(str(root / folder))
        if not hasattr(vf.Branch, "multi_modal_data"):  # verifiers 0.4 has none; upstream's own pin still had
            patch.setattr(vf.Branch, "multi_modal_data", None, raising=False)
        yield Upstream()


def stamped(rng: random.Random, upstream: Upstream, *, ref_kl: bool = False) -> tuple[WireTrace, dict[int, float]]:
    """A forked conversation with credit and stamps, and the teacher's number by the token's id (all ids differ)."""
    ids = iter(rng.sample(range(1000), 40))
    made = trace(
        node(None, "user", [next(ids) for _ in range(3)]),
        node(0, "assistant", [next(ids) for _ in range(4)], num_sampled=3),
        node(1, "user", [next(ids) for _ in range(2)]),
        node(2, "assistant", [next(ids) for _ in range(3)], num_sampled=2),
        node(1, "user", [next(ids)]),
        node(4, "assistant", [next(ids) for _ in range(5)], num_sampled=4),
    )
    upstream.routing.assign_advantages(made, rng.choice([-1.0, 0.5]))
    told = {token: -4 * rng.random() for one in made.nodes for token in one.token_ids}
    silent = rng.choice(made.nodes[5].token_ids[1:])
    told[silent] = math.nan
    paths = scoring_paths(made)
    numbers = [[told[token] for token in path.token_ids] for path in paths]
    scores = [[Score("a", 1.0, Scores(said, Candidates.none(len(said), 0)))] for said in numbers]
    stamp(paths, scores, ref_kl=ref_kl)
    return made, told


@pytest.mark.parametrize("seed", range(5))
def test_stamps_reach_the_trainer_at_their_own_tokens_and_zero_elsewhere(upstream: Upstream, seed: int) -> None:
    made, told = stamped(random.Random(seed), upstream)
    (micro_batch,) = upstream.micro_batches([made])
    places = [place for place, trained in enumerate(micro_batch.loss_mask) if trained]
    assert len(places) == 9  # a sampled node is trained on in one branch alone
    for place in places:
        number = told[micro_batch.input_ids[place]]
        expected = 0.0 if math.isnan(number) else number
        assert micro_batch.ref_logprobs[place] == pytest.approx(expected)
    assert micro_batch.ref_kl_weights is None


@pytest.mark.parametrize("seed", range(5))
def test_the_replay_term_of_upstreams_loss_is_that_of_the_stamps(upstream: Upstream, seed: int) -> None:
    rng = random.Random(seed)
    made, told = stamped(rng, upstream)
    (micro_batch,) = upstream.micro_batches([made])
    logprobs = torch.tensor([-3 * rng.random() for _ in micro_batch.input_ids], requires_grad=True)
    loss, metrics = upstream.loss_of(micro_batch, logprobs)
    numbers = [told[token] for token in micro_batch.input_ids]
    by_hand = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=torch.tensor(micro_batch.inference_logprobs),
        advantages=torch.tensor(micro_batch.advantages),
        loss_mask=torch.tensor(micro_batch.loss_mask),
        ref_logprobs=torch.tensor(numbers),
    )
    expected = composer_loss(by_hand, replay_tau=REPLAY_TAU)
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert float(torch.stack(list(metrics["num_teacher_tokens"])).sum()) == 8
    (gradient,) = torch.autograd.grad(loss, logprobs)
    (wanted,) = torch.autograd.grad(expected.loss, logprobs)
    torch.testing.assert_close(gradient, wanted)
    without = composer_loss(by_hand)
    assert float(loss) != pytest.approx(float(without.loss), rel=1e-3)


def test_upstreams_own_term_runs_on_the_stamped_tokens_only_when_asked(upstream: Upstream) -> None:
    made, told = stamped(random.Random(0), upstream, ref_kl=True)
    (micro_batch,) = upstream.micro_batches([made])
    weighted = [
        token for token, weight in zip(micro_batch.input_ids, micro_batch.ref_kl_weights, strict=True) if weight
    ]
    trained = [
        token for token, is_trained in zip(micro_batch.input_ids, micro_batch.loss_mask, strict=True) if is_trained
    ]
    assert sorted(weighted) == sorted(token for token in trained if not math.isnan(told[token]))


def test_upstream_packs_stamped_rollouts_with_plain_ones_and_not_with_those_of_other_streams(
    upstream: Upstream,
) -> None:
    def rollout(num_streams: int) -> WireTrace:
        made = trace(node(None, "user", [1, 2]), node(0, "assistant", [3, 4], num_sampled=2))
        upstream.routing.assign_advantages(made, 1.0)
        if num_streams:
            stamp_candidates(made, [], [], {}, top_k=8, num_streams=num_streams)
        return made

    batches = upstream.micro_batches([rollout(1), rollout(0), rollout(1)])
    assert [one.routed_experts and one.routed_experts.shape for one in batches] == [[8, 2, 8], None]
    with pytest.raises(AssertionError):
        upstream.micro_batches([rollout(1), rollout(2)])


@pytest.mark.parametrize("holds", ['id = "composer-prime"', 'type = "sft"'])
def test_the_tables_in_the_docs_are_read_by_upstreams_config(upstream: Upstream, holds: str) -> None:
    text = (REPOSITORY / "docs/teachers.md").read_text()
    (block,) = [found for found in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if holds in found]
    env = '[orchestrator.train.source.env.taskset]\nid = "reverse-letters"\n'
    block = block.replace('id = "my-env"', 'id = "reverse-letters"')
    data = tomllib.loads(block if "taskset]" in block else block + env)
    source = data["orchestrator"]["train"]["source"]
    (table,) = source if isinstance(source, list) else [{"name": "letters", **source}]
    read = upstream.orchestrator.TrainSourceConfig.model_validate(table)
    if "sft" in holds:
        assert read.algo.sampling.source.base_url == "http://127.0.0.1:8200/v1"
    else:
        assert type(read.env).__name__ == "StampingEnvConfig"
        assert read.env.teachers[0].name == "big" and read.env.hints is not None
