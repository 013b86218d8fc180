"""Losses as users write them, some of them wrongly, and logic of a step beside them; imported by path in a trainer."""

import itertools
import json
import os
import time
from types import SimpleNamespace
from typing import Any

from composer_prime.losses.records import outputs_record
from composer_prime.sites.prime_rl.outer import Step, on_step


def _note_time(what: str) -> None:
    """Write down when it is, by Python's own clock."""
    if "TIMES_FILE" in os.environ:
        with open(os.environ["TIMES_FILE"], "a") as file:
            file.write(json.dumps([what, time.perf_counter()]) + "\n")


def my_loss(inputs: Any, *, strength: float = 1.0) -> Any:
    """Minus advantage times ratio, on the trained tokens."""
    _note_time("loss")
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    loss = -strength * (inputs.advantages * ratio)[inputs.loss_mask].sum()
    return outputs_record()(loss=loss, metrics={"mine": ratio.detach().mean()})


def another_record(inputs: Any) -> Any:
    """As `my_loss`, in a record that nobody knows."""
    return SimpleNamespace(value=my_loss(inputs).loss)


def per_token(inputs: Any) -> Any:
    """As `my_loss`, not summed."""
    return outputs_record()(loss=inputs.trainer_logprobs * inputs.advantages, metrics={})


def of_another_version(inputs: Any) -> Any:
    """Reads a field that no record here has."""
    return my_loss(inputs) if inputs.value_estimates is None else None


_calls = itertools.count()


def of_another_version_later(inputs: Any) -> Any:
    """As `of_another_version`, but not at first."""
    return my_loss(inputs) if next(_calls) < 4 else of_another_version(inputs)


NO_FUNCTION = 1.0

if "ON_STEP_FILE" in os.environ:

    @on_step
    def note(step: Step) -> None:
        """Write down what a step is told, and log a number of our own."""
        norms = [float(parameter.to_local().norm()) for parameter in step.parameters.values()]  # type: ignore[operator]
        step.log({"mine/norm": sum(norms)})
        record = [step.number, step.is_last, step.tokens, step.samples, sorted(step.parameters)]
        with open(f"{os.environ['ON_STEP_FILE']}.{os.environ['RANK']}", "a") as file:
            file.write(json.dumps(record) + "\n")


if "TIMES_FILE" in os.environ:

    @on_step
    def note_end(step: Step) -> None:
        """Write down when the outer loop's turn is over."""
        _note_time("step")
