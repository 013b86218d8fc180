"""Pairs and stored turns in a site's batch: what the loss makes of them is DPO, SimPO and cross entropy."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from composer_prime import metrics
from composer_prime.config.recipe import LossConfig, OptimConfig
from composer_prime.config.teachers import PairsConfig, StoredTracesConfig
from composer_prime.errors import SiteError, TeacherError
from composer_prime.losses.preferences import FALL
from composer_prime.sites.embedded.batches import TrainingSample
from composer_prime.sites.embedded.learner import Learner, import_loss
from composer_prime.sites.embedded.stored import MAX_UNSCORED_DRAWS, EncodedPair, EncodedTurn, StoredSamples, drawn
from composer_prime.teachers.served import ServedModel
from composer_prime.traces.pairs.encoding import Action
from tests.sites.letters_site import letters_site
from tests.sites.tiny_policy import VOCABULARY, random_policy

BETA, GAMMA = 0.7, 0.3


class Served:
    """Scores actions with a model in this process, as a served one does; those in `broken` it can't."""

    base_url = "http://here"

    def __init__(self, model: Any, broken: Sequence[Action] = ()) -> None:
        self.model, self.broken = model, [action.token_ids for action in broken]
        self.num_asked = 0

    async def scores(self, token_ids: list[int]) -> Any:
        self.num_asked += 1
        if token_ids in self.broken:
            raise TeacherError("it has no answer")
        with torch.no_grad():
            found = [math.nan, *token_logprobs(self.model, token_ids).tolist()]
        return type("Scores", (), {"logprobs": found})

    async def close(self) -> None:
        pass


def token_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Of every token but the first, with a graph."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


def total_logprob(model: Any, action: Action) -> Tensor:
    return token_logprobs(model, action.token_ids)[torch.tensor(action.mask[1:])].sum()


def random_action(rng: random.Random, prompt: list[int]) -> Action:
    own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
    return Action([*prompt, *own], [False] * len(prompt) + [True] * len(own))


def random_pairs(count: int) -> list[EncodedPair]:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(5)] for _ in range(count)]
    return [EncodedPair(random_action(rng, one), random_action(rng, one), rng.uniform(0.3, 1.0)) for one in prompts]


def stored(
    tmp_path: Path, drawn_pairs: Any = (), drawn_turns: Any = (), policy: Any = None, first: Any = None, **tables: Any
) -> Any:
    """`pairs` is the preference term alone, also of what the policy can't form, unless its table says otherwise."""
    if "pairs" in tables:
        tables["pairs"] = {"store": "x", "file": "x", "sft_tau": 0.0, "min_logprob": -1e9} | tables["pairs"]
    settings = letters_site(tmp_path, replay=tables)
    served = [cast(ServedModel, each or Served(random_policy(seed))) for seed, each in enumerate((policy, first))]
    return StoredSamples(settings, drawn_pairs, drawn_turns, *served)


def gradient(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def learned(model: Any, samples: list[TrainingSample]) -> list[Tensor]:
    """The gradient that a trainer's step computes, for the sum over tokens."""
    loss = LossConfig(kwargs={"kl_tau": 0.0, "ratio_cap": math.inf})
    learner = Learner(model, OptimConfig(lr=0.0, max_norm=None), import_loss(loss), seq_len=64)
    report = learner.step(samples)
    return [parameter.grad * report.tokens for parameter in model.parameters()]


def dpo(model: Any, reference: Any, pair: EncodedPair) -> Tensor:
    assert pair.rejected is not None
    chosen, rejected = (
        total_logprob(model, one) - total_logprob(reference, one) for one in (pair.chosen, pair.rejected)
    )
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))


def simpo(model: Any, reference: Any, pair: EncodedPair) -> Tensor:
    assert pair.rejected is not None
    chosen, rejected = (total_logprob(model, one) / one.num_tokens for one in (pair.chosen, pair.rejected))
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected) - GAMMA)


