"""Any loss inside ours: value, gradient and metrics are its own to the bit, and the replay term is composer_loss's.

PRIME-RL's own losses: of the stand-in, which has those after `default` was removed, and of a checkout if there is one.
"""

import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses.composer import composer_loss, replay_loss
from composer_prime.losses.records import LossInputs, LossOutputs
from composer_prime.sites.prime_rl.outer import loss
from tests.sites.prime_rl.standin_runs import STANDIN

PATH = "composer_prime.sites.prime_rl.outer.loss"
MINE = f"{__name__}.my_loss"
NUM_BATCHES = 100


def my_loss(inputs: Any, *, strength: float = 1.0) -> LossOutputs:
    """A user's own."""
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    value = -strength * (inputs.advantages * ratio)[inputs.loss_mask].sum()
    return LossOutputs(loss=value, metrics={"mine": ratio.detach().mean()})


def upstream_modules() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "prime_rl"]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in's module of losses, alone in this process."""
    for name in upstream_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STANDIN))
    yield importlib.import_module("prime_rl.trainer.rl.loss")
    for name in upstream_modules():
        del sys.modules[name]


@pytest.fixture
def checkout() -> ModuleType:
    """A checkout's module of losses."""
    if not os.environ.get("PRIME_RL_SRC"):
        pytest.skip("PRIME_RL_SRC names no PRIME-RL checkout")
    from tests.sites.prime_rl.real_runs import upstream

    upstream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its imports warn of is not ours
        return importlib.import_module("prime_rl.trainer.rl.loss")


def batches(record: type[Any]) -> Iterator[Any]:
    """A hundred sequences in upstream's record, weighted and not, some with nothing to train on."""
    generator, randomness = torch.Generator().manual_seed(0), random.Random(0)
    fields = getattr(record, "__dataclass_fields__", ())
    for number in range(NUM_BATCHES):
        length, dtype = randomness.randint(1, 64), (torch.float32, torch.float64)[number % 2]
        trainer = -3 * torch.rand(length, generator=generator, dtype=dtype)
        streams: dict[str, Tensor | None] = {
            "trainer_logprobs": trainer.clone().requires_grad_(),
            "inference_logprobs": trainer + 0.4 * torch.randn(length, generator=generator, dtype=dtype),
            "advantages": torch.randn(length, generator=generator, dtype=dtype),
            "loss_mask": torch.rand(length, generator=generator) < (0.7, 0.0)[number % 10 == 9],
            "ref_logprobs": -3 * torch.rand(length, generator=generator, dtype=dtype),
            "loss_weights": torch.rand(length, generator=generator, dtype=dtype) if number % 3 else None,
        }
        if "trainer_mask_logprobs" in fields:
            masked = -3 * torch.rand(length, 4, generator=generator, dtype=dtype)
            streams |= {"trainer_mask_logprobs": masked.requires_grad_(), "inference_mask_logprobs": masked.detach()}
        yield record(**streams)


def graded(function: Any, inputs: Any) -> tuple[Tensor, Tensor | None, Any]:
    """(value, gradient, what was returned)"""
    inputs.trainer_logprobs.grad = None
    outputs = function(inputs)
    if outputs.loss.requires_grad:
        outputs.loss.backward()
    return outputs.loss.detach(), inputs.trainer_logprobs.grad, outputs


def assert_the_same(ours: Any, theirs: Any, inputs: Any) -> None:
    (value, gradient, outputs), (wanted, wanted_gradient, wanted_outputs) = graded(ours, inputs), graded(theirs, inputs)
    assert type(outputs) is type(wanted_outputs) and value.dtype == wanted.dtype and torch.equal(value, wanted)
    assert (gradient is None) == (wanted_gradient is None)
    if gradient is not None and wanted_gradient is not None:
        assert torch.equal(gradient, wanted_gradient)
    assert outputs.metrics.keys() == wanted_outputs.metrics.keys()
    for name, metric in outputs.metrics.items():
        assert torch.equal(metric, wanted_outputs.metrics[name]), name


