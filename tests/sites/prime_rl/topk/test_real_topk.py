"""Distributions in upstream's unmodified trainer, on 1 and 2 ranks, tied and untied, fused and plain.

`figures` prints what is measured here, for every combination, and what it costs.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.feed import VOCABULARY
from tests.sites.prime_rl.real_runs import RealTrainer, upstream
from tests.sites.prime_rl.topk.figures import (
    FUSED,
    IPO,
    PLAIN,
    Apart,
    Case,
    Planned,
    apart,
    differing_when_off,
    model,
    run,
    says,
)

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

PAIRWISE = [Case(FUSED, True, 1), Case(PLAIN, False, 1), Case(FUSED, False, 2), Case(PLAIN, True, 2)]
"""Each two of the three choices in every combination."""
TOLERANCE = 1e-6
NUM_STEPS = 12


@pytest.fixture(autouse=True)
def only_where_rollouts_are_fed() -> None:
    """The older versions' senders are others."""
    if upstream() is not versions.MAIN:
        pytest.skip("PRIME-RL before 559b447 packs rollouts in its trainer; only 559b447 is fed")


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_the_step_1_gradient_is_within_1e_6_of_that_of_the_full_logits(tmp_path: Path, case: Case) -> None:
    with_stock = case == PAIRWISE[0]
    found: Apart = apart(tmp_path, case, stock=with_stock)
    print(case, found)
    assert found.ours <= TOLERANCE
    assert not with_stock or found.added > 1000 * TOLERANCE, "the term is there"


def test_without_distributions_the_real_trainer_is_stock_to_the_bit(tmp_path: Path) -> None:
    assert differing_when_off(tmp_path) == {"top_k = 0": False, "weights of 0": False}


def test_a_router_replay_ends_the_trainer_in_one_line(tmp_path: Path) -> None:
    impl = {"model": {"impl": "auto"}, "enable_router_replay": True, "loss": IPO}
    trainer = RealTrainer(tmp_path / "refused", 1, says(), model=model(tmp_path / "model"), config=impl)
    code, output = trainer.start().wait()
    assert code == 2 and "composer-prime: trainer.enable_router_replay must be off" in output


def test_what_a_better_teacher_says_is_learned_by_replay_and_by_hints_and_not_without_them(tmp_path: Path) -> None:
    weights = model(tmp_path / "model")
    ways = {"base": {}, "replay": says(hint_tau=0.0), "hint": says(replay_tau=0.0)}
    table = {"max_steps": NUM_STEPS, "ckpt": None, "loss": IPO, "optim": {"lr": 0.01}}
    trainers = {name: Planned(tmp_path / name, 1, env, model=weights, config=table) for name, env in ways.items()}
    run(list(trainers.values()), last=NUM_STEPS, kind="better")
    before = likelihood(weights, {})
    rise = {name: likelihood(weights, one.broadcast(NUM_STEPS)) - before for name, one in trainers.items()}
    print({name: round(value, 2) for name, value in rise.items()})
    assert min(rise["replay"], rise["hint"]) > 1 > 0.5 > abs(rise["base"])


def likelihood(folder: Path, trained: dict[str, Tensor]) -> float:
    """Mean log-probability, in nats, of what the better teacher would say after random tokens."""
    from transformers import Qwen3ForCausalLM

    policy = Qwen3ForCausalLM.from_pretrained(folder)
    policy.load_state_dict({name: value.float() for name, value in trained.items()}, strict=bool(trained))
    tokens = torch.randint(VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logprobs = policy(tokens).logits.log_softmax(-1)
    return logprobs.gather(-1, (tokens.unsqueeze(-1) + 1) % VOCABULARY).mean().item()
