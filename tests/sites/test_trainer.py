"""A trainer on hand-written batches: it follows the formula, publishes what it holds, resumes as if never stopped."""

import copy
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from composer_prime import metrics
from composer_prime.config.recipe import LossConfig, OptimConfig, Recipe, SchedulerConfig
from composer_prime.config.settings import SiteSettings, settle_site
from composer_prime.errors import ConfigError, SiteError
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.batches import write_batch
from composer_prime.sites.embedded.broadcasts import KEEP, weights
from composer_prime.sites.embedded.checkpoints import newest_checkpoint, tasks_drawn
from composer_prime.sites.embedded.learner import Learner, import_loss, learning_rate
from composer_prime.sites.embedded.result import SiteResult
from composer_prime.sites.embedded.trainer import Trainer
from composer_prime.sites.embedded.whole_folder import numbered_steps
from composer_prime.sites.intact import seal
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.waiting import Waits
from tests.losses.reference import reference_loss
from tests.patience import PATIENCE_S
from tests.sites.tiny_policy import logprobs_alone, random_policy, random_samples

LOSS = {"kl_tau": 0.05, "replay_tau": 0.3, "replay_clip": 2.0}


def settle(tmp_path, *, steps=4, resume=False, interval=100, lr=1e-2, outer=False) -> SiteSettings:
    taskset = {"id": "reverse-letters"}
    recipe = Recipe.model_validate(
        {
            "run": {"name": "run-1"},
            "max_steps": steps,
            "seq_len": 32,
            "output_dir": str(tmp_path),
            "orchestrator": {"train": {"source": [{"name": "letters", "env": {"taskset": taskset}}]}},
            "trainer": {"optim": {"lr": lr, "betas2": 0.95}, "loss": {"kwargs": LOSS}},
            "ckpt": {"interval": interval},
            **({"outer": {"inner_steps": 2, "fragments": 1, "sync_delay": 0}} if outer else {}),
        }
    )
    return settle_site(recipe, "a", inference_port=1, model_dir=tmp_path / "model", resume=resume)


def write_batches(settings, steps, num_samples=6):
    for step in range(steps):
        write_batch(settings.paths.rollouts, step, random_samples(100 + step, num_samples, with_ref=step % 2 == 0))


def run_trainer(settings, outer=None, seed=0) -> tuple[Trainer, SiteResult]:
    trainer = Trainer(settings, random_policy(seed), outer)
    try:
        trainer.start()
        result = trainer.train()
    finally:
        trainer.close()
    assert result is not None
    return trainer, result


def learner(model, *, lr=0.0, max_norm=None, **loss):
    optim = OptimConfig(lr=lr, weight_decay=0.0, max_norm=max_norm)
    return Learner(model, optim, import_loss(LossConfig(kwargs=loss)), seq_len=32)


