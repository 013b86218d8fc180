"""Distributions in upstream's unmodified trainer, on 1 and 2 ranks, tied and untied, fused and plain.

`figures` prints what is measured here, for every combination, and what it costs.
"""

import os
from pathlib import Path

import pytest

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.real_runs import RealTrainer, upstream
from tests.sites.prime_rl.topk.figures import (
    FUSED,
    IPO,
    PLAIN,
    Apart,
    Case,
    apart,
    differing_when_off,
    model,
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