def check_every_loss_of(upstream: ModuleType) -> set[str]:
    """Compares each of upstream's own as its trainer makes it, plain and wrapped, and one of a user; their names."""
    records = {record.model_fields["type"].default: record for record in get_args(get_args(upstream.LossConfig)[0])}
    custom = records.pop("custom")
    for name, record in records.items():
        for settings in ({}, {"adv_tau": 0.7}):
            plain = upstream.setup_rl_loss_fn(record(**settings))
            wrapped = upstream.setup_rl_loss_fn(custom(import_path=PATH, kwargs={"inner": name, **settings}))
            for inputs in batches(upstream.LossInputs):
                assert_the_same(getattr(wrapped, "loss", wrapped), getattr(plain, "loss", plain), inputs)
    for inputs in batches(upstream.LossInputs):
        assert_the_same(lambda one: loss(one, inner=MINE, strength=0.5), lambda one: my_loss(one, strength=0.5), inputs)
        assert_the_same(lambda one: loss(one, replay_tau=0.1), lambda one: composer_loss(one, replay_tau=0.1), inputs)
    return {*records}


def test_every_loss_of_a_newer_upstream_is_its_own_to_the_bit(standin: ModuleType) -> None:
    assert check_every_loss_of(standin) == {"ipo", "icepop", "ppo", "cispo"}


@pytest.mark.prime_rl
def test_every_loss_of_the_checkout_is_its_own_to_the_bit(checkout: ModuleType) -> None:
    names = check_every_loss_of(checkout)
    assert "ipo" in names


def check_replay_beside(names: set[str], upstream: ModuleType) -> None:
    for name in names:
        for inputs in batches(upstream.LossInputs):
            alone, alone_gradient, outputs = graded(lambda one, name=name: loss(one, inner=name), inputs)
            replay, replay_gradient, _ = graded(lambda one: replay_loss(one, replay_tau=0.3, replay_clip=2.0), inputs)
            both, gradient, taught = graded(
                lambda one, name=name: loss(one, inner=name, replay_tau=0.3, replay_clip=2.0), inputs
            )
            torch.testing.assert_close(both, alone + replay)
            parts = [one for one in (alone_gradient, replay_gradient) if one is not None]
            torch.testing.assert_close(gradient, torch.stack(parts).sum(0))
            assert taught.metrics.keys() == outputs.metrics.keys() | {"replay_loss", "num_teacher_tokens"}
            assert torch.equal(taught.metrics["replay_loss"], replay)


def test_replay_is_added_to_another_loss(standin: ModuleType) -> None:
    check_replay_beside({"ipo", "cispo", MINE}, standin)


@pytest.mark.prime_rl
def test_replay_is_added_to_the_checkouts_losses(checkout: ModuleType) -> None:
    check_replay_beside({"ipo"}, checkout)


def test_the_replay_term_is_the_one_of_composer_loss() -> None:
    settings: dict[str, Any] = {"replay_tau": 0.3, "replay_clip": 2.0}
    for inputs in batches(LossInputs):
        value, gradient, outputs = graded(lambda one: composer_loss(one, **settings), inputs)
        plain, plain_gradient, _ = graded(composer_loss, inputs)
        replay, replay_gradient, alone = graded(lambda one: replay_loss(one, **settings), inputs)
        torch.testing.assert_close(plain + replay, value)
        assert plain_gradient is not None and replay_gradient is not None
        torch.testing.assert_close(plain_gradient + replay_gradient, gradient)
        for name in ("replay_loss", "num_teacher_tokens"):
            torch.testing.assert_close(alone.metrics[name], outputs.metrics[name])


def test_without_a_prime_rl_its_losses_cant_be_had(standin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (inputs, *_) = batches(LossInputs)
    monkeypatch.delattr(standin, "setup_rl_loss_fn")
    with pytest.raises(ConfigError, match="this PRIME-RL has no setup_rl_loss_fn: name a function by its path"):
        loss(inputs, inner="ppo", adv_tau=0.1)
    for name in upstream_modules():
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="this process isn't PRIME-RL's trainer"):
        loss(inputs, inner="ppo", adv_tau=0.2)
