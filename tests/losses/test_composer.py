"""composer_loss against its formulas: values, gradients, and what it does where the formulas overflow."""

import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.losses.composer import composer_loss
from composer_prime.losses.records import LossInputs, LossOutputs
from tests.losses.reference import reference_loss, reference_mismatch_kl

METRICS = {
    "mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high",
    "masked_advantage_positive", "masked_advantage_negative", "policy_loss", "kl_loss", "replay_loss",
    "num_teacher_tokens", "ref_kl_loss", "is_capped",
}  # fmt: skip
FULL: dict[str, Any] = {"adv_tau": 0.7, "kl_tau": 0.05, "replay_tau": 0.3, "replay_clip": 2.0}


def make_batch(rng, num_tokens, *, signs="mixed", span=3.0, masked=0.3, taught=0.5, weighted=True):
    """Numpy fp32 streams. `span` is how far down logprobs reach; no token lies on an edge of a trust region."""
    trainer = -rng.uniform(0, span, num_tokens)
    inference = np.minimum(trainer + rng.normal(0, 0.4, num_tokens), 0.0)
    far = rng.random(num_tokens) < 0.1
    inference[far] = np.maximum(-rng.uniform(0, span, far.sum()), trainer[far] - 80.0)  # exp() stays finite in fp32
    trainer, inference = trainer.astype(np.float32), inference.astype(np.float32)
    moved = np.exp(trainer.astype(np.float64)) - np.exp(inference.astype(np.float64))
    inference[np.abs(np.abs(moved) - 0.2) < 1e-5] = -1.0
    trainer[np.abs(np.abs(moved) - 0.2) < 1e-5] = -1.0
    advantages = rng.normal(0, 1, num_tokens) * (rng.random(num_tokens) < 0.9)
    advantages = {
        "mixed": advantages,
        "positive": abs(advantages),
        "negative": -abs(advantages),
        "zero": advantages * 0,
    }
    refs = -rng.uniform(0, span, num_tokens)
    refs[rng.random(num_tokens) >= taught] = 0.0
    for bad in (math.nan, math.inf, -math.inf):
        refs[rng.random(num_tokens) < 0.05] = bad
    weights = rng.uniform(0, 2, num_tokens) * (rng.random(num_tokens) < 0.9) if weighted else None
    return {
        "trainer": trainer,
        "inference": inference,
        "advantages": advantages[signs].astype(np.float32),
        "mask": rng.random(num_tokens) >= masked,
        "refs": refs.astype(np.float32),
        "weights": None if weights is None else weights.astype(np.float32),
    }


def run(batch, dtype=torch.float32, loss=composer_loss, **kwargs):
    """(LossOutputs, gradient) of `loss` on a numpy batch; refs and weights may be None or left out."""

    def tensor(name, kind=dtype) -> Any:
        values = batch.get(name)
        return None if values is None else torch.tensor(np.asarray(values), dtype=kind)

    trainer = tensor("trainer").requires_grad_()
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=tensor("inference"),
        advantages=tensor("advantages"),
        loss_mask=tensor("mask", torch.bool),
        ref_logprobs=tensor("refs"),
        loss_weights=tensor("weights"),
    )
    outputs = loss(inputs, **kwargs)
    (gradient,) = torch.autograd.grad(outputs.loss, trainer)
    return outputs, gradient


def run_reference(batch, **kwargs):
    names = {"dppo_mask_low": "low", "dppo_mask_high": "high"}
    streams = {name: None if values is None else np.asarray(values).tolist() for name, values in batch.items()}
    return reference_loss(**streams, **{names.get(name, name): value for name, value in kwargs.items()})


def assert_equals_reference(batch, dtype, tolerance, **kwargs):
    outputs, gradient = run(batch, dtype, **kwargs)
    wanted = run_reference(batch, **kwargs)
    slack = tolerance * (wanted.magnitude + 1e-3)
    assert outputs.loss.dtype == gradient.dtype == dtype
    assert outputs.loss.item() == pytest.approx(wanted.loss, rel=0, abs=slack)
    assert gradient.tolist() == pytest.approx(wanted.gradient, rel=10 * tolerance, abs=slack)
    metrics = {name: value.item() for name, value in outputs.metrics.items()}
    assert metrics["policy_loss"] == pytest.approx(wanted.policy, rel=0, abs=slack)
    assert metrics["kl_loss"] == pytest.approx(wanted.kl, rel=0, abs=slack)
    assert metrics["replay_loss"] == pytest.approx(wanted.replay, rel=0, abs=slack)
    assert metrics["num_teacher_tokens"] == wanted.num_teacher_tokens
    assert metrics["is_masked"] * max(batch["mask"].sum(), 1) == pytest.approx(
        sum(batch["mask"]) - sum(wanted.kept), abs=1e-3
    )
    for name, chosen in [("mismatch_kl", batch["mask"]), ("unmasked_mismatch_kl", wanted.kept)]:
        exact = reference_mismatch_kl(batch["trainer"].tolist(), batch["inference"].tolist(), chosen)
        assert metrics[name] == pytest.approx(exact, rel=10 * tolerance, abs=10 * tolerance)


