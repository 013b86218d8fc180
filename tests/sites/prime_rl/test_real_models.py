"""Upstream's own model classes and its LoRA inside its unmodified trainer, as two sites of one run.

Upstream's default is its own implementation wherever it has one (`model.impl = "auto"`); its flash-attention kernel is
stood in for, see cpu_trainer.py. Fed by upstream's rollout sender, so commit 559b447 alone.
"""

import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_prime.sites.prime_rl import versions
from composer_prime.store import open_store
from composer_prime.sync.run import load_run
from tests.sites.prime_rl.comparing import assert_same, differs
from tests.sites.prime_rl.launched import announced
from tests.sites.prime_rl.real_runs import (
    RealTrainer,
    exported,
    feed,
    real_site,
    save_experts_model,
    save_model,
    upstream,
)

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

ALPHA = 8.0


@pytest.fixture(scope="module", autouse=True)
def fed() -> None:
    if upstream() is not versions.MAIN:
        pytest.skip("PRIME-RL before 559b447 packs rollouts in its trainer; only 559b447 is fed")


def two_sites(folder: Path, model: Path, **settings: Any) -> tuple[str, list[RealTrainer]]:
    """The run's URI, and its two sites after they have trained to its end."""
    uri = announced(folder / "bucket", inner_steps=2, quorum=2, liveness_s=60.0)
    sites = [
        real_site(folder, name, model, uri, model=settings | {"conversion_dir": str(folder / f"converted-{name}")})
        for name in "ab"
    ]
    feed(*sites)
    for one in sites:
        one.start()
    for one in sites:
        one.finish()
    return uri, sites


def names_of(uri: str) -> list[str]:
    """The parameters that the run shares."""
    with closing(open_store(uri)) as store:
        return [parameter.name for parameter in load_run(store).manifest.parameters]


def assert_one_policy(sites: list[RealTrainer]) -> None:
    """Both ended with the same masters, and after each round, but not between, both broadcast the same."""
    first, second = sites
    assert first.masters() == second.masters()
    assert [one["version"] for one in first.masters()] == [3]
    for step in (0, 2, 4):
        assert_same(first.broadcast(step), second.broadcast(step))
    assert differs(first.broadcast(3), second.broadcast(3)) and differs(first.broadcast(2), first.broadcast(4))


def test_adapters_alone_are_shared_where_the_real_trainer_trains_lora(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    uri, sites = two_sites(tmp_path, model, impl="custom", lora={"rank": 4, "alpha": ALPHA})
    assert_one_policy(sites)
    modules = 2 * ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(re.sub(r"^.*\.(\w+)\.lora_[AB]\.0$", r"\1", name) for name in names_of(uri)) == sorted(2 * modules)
    start, end = load_file(model / "model.safetensors"), sites[0].checkpoint(4)
    assert [name for name in start if not torch.equal(start[name], end[name])] == []
    adapters = {name: value.bfloat16() for name, value in sites[0].broadcast(4).items()}
    written = exported(uri, model, tmp_path / "export", lora_alpha=ALPHA)
    assert_same({name.removeprefix("base_model.model."): value for name, value in written.items()}, adapters)


def test_upstreams_own_mixture_of_experts_is_shared_as_upstream_stacks_it(tmp_path: Path) -> None:
    model = save_experts_model(tmp_path / "model")
    uri, sites = two_sites(tmp_path, model, impl="custom", moe_use_grouped_mm=False)
    assert_one_policy(sites)
    names = names_of(uri)
    assert "model.layers.1.mlp.experts.w1" in names and "model.layers.1.mlp.router.gate.weight" in names
    sent = sites[0].broadcast(4)
    assert not any("experts.w1" in name for name in sent) and any("mlp.experts" in name for name in sent)
