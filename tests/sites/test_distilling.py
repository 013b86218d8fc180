"""What teachers' distributions do to a step, against the same term worked out on whole rows of logits."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_prime.config.distill import DistillConfig, Schedule, weight_at
from composer_prime.config.recipe import OptimConfig
from composer_prime.losses.composer import composer_loss
from composer_prime.sites.embedded.batches import TrainingSample, read_batch, write_batch
from composer_prime.sites.embedded.learner import Learner
from composer_prime.sites.embedded.packing import STREAMS
from composer_prime.sites.embedded.trainer import Trainer
from composer_prime.teachers.candidates import EMPTY, Candidates
from composer_prime.teachers.carrier import pack as pack_streams
from tests.sites.letters_site import letters_site
from tests.sites.tiny_policy import VOCABULARY, random_policy, random_samples

SEQ_LEN, K = 32, 5


def taught_samples(seed: int, *, streams: int = 2) -> list[TrainingSample]:
    """Random samples at temperature 1; most carry candidates on some sampled tokens, of one stream or both."""
    rng, samples = np.random.default_rng(seed), random_samples(seed, 12)
    for number, sample in enumerate(samples):
        samples[number] = sample = dataclasses.replace(sample, temperatures=[1.0] * len(sample.token_ids))
        replay, hint = (random_candidates(rng, sample, share) for share in (0.7, 0.5))
        if number % 4:
            packed = pack_streams(replay if streams == 2 else None, hint, streams)
            samples[number] = dataclasses.replace(sample, candidates=packed)
    return samples


def random_candidates(rng: np.random.Generator, sample: TrainingSample, share: float) -> Candidates:
    found = Candidates.none(len(sample.token_ids), K)
    for place in np.flatnonzero(sample.mask):
        if rng.random() < share:
            filled = int(rng.integers(1, K + 1))
            found.ids[place, :filled] = rng.permutation(VOCABULARY)[:filled]
            found.logprobs[place, :filled] = np.log(np.sort(rng.dirichlet(np.ones(filled + 1))[:filled])[::-1])
    return found


def step(samples: list[TrainingSample], distill: DistillConfig, number: int = 0, **kwargs: Any) -> tuple[Any, Tensor]:
    """What one step reports, and the gradient it took, without clipping."""
    model = random_policy()
    learner = Learner(
        model,
        OptimConfig(lr=1e-3, max_norm=None),
        lambda inputs: composer_loss(inputs, **kwargs),
        SEQ_LEN,
        100,
        distill,
    )
    report = learner.step(samples, number)
    return report, torch.cat([one.grad.flatten() for one in learner.parameters if one.grad is not None])


def expected_gradient(samples: list[TrainingSample], taus: dict[str, float], low: float = 0.2) -> Tensor:
    """Of both terms alone: forward KL over candidates and tail, from a forward of each sample's own."""
    model, total = random_policy(), torch.zeros((), dtype=torch.float64)
    num_tokens = sum(sum(sample.mask[1:]) for sample in samples)
    for sample in samples:
        if sample.candidates is None:
            continue
        logits = model(torch.tensor([sample.token_ids])).logits[0].double()
        student = logits.log_softmax(-1)
        both = sample.candidates.shape[1] == 4
        for stream, first in (("replay", 0), ("hint", 2 if both else 0)):
            codes, bits = sample.candidates[:, first], sample.candidates[:, first + 1]
            for place in np.flatnonzero(sample.mask[1:]) + 1:
                ids = [abs(int(code)) - 1 for code in codes[place] if (code > 0 if stream == "replay" else code < 0)]
                if not ids:
                    continue
                old = sample.logprobs[place]
                now = float(student[place - 1, sample.token_ids[place]].detach())
                if stream == "replay" and math.exp(now) - math.exp(old) < -low:
                    continue
                told = torch.from_numpy(bits[place, : len(ids)].copy().view(np.float32)).double()
                ours = student[place - 1, ids]
                t = torch.cat([told.exp(), (1 - told.exp().sum())[None]])
                s = torch.cat([ours, torch.log1p(-ours.exp().sum())[None]])
                total = total + taus[stream] * (t * (t.log() - s)).sum() / num_tokens
    total.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("streams", [1, 2])
