"""A site's trainer: waits for a batch, learns from it, lets the outer loop have its say, publishes the weights.

`python -m composer_prime.sites.embedded.trainer SITE_DIR`. It ends at the run's last round, or after max_steps where
there is no outer loop; on SIGTERM it saves a checkpoint first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from composer_prime import metrics
from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ComposerPrimeError, ModelError, last_words
from composer_prime.metrics import MetricsTape
from composer_prime.sites.embedded.batches import TrainingSample, drop_trained, read_batch, read_num_drawn
from composer_prime.sites.embedded.broadcasts import load_weights, move_average, publish, start_average, weights
from composer_prime.sites.embedded.checkpoints import newest_checkpoint, save_checkpoint, tasks_drawn
from composer_prime.sites.embedded.learner import DPPO_LOW, Learner, StepReport, import_loss
from composer_prime.sites.embedded.result import MasterVersion, SiteResult
from composer_prime.sites.embedded.start import imported
from composer_prime.visible import log_handler
from composer_prime.waiting import Waits, read_waiting

if TYPE_CHECKING:
    from composer_prime.sync.report import OuterReport
    from composer_prime.sync.site_clock import OuterLoop

POLL_S = 0.01
"""Seconds between two looks for the next batch."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """Counts since the site's first start; a checkpoint carries them over a resume."""

    tokens: int = 0
    train_s: float = 0.0
    stall_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class Trainer:
    """One site's training. `start`, `train`, and `close` in any case; `interrupt` ends `train` early, resumably."""

    def __init__(self, settings: SiteSettings, model: PreTrainedModel, outer: OuterLoop | None) -> None:
        recipe = settings.recipe
        self.settings = settings
        self.paths = settings.paths
        self.model = model
        self.outer = outer
        self.waits = Waits(self.paths.waiting("trainer")) if outer is None else outer.waits
        self.learner = Learner(
            model,
            recipe.trainer.optim,
            import_loss(recipe.trainer.loss),
            recipe.seq_len,
            recipe.site.micro_batch_tokens,
            recipe.trainer.distill,
            recipe.max_steps,
            recipe.trainer.loss.kwargs.get("dppo_mask_low", DPPO_LOW),
            recipe.trainer.scheduler,
        )
        self.step = 0
        self._num_drawn = 0
        self._ema_decay = recipe.hints.ema_decay if recipe.hints is not None and recipe.hints.teacher == "ema" else None
        self._average: dict[str, Tensor] | None = None
        self._totals = Totals()
        self._tape = MetricsTape(self.paths.tape("trainer"))
        self._joined = False
        self._interrupted = False
        self._saved_step: int | None = None

    def start(self) -> None:
        """Stand where training goes on: at the checkpoint if there is one to resume from, and on the run's masters.

        The weights are published at once where they aren't the ones that inference starts from.
        """
        torch.manual_seed(self.settings.recipe.run.seed)
        if self.settings.resume and (state := newest_checkpoint(self.paths.checkpoints)) is not None:
            self._restore(state)
        if self.outer is not None:
            self.outer.join(list(self.model.named_parameters()))
            self._joined = True
        if self._ema_decay is not None and self._average is None:
            self._average = start_average(self.model)
        if self.step > 0 or self.outer is not None:
            publish(self.model, self.paths.broadcasts, self.step, self._average)
        logger.info("trainer_started site=%s step=%d", self.settings.site, self.step)

    def train(self) -> SiteResult | None:
        """Train until the end, and leave the result; None when interrupted before. Both ways the state is saved."""
        ended = time.perf_counter()
        while not self.is_over():
            samples = self._wait_for_batch()
            if samples is None:
                break
            self._num_drawn = read_num_drawn(self.paths.rollouts, self.step)
            learned = self.learner.step(samples, self.step)
            report = self._sync(learned)
            self.step += 1
            drop_trained(self.paths.rollouts, self.step)
            if self._ema_decay is not None and self._average is not None:
                move_average(self._average, self.model, self._ema_decay)
            publish(self.model, self.paths.broadcasts, self.step, self._average)
            began, ended = ended, time.perf_counter()
            self._log(learned, report, step_s=ended - began)
            if self.step % self.settings.recipe.ckpt.interval == 0:
                self.save()
        self.save()
        return self._conclude() if self.is_over() else None

    def is_over(self) -> bool:
        """Whether the site's training has come to its end."""
        if self.outer is not None:
            return self.outer.finished
        return self.step >= self.settings.recipe.max_steps

    def interrupt(self) -> None:
        """Ask `train` to end after the step it is in; may be called from a signal handler."""
        self._interrupted = True
        if self.outer is not None:
            self.outer.interrupt()

    def close(self) -> None:
        """Leave the outer loop if `start` joined it, and close the tape; a second call does nothing."""
        if self._joined and self.outer is not None:
            self._joined = False
            self.outer.close()
        self._tape.close()

    def save(self) -> None:
        """Checkpoint everything that the next step depends on, unless the last checkpoint is of this very step."""
        if self._saved_step == self.step:
            return
        state = {
            "step": self.step,
            "model": weights(self.model),
            "average": self._average,
            "optimizer": self.learner.optimizer.state_dict(),
            "distill": self.learner.distiller.state_dict(),
            "rng": torch.get_rng_state(),
            "totals": asdict(self._totals_now()),
            "outer": None if self.outer is None else self.outer.state_dict(),
        }
        save_checkpoint(self.paths.checkpoints, self.step, state, self._num_drawn)
        self._saved_step = self.step

    def _restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._num_drawn = tasks_drawn(self.paths.checkpoints, self.step)
        load_weights(self.model, state["model"])
        if self._ema_decay is not None:
            average = state.get("average")  # none: made before there were averages, or under another teacher
            self._average = average and {name: value.to(self.model.device) for name, value in average.items()}
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.learner.distiller.load_state_dict(state.get("distill", {}))  # older checkpoints have none
        torch.set_rng_state(state["rng"])
        self._totals = Totals(**state["totals"])
        if self.outer is not None and state["outer"] is not None:
            self.outer.load_state_dict(state["outer"])

    def _wait_for_batch(self) -> list[TrainingSample] | None:
        """The batch of the step to come, once it is there; None when interrupted."""
        while not self._interrupted:
            samples = read_batch(self.paths.rollouts, self.step)
            if samples is not None:
                self.waits.say("batch", None)
                return samples
            theirs = read_waiting(self.paths.waiting("orchestrator"))
            self.waits.say("batch", "a batch of the orchestrator, see its log" if theirs is None else theirs.cause)
            time.sleep(POLL_S)
        return None

    def _sync(self, learned: StepReport) -> OuterReport | None:
        """Let the outer loop act on the step just taken, and count what the step cost."""
        report = None if self.outer is None else self.outer.after_inner_step(learned.tokens, learned.samples)
        self._totals = replace(
            self._totals,
            tokens=self._totals.tokens + learned.tokens,
            train_s=self._totals.train_s + learned.train_s,
            stall_s=self._totals.stall_s + (0.0 if report is None else report.stall_s),
        )
        return report

    def _log(self, learned: StepReport, report: OuterReport | None, *, step_s: float) -> None:
        values = {
            metrics.TRAIN_LOSS: learned.loss,
            metrics.TRAIN_TRAIN_S: learned.train_s,
            metrics.TRAIN_STEP_S: step_s,
            metrics.TRAIN_TOKENS: learned.tokens,
            metrics.TRAIN_GRAD_NORM: learned.grad_norm,
            **learned.details,
        }
        if report is not None:
            values |= metrics.outer_values(report)
        self._tape.log(self.step - 1, **values)
        logger.info("step=%d loss=%.5f tokens=%d step_s=%.3f", self.step - 1, learned.loss, learned.tokens, step_s)

    def _totals_now(self) -> Totals:
        """The totals with this process's traffic, which the outer loop counts."""
        if self.outer is None:
            return self._totals
        summary = self.outer.summary()
        return replace(
            self._totals,
            bytes_up=self._totals.bytes_up + summary["bytes_up"],
            bytes_down=self._totals.bytes_down + summary["bytes_down"],
        )

    def _conclude(self) -> SiteResult:
        """Leave the run and write result.json, on which the other processes of the site end."""
        summary = {"outer_rounds": 0, "finish_s": 0.0, "masters": []} if self.outer is None else self.outer.summary()
        totals = self._totals_now()
        dropped = [counts["dropped"] for counts in summary.get("tokens", ())]
        self.close()
        result = SiteResult(
            steps=self.step,
            dropped_tokens=sum(dropped) // max(1, len(dropped)),
            outer_rounds=summary["outer_rounds"],
            finish_s=summary["finish_s"],
            master_sha256={
                str(one["fragment"]): MasterVersion(version=one["version"], sha256=one["sha256"])
                for one in summary["masters"]
            },
            **asdict(totals),
        )
        result.save(self.paths.result)
        logger.info("trainer_finished site=%s steps=%d rounds=%d", self.settings.site, self.step, result.outer_rounds)
        return result