def gradient_of(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_same_weights(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_loss_is_the_formulas_over_the_batchs_trained_tokens():
    samples = random_samples(0, 10, with_ref=True)
    model = random_policy()
    wanted, num_tokens = 0.0, 0
    for sample in samples:
        alone = reference_loss(
            logprobs_alone(model, sample), sample.logprobs, sample.advantages, sample.mask, sample.ref_logprobs, **LOSS
        )
        wanted, num_tokens = wanted + alone.loss, num_tokens + sum(sample.mask)
    report = learner(model, **LOSS).step(samples)
    assert (report.tokens, report.samples) == (num_tokens, 10)
    assert report.loss == pytest.approx(wanted / num_tokens, rel=1e-4)
    parts = (metrics.LOSS_POLICY, metrics.LOSS_KL, metrics.LOSS_REPLAY)
    assert sum(report.details[name] for name in parts) == pytest.approx(report.loss, rel=1e-5)
    assert 0 < report.details[metrics.LOSS_IS_MASKED] < 1 and report.train_s > 0


def test_a_step_moves_each_weight_by_clipped_adamw():
    samples = random_samples(1, 5)
    plain, stepped = random_policy(), random_policy()
    unclipped = learner(plain).step(samples)
    learner(stepped, lr=0.1, max_norm=0.01).step(samples)
    for before, after in zip(plain.parameters(), stepped.parameters(), strict=True):
        assert before.grad is not None
        clipped = before.grad * 0.01 / unclipped.grad_norm
        wanted = before - 0.1 * clipped / (clipped.abs() + 1e-8)  # Adam's first step, bias-corrected
        torch.testing.assert_close(after, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("warmup", "decay"), [(4, 5), (0, 20), (20, 0), (0, 2), (7, 13)])
@pytest.mark.parametrize("min_lr", [0.0, 0.02])
def test_a_linear_schedule_sets_the_learning_rates_of_torchs_own_schedulers_put_together_as_upstream(
    warmup, decay, min_lr
):
    steps, peak, low = 20, 0.1, max(min_lr / 0.1, 1e-8)
    reference = torch.optim.SGD(random_policy().parameters(), lr=peak)
    parts: list[LRScheduler] = [LinearLR(reference, low, 1.0, warmup)] if warmup else []
    if decay:
        parts += [LinearLR(reference, 1.0, 1.0, steps - decay - warmup), LinearLR(reference, 1.0, low, decay - 1)]
    milestones = ([warmup] if warmup else []) + [steps - decay]
    schedule = SequentialLR(reference, parts, milestones[: len(parts) - 1]) if len(parts) > 1 else parts[0]
    config = SchedulerConfig(type="linear", warmup_steps=warmup, decay_steps=decay, min_lr=min_lr)
    for step in range(steps):
        assert learning_rate(peak, config, steps, step) == pytest.approx(schedule.get_last_lr()[0], abs=1e-8)
        reference.step()
        schedule.step()


def test_a_step_at_the_end_of_a_linear_schedule_moves_nothing():
    model = random_policy()
    linear = SchedulerConfig(type="linear", warmup_steps=0, decay_steps=4)
    optim = OptimConfig(lr=0.1, weight_decay=0.0)
    learning = Learner(model, optim, import_loss(LossConfig()), 32, num_steps=4, scheduler=linear)
    before = copy.deepcopy(model)
    learning.step(random_samples(6, 3), 3)
    assert_same_weights(model, before)
    learning.step(random_samples(6, 3), 2)
    with pytest.raises(AssertionError):
        assert_same_weights(model, before)


def test_how_a_batch_is_cut_into_micro_batches_changes_nothing():
    samples = random_samples(2, 12)
    gradients = []
    for micro_tokens in (1, 10**6):
        model = random_policy()
        still = OptimConfig(lr=0.0, weight_decay=0.0, max_norm=None)
        Learner(model, still, import_loss(LossConfig()), 32, micro_tokens).step(samples)
        gradients.append(gradient_of(model))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * gradients[0].abs().max().item())


@pytest.mark.parametrize("num_samples", [0, 3])
def test_a_batch_that_trains_nothing_moves_nothing(num_samples):
    samples = [dataclasses.replace(one, mask=[False] * len(one.token_ids)) for one in random_samples(4, num_samples)]
    model = random_policy()
    learning = learner(model, lr=0.1)
    learning.step(random_samples(9, 2))  # so that Adam has a momentum to move on with
    before = copy.deepcopy(model)
    report = learning.step(samples)
    assert (report.tokens, report.loss, report.grad_norm) == (0, 0.0, 0.0)
    assert_same_weights(model, before)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_touched():
    (sample,) = random_samples(5, 1)
    model = random_policy()
    before = copy.deepcopy(model)
    with pytest.raises(SiteError, match="must be finite"):
        learner(model, lr=0.1).step([dataclasses.replace(sample, advantages=[float("nan")] * len(sample.token_ids))])
    assert_same_weights(model, before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"import_path": "no_such_package.loss"}, "No module named 'no_such_package'"),
        ({"import_path": "composer_prime.losses.composer.no_loss"}, "no attribute 'no_loss'"),
        ({"kwargs": {"kl_weight": 1.0}}, "unexpected keyword argument 'kl_weight'.*it takes dppo_mask_low.*kl_tau"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_with_the_cause(config, message):
    with pytest.raises(ConfigError, match=message):
        import_loss(LossConfig(**config))


def test_a_run_ends_at_max_steps_and_its_last_broadcast_is_the_model(tmp_path):
    settings = settle(tmp_path, steps=KEEP + 2)
    write_batches(settings, KEEP + 2)
    trainer, result = run_trainer(settings)
    assert result == SiteResult.load(settings.paths.result)
    tape = read_tape(settings.paths.tape("trainer"))
    assert [record["step"] for record in tape] == list(range(KEEP + 2))
    assert result.steps == KEEP + 2 and result.tokens == sum(record[metrics.TRAIN_TOKENS] for record in tape)
    assert result.train_s == pytest.approx(sum(record[metrics.TRAIN_TRAIN_S] for record in tape))
    assert all(record[metrics.TRAIN_STEP_S] >= record[metrics.TRAIN_TRAIN_S] for record in tape)
    assert numbered_steps(settings.paths.broadcasts) == list(range(3, KEEP + 3))
    folder = settings.paths.broadcast(KEEP + 2)
    assert (folder / "STABLE").exists()
    sent = load_file(folder / "model.safetensors")
    assert sent.keys() == dict(trainer.model.named_parameters()).keys()
    assert "lm_head.weight" not in sent
    for name, parameter in trainer.model.named_parameters():
        assert sent[name].dtype == torch.float32 and torch.equal(sent[name], parameter)


def state_of(trainer):
    optimizer = trainer.learner.optimizer.state_dict()["state"]
    return [*weights(trainer.model).values(), *(value for one in optimizer.values() for value in one.values())]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    whole = settle(tmp_path / "whole", steps=5)
    write_batches(whole, 5)
    uninterrupted, wanted = run_trainer(whole)
    first = settle(tmp_path / "halves", steps=3)
    write_batches(first, 5)
    run_trainer(first)
    second = settle(tmp_path / "halves", steps=5, resume=True)
    resumed, result = run_trainer(second, seed=1)  # another seed: every weight must come from the checkpoint
    assert (result.steps, result.tokens) == (wanted.steps, wanted.tokens)
    assert all(torch.equal(a, b) for a, b in zip(state_of(resumed), state_of(uninterrupted), strict=True))


def test_batches_go_once_they_are_trained_but_for_the_newest(tmp_path):
    settings = settle(tmp_path, steps=5)
    write_batches(settings, 7)
    run_trainer(settings)
    assert sorted(folder.name for folder in settings.paths.rollouts.iterdir()) == [f"step_{n}" for n in (3, 4, 5, 6)]


def test_checkpoints_say_how_many_tasks_were_drawn_for_their_steps(tmp_path):
    settings = settle(tmp_path, steps=2)
    for step in range(4):
        write_batch(settings.paths.rollouts, step, random_samples(step, 2), num_drawn=10 * (step + 1))
    run_trainer(settings)
    assert tasks_drawn(settings.paths.checkpoints, 0) == 0
    assert tasks_drawn(settings.paths.checkpoints, 2) == 20
    shutil.rmtree(settings.paths.rollouts / "step_1")
    stays = settle(tmp_path, steps=2, resume=True)  # it trains nothing, and saves what it was
    run_trainer(stays)
    assert tasks_drawn(settings.paths.checkpoints, 2) == 20
    run_trainer(settle(tmp_path, steps=4, resume=True))
    assert tasks_drawn(settings.paths.checkpoints, 4) == 40


def test_a_checkpoint_of_a_version_without_distributions_is_resumed(tmp_path):
    settings = settle(tmp_path, steps=2)
    write_batches(settings, 3)
    run_trainer(settings)
    state = newest_checkpoint(settings.paths.checkpoints)
    assert state is not None
    del state["distill"]
    torch.save(state, settings.paths.checkpoint(2) / "state.pt")
    seal(settings.paths.checkpoint(2))
    _, result = run_trainer(settle(tmp_path, steps=3, resume=True))
    assert result.steps == 3


def test_checkpoints_are_written_every_interval_and_the_newest_two_are_kept(tmp_path):
    settings = settle(tmp_path, steps=7, interval=2)
    write_batches(settings, 7)
    run_trainer(settings)
    assert numbered_steps(settings.paths.checkpoints) == [6, 7]
    newest = newest_checkpoint(settings.paths.checkpoints)
    assert newest is not None and newest["step"] == 7


def test_a_resume_drops_broadcasts_from_beyond_its_checkpoint(tmp_path):
    settings = settle(tmp_path, steps=3)
    write_batches(settings, 4)
    run_trainer(settings)
    settings.paths.broadcast(9).mkdir()
    run_trainer(settle(tmp_path, steps=4, resume=True))
    assert numbered_steps(settings.paths.broadcasts) == [1, 2, 3, 4]


@dataclasses.dataclass
class FakeReport:
    stop: bool
    stall_s: float
    round: int
    upload_s: float = 0.5
    bytes_up: int = 10
    bytes_down: int = 20


class FakeOuter:
    """An outer loop of two inner steps a round, which doubles the weights at the end of its last round."""

    def __init__(self, rounds=2, on_step=lambda: None):
        self.rounds, self.on_step, self.calls, self.tokens = rounds, on_step, [], []
        self.waits = Waits()

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= 2 * self.rounds

    def load_state_dict(self, state):
        self.calls.append("load")
        self.tokens = list(state["tokens"])

    def join(self, named_parameters):
        self.calls.append("join")
        self.parameters = named_parameters

    def after_inner_step(self, tokens, samples):
        self.tokens.append(tokens)
        self.on_step()
        if self.finished:
            with torch.no_grad():
                for _, parameter in self.parameters:
                    parameter.mul_(2)
        return FakeReport(self.finished, 0.25, len(self.tokens) // 2)

    def state_dict(self):
        return {"tokens": self.tokens, "base": torch.zeros(2)}

    def summary(self):
        rounds = len(self.tokens) // 2
        masters = [{"fragment": 0, "version": rounds, "sha256": "ab"}]
        tokens = [{"dropped": 30}, {"dropped": 50}]
        moved = {"bytes_up": 10, "bytes_down": 20}
        return {"outer_rounds": rounds, "masters": masters, **moved, "finish_s": 0.5, "tokens": tokens}

    def interrupt(self):
        self.calls.append("interrupt")

    def close(self):
        self.calls.append("close")


def test_the_outer_loop_decides_the_end_and_moves_the_weights_before_they_are_published(tmp_path):
    settings = settle(tmp_path, steps=100, outer=True)
    write_batches(settings, 4)
    outer = FakeOuter()
    trainer, result = run_trainer(settings, outer)
    assert outer.calls == ["join", "close"]
    tape = read_tape(settings.paths.tape("trainer"))
    assert outer.tokens == [record[metrics.TRAIN_TOKENS] for record in tape]
    assert [record[metrics.OUTER_ROUND] for record in tape] == [0, 1, 1, 2]
    assert all(record[metrics.OUTER_UPLOAD_S] == 0.5 and record[metrics.OUTER_BYTES_UP] == 10 for record in tape)
    assert (result.steps, result.outer_rounds, result.stall_s, result.dropped_tokens) == (4, 2, 1.0, 40)
    assert (result.bytes_up, result.bytes_down) == (10, 20)
    assert result.master_sha256["0"].model_dump() == {"version": 2, "sha256": "ab"}
    sent = load_file(settings.paths.broadcast(4) / "model.safetensors")
    assert all(torch.equal(sent[name], parameter) for name, parameter in trainer.model.named_parameters())
    assert numbered_steps(settings.paths.broadcasts) == [1, 2, 3, 4]


def test_weights_that_a_run_brought_are_published_before_the_first_step(tmp_path):
    settings = settle(tmp_path, outer=True)
    trainer = Trainer(settings, random_policy(), FakeOuter())  # pyright: ignore[reportArgumentType]
    trainer.start()
    trainer.close()
    assert numbered_steps(settings.paths.broadcasts) == [0]


def test_an_interrupted_run_saves_leaves_no_result_and_goes_on_with_its_outer_loop(tmp_path):
    settings = settle(tmp_path, outer=True)
    write_batches(settings, 1)
    outer = FakeOuter(on_step=lambda: trainer.interrupt())
    trainer = Trainer(settings, random_policy(), outer)
    trainer.start()
    assert trainer.train() is None
    trainer.close()
    assert outer.calls == ["join", "interrupt", "close"] and not settings.paths.result.exists()
    write_batches(settings, 4)
    back = FakeOuter()
    _, result = run_trainer(settle(tmp_path, outer=True, resume=True), back)
    assert back.calls == ["load", "join", "close"]
    assert result.steps == 4 and back.tokens[:1] == outer.tokens
    assert (result.bytes_up, result.stall_s) == (20, 1.0)


def test_a_run_that_had_ended_before_it_was_joined_ends_at_once(tmp_path):
    settings = settle(tmp_path, outer=True)
    _, result = run_trainer(settings, FakeOuter(rounds=0))
    assert result.steps == 0 and SiteResult.load(settings.paths.result) == result


def test_with_the_real_outer_loop_a_lone_site_trains_to_the_runs_last_round(tmp_path):
    settings = settle(tmp_path, steps=5, outer=True)
    write_batches(settings, 5)
    trainer, result = run_trainer(settings, OuterLoop.from_settings(settings))
    assert (result.steps, result.outer_rounds) == (4, settings.recipe.rounds + 1)  # rule 11: a last offer on top
    assert result.bytes_up > 0 and result.stall_s > 0
    again, same = run_trainer(settle(tmp_path, steps=5, outer=True, resume=True), OuterLoop.from_settings(settings))
    assert (same.steps, same.master_sha256) == (result.steps, result.master_sha256)
    assert_same_weights(again.model, trainer.model)


def start_process(settings):
    root = settings.save()
    command = [sys.executable, "-m", "composer_prime.sites.embedded.trainer", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_as_a_process_it_saves_on_sigterm_and_finishes_when_resumed(tmp_path):
    settings = settle(tmp_path, steps=2)
    random_policy().save_pretrained(settings.model_dir)
    write_batches(settings, 1)
    process = start_process(settings)
    deadline = time.monotonic() + PATIENCE_S
    while not (settings.paths.broadcast(1) / "STABLE").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert numbered_steps(settings.paths.checkpoints) == [1] and not settings.paths.result.exists()
    write_batches(settings, 2)
    process = start_process(settle(tmp_path, steps=2, resume=True))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    result = SiteResult.load(settings.paths.result)
    assert result is not None and result.steps == 2


@pytest.mark.slow
def test_as_a_process_bad_input_is_one_line_and_exit_code_2(tmp_path):
    settings = settle(tmp_path)
    (tmp_path / "model").mkdir()
    process = start_process(settings)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith("error: model folder") and "Traceback" not in errors
