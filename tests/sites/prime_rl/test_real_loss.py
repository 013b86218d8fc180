"""Our loss beside upstream's own, on a thousand random batches: alone, and as a part of upstream's `compute_loss`."""

import os
import random
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.losses.composer import composer_loss
from tests.sites.prime_rl.real_runs import upstream

pytestmark = [
    pytest.mark.prime_rl,
    pytest.mark.skipif(not os.environ.get("PRIME_RL_SRC"), reason="PRIME_RL_SRC names no PRIME-RL checkout"),
]

NUM_BATCHES = 1000
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """Upstream's module of losses."""
    upstream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its imports warn of is not ours
        import prime_rl.trainer.rl.loss as loss  # pyright: ignore[reportMissingImports]
    return loss


def settings(randomness: random.Random) -> dict[str, float]:
    """The loss's own settings, by the names that both have."""
    return {
        "dppo_mask_low": randomness.choice((0.0, 0.05, 0.2)),
        "dppo_mask_high": randomness.choice((0.0, 0.05, 0.2)),
        "adv_tau": randomness.choice((0.5, 1.0)),
        "kl_tau": randomness.choice((0.0, 1e-3, 0.1)),
    }


def sequence(generator: torch.Generator, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One packed sequence; probabilities near each other, as between two ages of a policy."""
    trainer = -3 * torch.rand(length, generator=generator, dtype=dtype)
    return {
        "trainer_logprobs": trainer,
        "inference_logprobs": trainer + 0.4 * torch.randn(length, generator=generator, dtype=dtype),
        "advantages": torch.randn(length, generator=generator, dtype=dtype),
        "loss_mask": torch.rand(length, generator=generator) < 0.7,
        "ref_logprobs": -3 * torch.rand(length, generator=generator, dtype=dtype),
    }


def weights(generator: torch.Generator, length: int, dtype: torch.dtype) -> Tensor:
    """Per-token weights, a third of them 0."""
    drawn = torch.rand(length, generator=generator, dtype=dtype)
    return drawn * (torch.rand(length, generator=generator) > 1 / 3)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-6 of the larger of 1 and the value."""
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_value_and_gradient_are_upstreams_on_a_thousand_batches(theirs: ModuleType) -> None:
    from prime_rl.configs.trainer import DefaultLossConfig  # pyright: ignore[reportMissingImports]

    generator, randomness = torch.Generator().manual_seed(0), random.Random(0)
    for number in range(NUM_BATCHES):
        chosen, dtype = settings(randomness), (torch.float32, torch.float64)[number % 2]
        length = randomness.randint(1, 64)
        stream = sequence(generator, length, dtype)
        weighted = weights(generator, length, dtype) if number % 3 else None

        def graded(loss: Any, stream: dict[str, Tensor] = stream, weighted: Any = weighted) -> tuple[Tensor, Tensor]:
            trainer = stream["trainer_logprobs"].clone().requires_grad_()
            inputs = theirs.LossInputs(**stream | {"trainer_logprobs": trainer}, loss_weights=weighted)
            value = loss(inputs)
            value.backward()
            assert trainer.grad is not None
            return value.detach(), trainer.grad

        ours = graded(lambda inputs, chosen=chosen: composer_loss(inputs, **chosen).loss)
        config = DefaultLossConfig(**chosen)
        reference = graded(lambda inputs, config=config: theirs.default_loss_fn(inputs, config).loss)
        assert_close(ours[0].to(dtype), reference[0])
        assert_close(ours[1], reference[1])


def test_it_passes_through_compute_loss_with_rl_ce_and_ref_kl_parts(theirs: ModuleType) -> None:
    from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig  # pyright: ignore[reportMissingImports]

    path = "composer_prime.sites.prime_rl.loss.composer_loss"
    custom = theirs.setup_rl_loss_fn(CustomLossConfig(type="custom", import_path=path, kwargs={}))
    default = theirs.setup_rl_loss_fn(DefaultLossConfig())
    generator, randomness = torch.Generator().manual_seed(1), random.Random(1)
    for _ in range(NUM_BATCHES):
        lengths = [randomness.randint(1, 24) for _ in range(randomness.randint(1, 4))]
        streams = [sequence(generator, length, torch.float32) for length in lengths]
        parts = {
            name: [weights(generator, length, torch.float32) for length in lengths]
            if randomness.random() < 0.7
            else None
            for name in ("rl_weights", "ce_weights", "ref_kl_weights")
        }
        scales = {name: randomness.randint(1, 50) for name in ("rl_scale", "ce_scale", "ref_kl_scale")}

        def graded(
            rl_loss_fn: Any, streams: Any = streams, parts: Any = parts, scales: Any = scales
        ) -> tuple[Tensor, list[Tensor | None], set[str]]:
            trainer = [stream["trainer_logprobs"].clone().requires_grad_() for stream in streams]
            columns = {name: [stream[name] for stream in streams] for name in streams[0]}
            loss, metrics = theirs.compute_loss(
                **columns | {"trainer_logprobs": trainer}, **parts, **scales, rl_loss_fn=rl_loss_fn
            )
            loss.backward()
            return loss.detach(), [one.grad for one in trainer], set(metrics)

        ours, reference = graded(custom), graded(default)
        assert_close(ours[0], reference[0])
        for mine, yours in zip(ours[1], reference[1], strict=True):
            assert (mine is None) == (yours is None)
            if mine is not None and yours is not None:
                assert_close(mine, yours)
        assert reference[2] <= ours[2]  # upstream's metrics under upstream's names, and ours beside them
