"""What a trainer with context parallelism or bf16 logprobs relies on, and which arguments are refused."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from composer_prime.errors import ConfigError
from composer_prime.losses.composer import composer_loss
from composer_prime.losses.records import LossInputs
from tests.losses.test_composer import FULL, make_batch, run

SUMS = ("policy_loss", "kl_loss", "replay_loss", "num_teacher_tokens")
OVER_TRAINED = ("mismatch_kl", "is_masked", "is_masked_low", "is_masked_high")
OVER_DROPPED = ("masked_mismatch_kl", "masked_advantage_positive", "masked_advantage_negative")


@pytest.mark.parametrize("cuts", [(32,), (1, 63), (16, 32, 48), (0, 7, 7, 64)])
@pytest.mark.parametrize("weighted", [True, False])
def test_shards_of_a_sequence_add_up_to_the_whole(cuts, weighted):
    batch: dict[str, Any] = make_batch(np.random.default_rng(len(cuts)), 64, weighted=weighted)
    whole, gradient = run(batch, torch.float64, **FULL)
    bounds = list(zip((0, *cuts), (*cuts, 64), strict=True))
    shards: list[dict[str, Any]] = [
        {name: None if values is None else values[start:stop] for name, values in batch.items()}
        for start, stop in bounds
    ]
    parts = [run(shard, torch.float64, **FULL) for shard in shards]
    assert sum(part.loss.item() for part, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.equal(torch.cat([part for _, part in parts]), gradient)
    for name in SUMS:
        added = sum(part.metrics[name].item() for part, _ in parts)
        assert added == pytest.approx(whole.metrics[name].item(), rel=1e-12), name
    trained = [int(shard["mask"].sum()) for shard in shards]
    dropped = [count * part.metrics["is_masked"].item() for count, (part, _) in zip(trained, parts, strict=True)]
    kept = [count - out for count, out in zip(trained, dropped, strict=True)]
    for names, weights in ((OVER_TRAINED, trained), (OVER_DROPPED, dropped), (("unmasked_mismatch_kl",), kept)):
        for name in names:
            total = sum(w * part.metrics[name].item() for w, (part, _) in zip(weights, parts, strict=True))
            mean = total / max(sum(weights), 1)
            assert mean == pytest.approx(whole.metrics[name].item(), rel=1e-9), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_stream_in_half_precision_is_as_if_it_had_been_cast_first(dtype):
    batch = make_batch(np.random.default_rng(12), 200)

    def inputs(cast: bool) -> LossInputs:
        def stream(name: str) -> Any:
            values = torch.tensor(batch[name]).to(dtype)
            return values.float() if cast else values

        return LossInputs(
            trainer_logprobs=stream("trainer").requires_grad_(),
            inference_logprobs=stream("inference"),
            advantages=stream("advantages"),
            loss_mask=torch.tensor(batch["mask"]),
            ref_logprobs=stream("refs"),
            loss_weights=stream("weights"),
        )

    half, single = inputs(cast=False), inputs(cast=True)
    ours, theirs = (composer_loss(one, **FULL) for one in (half, single))
    assert ours.loss.dtype == torch.float32 and torch.equal(ours.loss, theirs.loss)
    assert ours.metrics == theirs.metrics
    (our_gradient,) = torch.autograd.grad(ours.loss, half.trainer_logprobs)
    (their_gradient,) = torch.autograd.grad(theirs.loss, single.trainer_logprobs)
    assert our_gradient.dtype == dtype and torch.equal(our_gradient, their_gradient.to(dtype))


def test_the_sampling_masks_logprobs_change_nothing():
    batch = make_batch(np.random.default_rng(3), 20)

    def newer(inputs: Any, **kwargs: Any) -> Any:
        inputs.trainer_mask_logprobs = torch.full((20, 8), torch.nan)
        inputs.inference_mask_logprobs = torch.full((20, 8), -torch.inf)
        return composer_loss(inputs, **kwargs)

    with_them, gradient = run(batch, loss=newer, **FULL)
    without, same = run(batch, **FULL)
    assert torch.equal(with_them.loss, without.loss) and torch.equal(gradient, same)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("teacher_tau", "use replay_tau"),
        ("eps", "use ipo_threshold with trust_region"),
        ("ipo_mask_low", "use dppo_mask_low and dppo_mask_high"),
        ("token_mask_high", "use dppo_mask_low and dppo_mask_high"),
        ("type", "leave it out"),
    ],
)
def test_an_argument_of_another_loss_is_refused_with_what_to_use(name, instead):
    batch = make_batch(np.random.default_rng(0), 4)
    with pytest.raises(
        ConfigError, match=f"{name}, which composer_loss doesn't know: {instead}.*it takes dppo_mask_low"
    ):
        run(batch, torch.float32, composer_loss, **{name: 0.5})
    with pytest.raises(TypeError, match=name):
        inspect.signature(composer_loss).bind(None, **{name: 0.5})


@pytest.mark.parametrize("name", ["dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau", "replay_tau", "replay_clip"])
def test_a_negative_setting_is_refused(name):
    with pytest.raises(ConfigError, match=r"has -0\.1, the least that composer_loss takes is 0"):
        run(make_batch(np.random.default_rng(0), 4), torch.float32, composer_loss, **{name: -0.1})