def build(settings: SiteSettings) -> Trainer:
    """The trainer that a site's settings describe: its model loaded, its outer loop opened but not joined."""
    from composer_prime.sites.embedded.model import load_policy

    outer = None
    if settings.recipe.outer is not None:
        from composer_prime.sync.site_clock import OuterLoop

        outer = OuterLoop.from_settings(settings)
    model = load_policy(settings.model_dir, settings.recipe.site.device)
    if not settings.has_weights:
        _check_masters_do(model, settings.recipe.model.name)
    return Trainer(settings, model.train(), outer)


def _check_masters_do(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError where a model without weights would keep arbitrary values, since no master holds them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = [one for one in model.state_dict() if one not in parameters or not parameters[one].requires_grad]
    if kept:
        home = f"HF_HOME={os.environ['HF_HOME']} " if "HF_HOME" in os.environ else ""
        raise ModelError(
            f"model {name} has values that no training moves, and so no master holds ({len(kept)}, such as {kept[0]}): "
            f"download it first, `{home}hf download {name}`"
        )


def main(site_dir: Path) -> int:
    """Run a site's trainer in this process; returns the exit code."""
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()])
    try:
        settings = SiteSettings.load(site_dir)
        torch.set_num_threads(settings.recipe.site.threads)
        trainer = build(settings)
        imported()
        settings.paths.loaded.touch()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: trainer.interrupt())
        try:
            trainer.start()
            trainer.train()
        finally:
            trainer.close()
    except (ComposerPrimeError, OSError) as error:
        return last_words(error, folder=site_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