@pytest.mark.parametrize("sft_tau", [0.0, 0.5])
@pytest.mark.parametrize(("loss", "reference_loss"), [("dpo", dpo), ("simpo", simpo)])
def test_a_trainers_step_on_pairs_has_the_preference_losss_gradient(
    tmp_path: Path, loss: str, reference_loss: Callable[..., Tensor], sft_tau: float
) -> None:
    model, first, pairs = random_policy(1).eval(), random_policy(2).eval(), random_pairs(6)
    config: dict[str, Any] = {"file": "x", "loss": loss, "beta": BETA, "batch_size": 6, "sft_tau": sft_tau, "tau": 3.0}
    config["max_lead"] = 1e6
    source = stored(
        tmp_path, pairs, (), Served(model), Served(first), pairs=config | ({"gamma": GAMMA} if loss == "simpo" else {})
    )
    samples, found = asyncio.run(source.draw(0, 0))
    total = sum(
        pair.weight * (3.0 * reference_loss(model, first, pair) - sft_tau * total_logprob(model, pair.chosen))
        for pair in pairs
    )
    for ours, wanted in zip(learned(model, samples), gradient(model, cast(Tensor, total)), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    assert found[metrics.PAIRS_COUNT] == 6 and found[metrics.PAIRS_FAILED] == 0


def lead(policy: Any, first: Any, pair: EncodedPair) -> float:
    assert pair.rejected is not None
    own, before = (
        float(total_logprob(model, pair.chosen) - total_logprob(model, pair.rejected)) for model in (policy, first)
    )
    return min(own, own - before)


def test_a_pair_that_the_policy_prefers_by_max_lead_rests_but_for_its_imitation(tmp_path: Path) -> None:
    policy, first, pairs = random_policy(1).eval(), random_policy(2).eval(), random_pairs(9)
    with torch.no_grad():
        leads = [lead(policy, first, pair) for pair in pairs]
    top = sorted(each for each in leads if each > 0)[-2]
    config = {"file": "x", "batch_size": 9, "sft_tau": 0.5, "max_lead": top - 1e-3}
    samples, found = asyncio.run(stored(tmp_path, pairs, (), Served(policy), Served(first), pairs=config).draw(0, 0))
    resting = [pair for pair, each in zip(pairs, leads, strict=True) if each >= top]
    assert found[metrics.PAIRS_LEARNED] == len(resting) == 2 and found[metrics.PAIRS_COUNT] == 9
    taught = {tuple(sample.token_ids): max(map(abs, sample.advantages)) for sample in samples}
    assert len(taught) == 2 * 9 - 2
    for pair in resting:
        assert pair.rejected is not None and tuple(pair.rejected.token_ids) not in taught
        assert taught[tuple(pair.chosen.token_ids)] == pytest.approx(0.5 * pair.weight)


def test_rollouts_are_drawn_again_while_all_pairs_are_learned(tmp_path: Path) -> None:
    now, before = (random_policy(seed).eval() for seed in (1, 2))
    with torch.no_grad():
        pairs = [pair for pair in random_pairs(30) if lead(now, before, pair) > 0.1][:2]
    assert len(pairs) == 2
    policy, first = Served(now), Served(before)
    source = stored(tmp_path, pairs, (), policy, first, pairs={"file": "x", "batch_size": 2, "max_lead": 0.1})
    assert source.teaches(0)
    assert asyncio.run(source.draw(0, 0))[0] == [] and not source.teaches(1)
    policy.model = before  # it has forgotten
    asyncio.run(source.draw(1, 1))  # what falls rests once
    assert len(asyncio.run(source.draw(2, 2))[0]) == 4 and source.teaches(3)


@pytest.mark.parametrize("advantages", [(1.0, 1.0, 1.0), (1.0, -0.5, 0.25)])
def test_stored_turns_have_cross_entropys_gradient_by_their_advantages(tmp_path: Path, advantages: Any) -> None:
    model, rng = random_policy(1).eval(), random.Random(3)
    actions = [random_action(rng, [1, 2, 3]) for _ in advantages]
    turns = [EncodedTurn(action, advantage) for action, advantage in zip(actions, advantages, strict=True)]
    source = stored(tmp_path, (), turns, Served(model), traces={"store": "x", "batch_size": 3, "tau": 2.0})
    samples, found = asyncio.run(source.draw(0, 0))
    wanted = sum(-2.0 * turn.advantage * total_logprob(model, turn.action) for turn in turns)
    for ours, theirs in zip(learned(model, samples), gradient(model, cast(Tensor, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found == {metrics.TRACES_COUNT: 3, metrics.TRACES_FAILED: 0}


def test_a_weight_that_has_come_to_0_leaves_a_batch_as_it_is(tmp_path: Path) -> None:
    tau, turn = {"start": 1.0, "end": 0.0, "steps": 2}, EncodedTurn(random_action(random.Random(1), [1, 2]), 1.0)
    tables = {"pairs": {"tau": tau}, "traces": {"store": "x", "tau": tau}}
    source = stored(tmp_path, random_pairs(2), [turn], **tables)
    assert [source.teaches(step) for step in range(4)] == [True, True, False, False]
    assert len(asyncio.run(source.draw(1, 0))[0]) > 0 and asyncio.run(source.draw(2, 0)) == ([], {})


def test_by_default_agreed_actions_are_imitated_by_their_support_and_nothing_is_pushed_down(tmp_path: Path) -> None:
    model = random_policy(1).eval()
    pairs = [replace(pair, rejected=None) if place % 2 else pair for place, pair in enumerate(random_pairs(6))]
    table = {"sft_tau": 1.0, "min_logprob": -1.0, "batch_size": 6}  # nats a token; this policy gives -3
    samples, found = asyncio.run(stored(tmp_path, pairs, (), Served(model), pairs=table).draw(0, 0))
    total = sum(-pair.weight * total_logprob(model, pair.chosen) for pair in pairs)
    for ours, wanted in zip(learned(model, samples), gradient(model, cast(Tensor, total)), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    means = [float(total_logprob(model, pair.chosen).detach()) / pair.chosen.num_tokens for pair in pairs]
    assert found[metrics.PAIRS_LOGPROB] == pytest.approx(sum(means) / 6, rel=1e-5)
    assert (found[metrics.PAIRS_COUNT], found[metrics.PAIRS_PREFERRED]) == (6, 0) and metrics.PAIRS_MARGIN not in found


def test_the_preference_term_rests_where_the_agreed_action_is_below_the_floor_or_falling(tmp_path: Path) -> None:
    models, pairs = [random_policy(seed).eval() for seed in (1, 2)], random_pairs(12)
    means = [
        [float(total_logprob(model, pair.chosen).detach()) / pair.chosen.num_tokens for pair in pairs]
        for model in models
    ]
    below, above = sorted(means[0])[3:5]
    floor = (below + above) / 2  # batched means differ from these in the last bits
    policy = Served(models[0])
    table = {"batch_size": 12, "min_logprob": floor, "max_lead": 1e6}
    source = stored(tmp_path, pairs, (), policy, pairs=table)
    _, found = asyncio.run(source.draw(0, 0))
    assert found[metrics.PAIRS_PREFERRED] == 8
    policy.model = models[1]
    _, found = asyncio.run(source.draw(1, 1))
    stays = [now >= max(floor, before - FALL) for before, now in zip(*means, strict=True)]
    assert any(now >= floor and not stay for now, stay in zip(means[1], stays, strict=True)), "falls above it"
    assert found[metrics.PAIRS_PREFERRED] == sum(stays)


def test_the_reference_is_asked_once_for_each_pair(tmp_path: Path) -> None:
    first, pairs = Served(random_policy(2)), random_pairs(4)
    source = stored(tmp_path, pairs, first=first, pairs={"file": "x", "batch_size": 3})
    for step in range(5):
        asyncio.run(source.draw(step, step))
    assert first.num_asked == 2 * len(pairs)


def test_a_pair_that_cant_be_scored_is_left_out_and_counted(tmp_path: Path) -> None:
    pairs = random_pairs(4)
    assert pairs[2].rejected is not None
    policy = Served(random_policy(1), broken=[pairs[2].rejected])
    source = stored(tmp_path, pairs, policy=policy, pairs={"file": "x", "batch_size": 4})
    samples, found = asyncio.run(source.draw(0, 0))
    assert (len(samples), found[metrics.PAIRS_COUNT], found[metrics.PAIRS_FAILED]) == (6, 3, 1)


def test_a_site_ends_when_nothing_stored_is_ever_scored(tmp_path: Path) -> None:
    pairs = random_pairs(2)
    policy = Served(random_policy(1), broken=[pair.chosen for pair in pairs])
    source = stored(tmp_path, pairs, policy=policy, pairs={"file": "x", "batch_size": 2})
    for step in range(MAX_UNSCORED_DRAWS - 1):
        assert asyncio.run(source.draw(step, 0))[0] == []
    with pytest.raises(SiteError, match=r"nothing of replay.pairs .* 3 times in a row; the last with: it has"):
        asyncio.run(source.draw(2, 0))


@pytest.mark.parametrize(("count", "size"), [(7, 3), (3, 7), (4, 4), (1, 2)])
def test_each_comes_once_before_any_comes_again_wherever_a_run_is_resumed(count: int, size: int) -> None:
    steps = [drawn(count, size, step, "seed") for step in range(3 * count + 2)]
    assert all(len(places) == size for places in steps)
    places = [place for step in steps for place in step]
    for start in range(0, len(places) - count + 1, count):
        assert Counter(places[start : start + count]) == Counter(range(count))
    assert steps[2:4] == [drawn(count, size, step, "seed") for step in (2, 3)] and drawn(0, 4, 0, "seed") == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            lambda: PairsConfig(store=Path("x"), file=Path("x"), gamma=0.5),
            r'pairs.gamma \(0.5\) is for loss = "simpo", and it is',
        ),
        (
            lambda: PairsConfig(store=Path("x"), file=Path("x"), tau=0.0, sft_tau=0.0),
            r"pairs.tau and sft_tau \(0\) must not both be 0",
        ),
        (lambda: StoredTracesConfig(store=Path("x"), tau=0.0), r"replay.traces.tau \(0\) must not be 0 at every step"),
    ],
)
def test_settings_that_teach_nothing_are_refused(config: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config()