@settings(max_examples=1000, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(0, 40),
    signs=st.sampled_from(["mixed", "positive", "negative", "zero"]),
    span=st.sampled_from([0.5, 3.0, 100.0]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    taught=st.sampled_from([0.0, 0.5, 1.0]),
    weighted=st.booleans(),
    bounds=st.sampled_from([(0.2, 0.2), (0.1, 0.3), (1.0, 0.0)]),
    taus=st.sampled_from([(1.0, 1e-3, 0.0, 5.0), (0.7, 0.05, 0.3, 2.0), (0.0, 0.0, 1.0, 0.5)]),
    cap=st.sampled_from([20.0, 1.0, math.inf]),
)
def test_value_gradient_and_metrics_equal_the_formulas(
    seed, num_tokens, signs, span, masked, taught, weighted, bounds, taus, cap
):
    batch = make_batch(
        np.random.default_rng(seed), num_tokens, signs=signs, span=span, masked=masked, taught=taught, weighted=weighted
    )
    kwargs: dict[str, Any] = dict(zip(("adv_tau", "kl_tau", "replay_tau", "replay_clip"), taus, strict=True))
    kwargs |= dict(zip(("dppo_mask_low", "dppo_mask_high"), bounds, strict=True))
    kwargs["ratio_cap"] = cap
    assert_equals_reference(batch, torch.float64, 1e-12, **kwargs)
    assert_equals_reference(batch, torch.float32, 2e-5, **kwargs)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_an_empty_mask_gives_zero_with_a_graph_and_the_same_metric_names(num_tokens):
    batch = make_batch(np.random.default_rng(0), num_tokens, masked=1.0)
    outputs, gradient = run(batch, **FULL)
    assert outputs.loss.item() == 0.0 and gradient.tolist() == [0.0] * num_tokens
    assert set(outputs.metrics) == METRICS
    assert all(value.item() == 0.0 for value in outputs.metrics.values())


def test_metrics_are_detached_scalars_with_the_same_names_on_every_call():
    rng = np.random.default_rng(1)
    for batch in [make_batch(rng, 30), make_batch(rng, 30, weighted=False) | {"refs": None}]:
        outputs, _ = run(batch, replay_tau=0.1)
        assert set(outputs.metrics) == METRICS
        assert all(value.ndim == 0 and not value.requires_grad for value in outputs.metrics.values())


def test_trust_region_metrics_count_the_dropped_tokens():
    batch = {
        "trainer": np.log([0.9, 0.1, 0.1, 0.5, 0.9]),
        "inference": np.log([0.5, 0.5, 0.5, 0.5, 0.5]),
        "advantages": np.array([1.0, -1.0, 0.0, 1.0, 1.0]),
        "mask": np.array([True, True, True, True, False]),
    }
    metrics = run(batch, torch.float64)[0].metrics
    shares = {name: metrics[name].item() for name in ("is_masked", "is_masked_low", "is_masked_high")}
    assert shares == {"is_masked": 0.75, "is_masked_low": 0.25, "is_masked_high": 0.25}
    assert metrics["masked_advantage_positive"].item() == pytest.approx(1 / 3)
    assert metrics["masked_advantage_negative"].item() == pytest.approx(1 / 3)
    exact = reference_mismatch_kl(batch["trainer"], batch["inference"], [True, True, True, False, False])
    assert metrics["masked_mismatch_kl"].item() == pytest.approx(exact, rel=1e-12)


def overflow_batch(advantage, mask):
    return {
        "trainer": np.array([0.0, -1.0]),
        "inference": np.array([-100.0, -1.1]),
        "advantages": np.array([advantage, 1.0]),
        "mask": np.array(mask),
    }


@pytest.mark.parametrize(("advantage", "mask"), [(1.0, [False, True]), (1.0, [True, True]), (0.0, [False, True])])
def test_where_a_dropped_or_masked_token_overflows_ours_is_finite(advantage, mask):
    """Upstream's is NaN there."""
    batch = overflow_batch(advantage, mask)
    outputs, gradient = run(batch)
    wanted = run_reference(batch)
    assert outputs.loss.item() == pytest.approx(wanted.loss, rel=1e-6)
    assert gradient.tolist() == pytest.approx(wanted.gradient, rel=1e-6)
    assert all(value.isfinite() for value in outputs.metrics.values())


@pytest.mark.parametrize("advantage", [-1.0, -3.0, -1e-3])
def test_where_a_kept_token_overflows_only_the_kl_term_pulls_it(advantage):
    outputs, gradient = run(overflow_batch(advantage, [True, True]), ratio_cap=math.inf)
    assert outputs.loss.item() > 1e34 and outputs.loss.isfinite()
    assert gradient.tolist() == pytest.approx([2 * 1e-3 * 100, -math.exp(0.1) + 2e-3 * 0.1], rel=1e-5)
    assert all(value.isfinite() for value in outputs.metrics.values())


@pytest.mark.parametrize("log_ratio", [88.72, 80.0, -100.0])
def test_ratios_that_fp32_can_hold_are_not_bounded(log_ratio):
    batch = {"trainer": [-1.0], "inference": [-1.0 - log_ratio], "advantages": [-1.0], "mask": [True]}
    outputs, gradient = run(batch, kl_tau=0.0, ratio_cap=math.inf)
    exact = math.exp(np.float32(-1.0) - np.float32(-1.0 - log_ratio))
    assert outputs.loss.item() == pytest.approx(exact, rel=1e-5)
    assert gradient.item() == pytest.approx(exact, rel=1e-5)


def test_minus_infinity_on_a_kept_token_stays_finite():
    batch = {
        "trainer": [-math.inf, -1.0],
        "inference": [-1.0, -math.inf],
        "advantages": [1.0, -1.0],
        "mask": [True] * 2,
    }
    outputs, gradient = run(batch, replay_tau=0.1)
    assert outputs.loss.isfinite() and gradient.isfinite().all()


def test_nothing_on_a_masked_token_reaches_value_or_gradient():
    clean = make_batch(np.random.default_rng(2), 16, masked=0.5)
    wanted, wanted_gradient = run(clean, **FULL)
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {name: np.where(clean["mask"], values, bad) for name, values in clean.items() if name != "mask"}
        outputs, gradient = run(dirty | {"mask": clean["mask"]}, **FULL)
        assert torch.equal(outputs.loss, wanted.loss) and torch.equal(gradient, wanted_gradient)
        assert outputs.metrics == wanted.metrics


class OldRecord:
    """PRIME-RL 0.4 to 0.6: the teacher has another name, and there are no weights."""

    def __init__(self, inputs):
        self.trainer_logprobs, self.inference_logprobs = inputs.trainer_logprobs, inputs.inference_logprobs
        self.advantages, self.loss_mask = inputs.advantages, inputs.loss_mask
        self.teacher_logprobs = inputs.ref_logprobs


def test_records_of_older_versions_are_read():
    def read_old(inputs: Any, **kwargs: Any) -> LossOutputs:
        old: Any = OldRecord(inputs)
        return composer_loss(old, **kwargs)

    batch = make_batch(np.random.default_rng(6), 20, weighted=False, taught=1.0)
    old, old_gradient = run(batch, loss=read_old, **FULL)
    new, new_gradient = run(batch, **FULL)
    assert torch.equal(old.loss, new.loss) and torch.equal(old_gradient, new_gradient)
    assert new.metrics["num_teacher_tokens"] > 0


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own, on importing inductor
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler"))],
)
def test_compiled_and_plain_give_the_same(backend):
    torch._dynamo.reset()
    compiled = torch.compile(composer_loss, fullgraph=True, dynamic=True, backend=backend)
    for seed, kwargs in enumerate([FULL, {}, FULL]):
        batch = make_batch(np.random.default_rng(seed), 50 + seed)
        plain, plain_gradient = run(batch, **kwargs)
        quick, quick_gradient = run(batch, loss=compiled, **kwargs)
        torch.testing.assert_close(quick.loss, plain.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(quick_gradient, plain_gradient, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(quick.metrics, plain.metrics, rtol=1e-5, atol=1e-6)
    dirty, dirty_gradient = run(overflow_batch(-1.0, [True, True]), loss=compiled)
    assert dirty.loss.isfinite() and dirty_gradient.isfinite().all()
