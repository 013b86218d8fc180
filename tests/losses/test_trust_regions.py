"""The cap on the ratio, the trust regions beside DPPO, ref_kl and score centering, against formulas in plain Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from composer_prime.errors import ConfigError
from composer_prime.losses.composer import composer_loss, replay_loss
from composer_prime.losses.records import LossInputs
from composer_prime.losses.trust_regions import keeps_low
from tests.losses.test_composer import make_batch, run

ALONE: dict[str, Any] = {"kl_tau": 0.0}


def one_token(trainer, inference, advantage, **more):
    return {"trainer": [trainer], "inference": [inference], "advantages": [advantage], "mask": [True], **more}


# --- the cap ----------------------------------------------------------------------------------------------------------


def test_a_stale_token_with_a_negative_advantage_is_held_at_the_cap_and_only_the_kl_pulls():
    stale = one_token(-5.0, -15.0, -1.0)
    outputs, gradient = run(stale, torch.float64)
    assert gradient.item() == pytest.approx(2 * 1e-3 * 10)
    assert outputs.metrics["policy_loss"].item() == pytest.approx(20.0)
    assert outputs.metrics["is_capped"].item() == 1.0
    _, uncapped = run(stale, torch.float64, ratio_cap=math.inf)
    assert uncapped.item() == pytest.approx(math.exp(10) + 0.02)


@pytest.mark.parametrize("logprobs", [(-1.0, -math.inf), (-math.inf, -1.0), (-math.inf, -math.inf), (-1.0, math.inf)])
@pytest.mark.parametrize("cap", [20.0, math.inf])
def test_an_infinite_logprob_pulls_with_less_than_a_nat_of_kl(logprobs, cap):
    outputs, gradient = run(one_token(logprobs[0], logprobs[1], 0.0), ratio_cap=cap)
    assert outputs.loss.isfinite() and abs(gradient.item()) <= 2e-3 * 104


def test_the_cap_acts_on_replay_too():
    batch = one_token(-5.0, -15.0, 0.0, refs=[-7.0])
    for loss in (composer_loss, replay_loss):
        outputs, gradient = run(
            batch, torch.float64, loss=loss, replay_tau=0.5, **(ALONE if loss == composer_loss else {})
        )
        assert outputs.metrics["replay_loss"].item() == pytest.approx(0.5 * 2 * 20)
        assert gradient.item() == 0.0


# --- regions ----------------------------------------------------------------------------------------------------------


def by_hand(region, trainer, inference, adv, *, threshold=0.1, low=0.2, high=5.0):
    """(value, gradient) of the policy term at one token."""
    ratio, moved = math.exp(trainer - inference), math.exp(trainer) - math.exp(inference)
    if region == "cispo":
        weight = min(max(ratio, low), high)
        return -weight * adv * trainer, -weight * adv
    keep = abs(moved) <= threshold if region == "ipo" else low <= ratio <= high
    if not keep:
        return 0.0, 0.0
    return -adv * min(ratio, 20.0), -adv * ratio if ratio <= 20 else 0.0


@pytest.mark.parametrize(
    ("region", "settings", "bounds"),
    [
        ("ipo", {}, {}),
        ("ipo", {"ipo_threshold": 0.3}, {"threshold": 0.3}),
        ("icepop", {}, {}),
        ("icepop", {"ratio_low": 0.5, "ratio_high": 2.0}, {"low": 0.5, "high": 2.0}),
        ("cispo", {}, {"low": 0.0}),
        ("cispo", {"ratio_low": 0.5, "ratio_high": 1.2}, {"low": 0.5, "high": 1.2}),
    ],
)
def test_value_and_gradient_of_a_region_equal_its_formula(region, settings, bounds):
    batch = make_batch(np.random.default_rng(0), 400, masked=0.2)
    outputs, gradient = run(batch, torch.float64, trust_region=region, **ALONE, **settings)
    value, wanted = 0.0, []
    for trainer, inference, adv, trained, weight in zip(
        *(batch[name].tolist() for name in ("trainer", "inference", "advantages", "mask", "weights")), strict=True
    ):
        one, slope = by_hand(region, trainer, inference, adv, **bounds) if trained else (0.0, 0.0)
        value += weight * one
        wanted.append(weight * slope)
    assert outputs.loss.item() == pytest.approx(value, rel=1e-6)
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert (outputs.metrics["is_masked"].item() > 0) == (region != "cispo")


@pytest.mark.parametrize("pull", ["replay_tau", "ref_kl_tau"])
@pytest.mark.parametrize(
    ("region", "trainer", "inference", "advantage"),
    [("dppo", 0.1, 0.6, -1.0), ("ipo", 0.1, 0.6, 1.0), ("ipo", 0.6, 0.1, 1.0), ("icepop", 0.6, 0.1, 1.0)],
)
def test_a_dropped_token_adds_no_policy_or_teacher_term_and_keeps_its_kl(region, trainer, inference, advantage, pull):
    batch = one_token(math.log(trainer), math.log(inference), advantage, refs=[-2.0])
    outputs, gradient = run(batch, torch.float64, trust_region=region, **{pull: 1.0})
    log_ratio = math.log(trainer / inference)
    assert outputs.metrics["is_masked"].item() == 1.0
    assert outputs.loss.item() == pytest.approx(1e-3 * log_ratio**2)
    assert gradient.item() == pytest.approx(2e-3 * log_ratio)


def test_keeps_low_is_a_fall_of_at_most_low_inside_the_mask():
    trainer = torch.tensor([0.1, 0.5, 0.9, 0.1, 0.1]).log()
    inference = torch.tensor([0.5, 0.5, 0.1, 0.5, math.nan]).log()
    mask = torch.tensor([True, True, True, False, False])
    assert keeps_low(trainer, inference, mask, 0.2).tolist() == [False, True, True, False, False]
    assert torch.equal(keeps_low(trainer, inference, mask, math.inf), mask)


# --- ref_kl and centering ---------------------------------------------------------------------------------------------


def test_ref_kl_is_replay_without_a_clip_and_has_its_own_metric():
    batch = one_token(-1.0, -1.2, 0.0, refs=[-30.0])
    outputs, gradient = run(batch, torch.float64, ref_kl_tau=0.5, **ALONE)
    wanted = 0.5 * 29 * math.exp(0.2)
    assert outputs.loss.item() == outputs.metrics["ref_kl_loss"].item() == pytest.approx(wanted)
    assert gradient.item() == pytest.approx(wanted) and outputs.metrics["replay_loss"].item() == 0.0


def centered_inputs(num_tokens=20, width=4):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    trainer, sampler = draw(num_tokens, width).log_softmax(-1), draw(num_tokens, width).log_softmax(-1)
    sampler[::3, -1], trainer[::3, -1] = -math.inf, 0.0
    return LossInputs(
        trainer_logprobs=trainer[:, 0].clone().requires_grad_(),
        inference_logprobs=sampler[:, 0].clone(),
        advantages=draw(num_tokens),
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.7,
        loss_weights=draw(num_tokens).abs(),
        trainer_mask_logprobs=trainer.clone().requires_grad_(),
        inference_mask_logprobs=sampler,
    )


def test_score_centering_subtracts_the_samplers_expected_score():
    inputs = centered_inputs()
    settings: dict[str, Any] = {"trust_region": "ipo", "ipo_threshold": 0.3, "adv_tau": 0.7, "ratio_cap": 3.0}
    outputs = composer_loss(inputs, score_centering=True, **settings)
    plain = composer_loss(inputs, **settings)
    p, q = inputs.trainer_mask_logprobs, inputs.inference_mask_logprobs
    assert p is not None and q is not None and inputs.loss_weights is not None
    value, wanted = 0.0, torch.zeros_like(p)
    for n, m in np.ndindex(*p.shape):
        pv, qv = math.exp(p[n, m].item()), math.exp(q[n, m].item())
        if not inputs.loss_mask[n] or qv == 0 or abs(pv - qv) > 0.3 or pv / qv > 3:
            continue
        wanted[n, m] = 0.7 * inputs.loss_weights[n].item() * inputs.advantages[n].item() * qv * (pv / qv)
        value += wanted[n, m].item() * math.log(pv)
    assert (outputs.loss - plain.loss).item() == pytest.approx(value, rel=1e-9)
    (gradient,) = torch.autograd.grad(outputs.loss, p)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    assert wanted.count_nonzero() > 10


def test_centering_needs_the_mask_and_reads_nothing_outside_it():
    inputs = centered_inputs()
    settings: dict[str, Any] = {"trust_region": "ipo", "score_centering": True}
    wanted = composer_loss(inputs, **settings).loss
    assert inputs.trainer_mask_logprobs is not None and inputs.inference_mask_logprobs is not None
    with torch.no_grad():
        inputs.trainer_mask_logprobs[~inputs.loss_mask] = math.nan
        inputs.inference_mask_logprobs[~inputs.loss_mask] = math.nan
    outputs = composer_loss(inputs, **settings)
    assert torch.equal(outputs.loss, wanted)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_mask_logprobs)
    assert gradient.isfinite().all() and not gradient[~inputs.loss_mask].any()
    inputs.trainer_mask_logprobs = None
    assert torch.equal(composer_loss(inputs, **settings).loss, composer_loss(inputs, trust_region="ipo").loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio_cap": 0.5}, "ratio_cap .0.5. must be at least 1"),
        ({"trust_region": "ppo"}, "trust_region .'ppo'. is none of dppo, ipo, icepop, cispo"),
        ({"trust_region": "icepop", "ratio_low": 6.0}, "ratio_high .5.0. must be above 0 and at least ratio_low .6.0."),
        ({"trust_region": "icepop", "ratio_low": 0.0}, "ratio_low .0.0. must be above 0"),
        ({"score_centering": True}, "score_centering needs trust_region ipo, and it is dppo"),
        ({"replay_tau": 1.0, "ref_kl_tau": 1.0}, "read the same logprobs: set one of them to 0"),
    ],
)
def test_a_setting_that_makes_no_loss_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(one_token(-1.0, -1.0, 1.0), **settings)
