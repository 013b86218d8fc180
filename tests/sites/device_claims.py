"""Claims about an embedded site whose models are on another device: a GPU, or the simulated one of tests/outer.

Both refuse tensors of the CPU among their own, and compute in fp32 what the CPU does: the numbers must agree.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from composer_prime.config import SiteSettings
from composer_prime.config.paths import AVERAGE
from composer_prime.sites.embedded import model as model_module
from composer_prime.sites.embedded.batches import write_batch
from composer_prime.sites.embedded.broadcasts import publish, weights
from composer_prime.sites.embedded.inference.engine import Completion, GenerateRequest, Sampling
from composer_prime.sites.embedded.inference.transformers_engine import TransformersEngine
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.trainer import Trainer
from tests.outer.device_claims import Device
from tests.outer.late_device.device import LateDevice
from tests.sites.letters_site import letters_site
from tests.sites.test_distilling import taught_samples
from tests.sites.tiny_folder import save_random_tiny
from tests.sites.tiny_policy import random_policy
from tiny_policy.built_in.models import BUILT_IN, BuiltIn
from tiny_policy.built_in.warm_ups import ToolWarmUpConfig, WarmUpConfig
from tiny_policy.qwen3 import ARCHITECTURE

PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8), (1, 2, 3)]


def name_of(device: Device) -> str:
    """torch's name of it; a simulated one is told not to be late, which is the affair of tests/outer."""
    if isinstance(device, LateDevice):
        device.delay(0)
    return device.at(0).type


def train(root: Path, device: str, steps: int, *, resume: bool = False) -> SiteSettings:
    """Train a random policy on that device, both terms of teachers and an average of the policies among it."""
    settings = letters_site(
        root,
        max_steps=steps,
        resume=resume,
        seq_len=32,
        trainer={"optim": {"lr": 1e-2}, "loss": {"kwargs": {"kl_tau": 0.05}}, "distill": {"top_k": 5}},
        ckpt={"interval": 2},
        hints={"teacher": "ema", "ema_decay": 0.75},
    )
    for step in range(steps):
        write_batch(settings.paths.rollouts, step, taught_samples(step))
    model = random_policy()
    model.to(device)  # pyright: ignore[reportArgumentType] (transformers wraps it)
    trainer = Trainer(settings, model, None)
    try:
        trainer.start()
        assert trainer.train() is not None
        assert {one.device.type for one in trainer.learner.parameters} == {device}
        moments = [one for state in trainer.learner.optimizer.state_dict()["state"].values() for one in state.values()]
        assert {one.device.type for one in moments} == {device}
    finally:
        trainer.close()
    return settings


def published(settings: SiteSettings, version: int, below: str = "") -> dict[str, Tensor]:
    return load_file(settings.paths.broadcast(version) / below / "model.safetensors")


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=2e-4)  # a step moves each by 1e-2


def a_site_trains_as_on_the_cpu_and_either_goes_on_from_the_others_checkpoint(device: Device) -> None:
    name = name_of(device)
    with tempfile.TemporaryDirectory() as folder:
        expected = train(Path(folder) / "cpu", "cpu", 4)
        for first, then in [(name, "cpu"), ("cpu", name)]:
            root = Path(folder) / f"{first}-{then}"
            half = train(root, first, 2)
            state = torch.load(half.paths.checkpoint(2) / "state.pt", weights_only=True)
            assert {one.device.type for one in [*state["model"].values(), *state["average"].values()]} == {"cpu"}
            half.paths.result.unlink()
            settings = train(root, then, 4, resume=True)
            assert_close(published(settings, 4), published(expected, 4))
            assert_close(published(settings, 4, AVERAGE), published(expected, 4, AVERAGE))


def the_engine_generates_and_scores_as_on_the_cpu_also_with_new_weights(device: Device) -> None:
    name = name_of(device)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = save_random_tiny(Path(folder) / "model")
        later = publish(load_policy(save_random_tiny(Path(folder) / "later", seed=1)), Path(folder) / "broadcasts", 3)
        ours, theirs = (asyncio.run(answers(model_dir, later, where)) for where in (name, "cpu"))
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.policy_version) == (other.token_ids, other.policy_version)
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
            assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
            for mine, wanted in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
                assert mine.keys() == wanted.keys()
                torch.testing.assert_close([*mine.values()], [wanted[each] for each in mine], rtol=1e-4, atol=1e-4)


async def answers(model_dir: Path, later: Path, device: str) -> list[Completion]:
    """What is sampled, and scored, before and after new weights."""
    failures: list[BaseException] = []
    engine = TransformersEngine(
        model_dir, seed=0, max_batch_size=4, max_model_len=64, on_failure=failures.append, device=device
    )
    await engine.start()
    try:
        first = await asyncio.gather(*map(engine.generate, requests()))
        await engine.load_weights(later, version=3)
        second = await asyncio.gather(*map(engine.generate, requests()))
    finally:
        await engine.close()
    assert not failures
    return [*first, *second]


def requests() -> list[GenerateRequest]:
    sampled = [
        GenerateRequest(str(number), prompt, Sampling(temperature=0.7, top_p=0.9, max_tokens=6 + number, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]
    return [*sampled, GenerateRequest("scored", PROMPTS[1], Sampling(max_tokens=1, seed=0), prompt_logprobs=4)]


def models_are_warmed_up_there_and_kept_apart_from_the_cpus(device: Device) -> None:
    name = name_of(device)
    plan = ToolWarmUpConfig(copy_steps=2, steps=2, ramp_steps=1)
    short = WarmUpConfig(accuracy=(0.0, 1.0), measure_every=2)
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.object(model_module, "check_device"),
        patch.dict(BUILT_IN, {"tiny": BuiltIn(ARCHITECTURE, short), "tiny-tools": BuiltIn(ARCHITECTURE, plan)}),
    ):
        for made in ("tiny", "tiny-tools"):
            ours, theirs = (resolve_model(made, 0, Path(cache), device=where) for where in (name, "cpu"))
            assert ours.name == f"{theirs.name}-{name}"
            assert_close(weights(load_policy(ours)), weights(load_policy(theirs)))


SITE_CLAIMS: list[Callable[[Device], None]] = [
    a_site_trains_as_on_the_cpu_and_either_goes_on_from_the_others_checkpoint,
    the_engine_generates_and_scores_as_on_the_cpu_also_with_new_weights,
    models_are_warmed_up_there_and_kept_apart_from_the_cpus,
]
