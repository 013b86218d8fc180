"""Against PRIME-RL's own `type = "default"` loss, taken out of a checkout without importing PRIME-RL."""

import ast
import inspect
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_prime.losses.composer import composer_loss
from composer_prime.losses.records import LossInputs, LossOutputs
from tests.losses.test_composer import make_batch, run

pytestmark = pytest.mark.prime_rl

LOSS = "src/prime_rl/trainer/rl/loss.py"
CONFIG = "packages/prime-rl-configs/src/prime_rl/configs/trainer.py"
FUNCTIONS = (
    "_safe_mean", "compute_importance_ratio_and_mismatch_kl", "default_loss_fn", "ipo_loss_fn", "ref_kl_loss_fn",
)  # fmt: skip


@dataclass(frozen=True)
class Upstream:
    """The loss function of a checkout, its settings' defaults and bounds, and the names of its metrics."""

    loss: Any
    ipo: Any
    ref_kl: Any
    defaults: dict[str, float]
    bounds: dict[str, float]
    metrics: set[str]


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    root = os.environ.get("PRIME_RL_SRC")
    if not root:
        pytest.skip("PRIME_RL_SRC names no PRIME-RL checkout")
    tree = ast.parse((Path(root) / LOSS).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    assert {node.name for node in found} == set(FUNCTIONS), f"{root} has no loss of type default: use 0.8"
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "LossInputs": LossInputs, "LossOutputs": LossOutputs}
    names["DefaultLossConfig"] = names["IPOLossConfig"] = SimpleNamespace
    exec(compile(ast.Module([*found], []), LOSS, "exec"), names)
    default = next(node for node in found if node.name == "default_loss_fn")
    (metrics,) = [
        node.value
        for node in ast.walk(default)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == "metrics"
    ]
    config = ast.parse((Path(root) / CONFIG).read_text())
    (fields,) = [node for node in config.body if isinstance(node, ast.ClassDef) and node.name == "DefaultLossConfig"]
    values = {
        ast.unparse(node.target): node.value
        for node in fields.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
    }
    return Upstream(
        names["default_loss_fn"],
        names["ipo_loss_fn"],
        names["ref_kl_loss_fn"],
        {name: ast.literal_eval(call.args[0]) for name, call in values.items()},
        {name: ast.literal_eval(call.keywords[0].value) for name, call in values.items() if call.keywords},
        {ast.literal_eval(key) for key in metrics.keys if key is not None},
    )


def test_ours_takes_upstreams_settings_with_upstreams_defaults(upstream):
    ours = {name: one.default for name, one in inspect.signature(composer_loss).parameters.items()}
    assert upstream.defaults and {name: ours.get(name) for name in upstream.defaults} == upstream.defaults
    assert set(upstream.bounds.values()) == {0}  # which composer_loss refuses to go below, see test_sharding


def test_ours_gives_every_metric_that_upstream_gives(upstream):
    outputs, _ = run(make_batch(np.random.default_rng(0), 8))
    assert upstream.metrics and upstream.metrics <= outputs.metrics.keys()


def test_value_gradient_and_metrics_equal_upstreams_on_a_thousand_batches(upstream):
    rng = np.random.default_rng(0)
    for number in range(1000):
        signs = ("mixed", "positive", "negative", "zero")[number % 4]
        batch = make_batch(
            rng, int(rng.integers(1, 64)), signs=signs, masked=(0.0, 0.3, 1.0)[number % 3], weighted=number % 5 > 0
        )
        settings: dict[str, Any] = dict(upstream.defaults)
        if number % 2:
            settings |= {"dppo_mask_low": 0.1, "dppo_mask_high": 0.3, "adv_tau": 0.7, "kl_tau": 0.05}

        def theirs(inputs: LossInputs, settings: dict[str, Any] = settings) -> LossOutputs:
            return upstream.loss(inputs, SimpleNamespace(**settings))

        wanted, wanted_gradient = run(batch, torch.float64, loss=theirs)
        ours, gradient = run(batch, torch.float64, ratio_cap=math.inf, **settings)
        assert ours.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-9, abs=1e-9)
        assert gradient.tolist() == pytest.approx(wanted_gradient.tolist(), rel=1e-9, abs=1e-9)
        for name, value in wanted.metrics.items():
            assert ours.metrics[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name  # shares are fp32
        single, single_gradient = run(batch, ratio_cap=math.inf, **settings)
        scale = 1.0 + abs(wanted_gradient).sum().item()
        assert abs(single.loss.item() - wanted.loss.item()) <= 1e-6 * scale
        torch.testing.assert_close(single_gradient.double(), wanted_gradient, rtol=1e-5, atol=1e-6)


def assert_the_same_as(theirs: Any, batch: dict[str, Any], **settings: Any) -> None:
    wanted, wanted_gradient = run(batch, torch.float64, loss=theirs)
    ours, gradient = run(batch, torch.float64, **settings)
    assert ours.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-9, abs=1e-9)
    assert gradient.tolist() == pytest.approx(wanted_gradient.tolist(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("settings", [{}, {"ipo_threshold": 0.3, "adv_tau": 0.7, "kl_tau": 0.05}])
def test_ipo_equals_upstreams(upstream, settings):
    rng = np.random.default_rng(1)
    for number in range(100):
        batch = make_batch(rng, int(rng.integers(1, 64)), weighted=number % 3 > 0)
        given = {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3} | settings
        assert_the_same_as(
            lambda inputs, given=given: upstream.ipo(inputs, SimpleNamespace(**given)),
            batch, trust_region="ipo", ratio_cap=math.inf, **settings,
        )  # fmt: skip


def test_below_the_cap_all_equals_upstreams(upstream):
    rng = np.random.default_rng(2)
    for _ in range(100):
        batch = make_batch(rng, 64)
        batch["mask"] &= batch["trainer"] - batch["inference"] < math.log(20)
        assert_the_same_as(
            lambda inputs: upstream.loss(inputs, SimpleNamespace(**upstream.defaults)), batch, **upstream.defaults
        )


def test_ref_kl_equals_upstreams(upstream):
    rng = np.random.default_rng(3)
    for _ in range(100):
        batch = make_batch(rng, 32)
        batch["refs"] = -rng.uniform(0.1, 9.0, 32)
        assert_the_same_as(upstream.ref_kl, batch, adv_tau=0.0, ref_kl_tau=1.0, ratio_cap=math.inf)