def test_a_packed_steps_gradient_is_that_of_the_whole_distributions(streams: int) -> None:
    samples = taught_samples(0, streams=streams)
    _, gradient = step(samples, DistillConfig(hint_tau=0.7, replay_tau=0.3), adv_tau=0.0, kl_tau=0.0)
    expected = expected_gradient(samples, {"hint": 0.7, "replay": 0.3})
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kwargs", [{}, {"dppo_mask_low": 0.01}])
def test_replay_leaves_out_tokens_by_the_losss_own_threshold(tmp_path: Path, kwargs: dict[str, float]) -> None:
    samples, weights = taught_samples(6), {"hint_tau": 0.7, "replay_tau": 0.3}
    loss = {"kwargs": {"adv_tau": 0.0, "kl_tau": 0.0, **kwargs}}
    table = {"loss": loss, "distill": weights, "optim": {"max_norm": 1e9}}
    trainer = Trainer(letters_site(tmp_path, trainer=table), random_policy(), None)
    trainer.learner.step(samples)
    gradient = torch.cat([one.grad.flatten() for one in trainer.learner.parameters if one.grad is not None])
    trainer.close()
    low = kwargs.get("dppo_mask_low", 0.2)
    for other, apart in ((low, False), (0.21 - low, True)):
        expected = expected_gradient(samples, {"hint": 0.7, "replay": 0.3}, other)
        assert (float((gradient - expected).norm() / expected.norm()) > 1e-5) == apart


def test_at_weight_zero_a_step_is_bit_equal_to_one_without_candidates() -> None:
    samples = taught_samples(1)
    plain = [dataclasses.replace(sample, candidates=None) for sample in samples]
    off, without = step(samples, DistillConfig(hint_tau=0.0, replay_tau=0.0)), step(plain, DistillConfig())
    assert torch.equal(off[1], without[1])
    assert off[0].loss == without[0].loss


def test_each_stream_has_its_own_weight_and_its_own_numbers() -> None:
    samples = taught_samples(2)
    reports = {
        taus: step(samples, DistillConfig(hint_tau=taus[0], replay_tau=taus[1]))[0] for taus in ((1, 0), (0, 2), (1, 2))
    }
    for taus, report in reports.items():
        assert all(
            (f"distill/{stream}_loss" in report.details) == (tau > 0) for stream, tau in zip(STREAMS, taus, strict=True)
        )
    both = reports[1, 2].details
    assert both["distill/hint_loss"] == pytest.approx(reports[1, 0].details["distill/hint_loss"])
    assert both["distill/replay_loss"] == pytest.approx(reports[0, 2].details["distill/replay_loss"])
    assert 0 < both["distill/hint_overlap"] < 1 and both["distill/hint_teacher_entropy"] > 0
    assert 0 < both["distill/hint_student_tail"] < 1
    assert both["distill/hint_tokens"] == sum(
        int((one.candidates[1:, 2] < 0).any(1).sum()) for one in samples if one.candidates is not None
    )


def test_a_weight_moves_with_the_steps_and_stays_at_its_end() -> None:
    schedule = Schedule(start=1.0, end=0.5, steps=4)
    assert [weight_at(schedule, number) for number in (0, 1, 4, 9)] == [1.0, 0.875, 0.5, 0.5]
    samples = taught_samples(3)
    moving = DistillConfig(hint_tau=schedule, replay_tau=0.0)
    losses = [step(samples, moving, number)[0].details["distill/hint_loss"] for number in (0, 4)]
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_a_batch_on_disk_keeps_candidates_bit_for_bit(tmp_path) -> None:
    samples = taught_samples(4)
    write_batch(tmp_path, 0, samples)
    found = read_batch(tmp_path, 0)
    assert found is not None
    for sample, one in zip(samples, found, strict=True):
        assert (sample.candidates is None) == (one.candidates is None)
        if sample.candidates is not None and one.candidates is not None:
            assert np.array_equal(sample.candidates, one.candidates)
    assert EMPTY == -1


def test_taid_moves_from_step_to_step_and_goes_on_from_its_state() -> None:
    samples = taught_samples(5)

    def learner() -> Learner:
        config = DistillConfig(divergence="taid", hint_tau=2.0)
        return Learner(random_policy(), OptimConfig(lr=1e-3), composer_loss, SEQ_LEN, 100, config, 10)

    first = learner()
    seen = [first.step(samples, number) and first.distiller.state_dict()["hint"]["t"] for number in range(4)]
    assert seen[0] == 0.4 < seen[1] < seen[2] < seen[3] < 1.0
    other = learner()
    other.distiller.load_state_dict(first.distiller.state_dict())
    assert other.distiller.state_dict() == first.distiller.state_dict()
