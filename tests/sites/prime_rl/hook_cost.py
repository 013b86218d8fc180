"""What the hook costs a step between two rounds, in upstream's unmodified trainer on a CPU.

    PRIME_RL_SRC=<checkout> python -m tests.sites.prime_rl.hook_cost [--num-steps 100]

in the environment of `make test-prime-rl`. Needs commit 559b447, whose trainer can be fed.
"""

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.sites.prime_rl.launched import PLAIN, announced
from tests.sites.prime_rl.real_runs import RealTrainer, feed, real_site, save_model

TIMED = "tests.sites.prime_rl.timed_loss.composer_loss"
WARM_UP_STEPS = 10
NEVER = 100_000
"""Inner steps to a round: no step of ours has a turn."""


@dataclass(frozen=True)
class Cost:
    """A site of `num_ranks` in an outer run, and the same trainer with the same loss and data without one.

    own_s     median seconds of a step that are spent in the hook, on the first rank
    step_s    median seconds of a step, upstream's own figure
    plain_s   the same without an outer run
    share     the hook's part of all steps' seconds
    """

    num_ranks: int
    num_steps: int
    own_s: float
    step_s: float
    plain_s: float
    share: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.num_ranks} rank(s), {self.num_steps} steps: hook {1e3 * self.own_s:.3f} ms of a step's "
            f"{1e3 * self.step_s:.1f} ms ({100 * self.own_s / self.step_s:.2f} %, over all steps "
            f"{100 * self.share:.2f} %); without an outer run {1e3 * self.plain_s:.1f} ms"
        )


def measure(folder: Path, num_ranks: int, num_steps: int) -> Cost:
    """Run both trainers, one after the other."""
    model = save_model(folder / "model")
    uri = announced(folder / "bucket", inner_steps=NEVER)

    def trainer(name: str, loss: str, uri: str | None) -> RealTrainer:
        table = {"type": "custom", "import_path": loss, "kwargs": {}}
        one = real_site(folder, name, model, uri, num_ranks, loss=table, max_steps=num_steps, ckpt={"interval": NEVER})
        one.env["HOOK_COST"] = str(folder / f"{name}.json")
        feed(one, last=num_steps)
        one.start().finish()
        return one

    hooked, plain = trainer("hooked", TIMED, uri), trainer("plain", PLAIN, None)
    steps = json.loads((folder / "hooked.json").read_text())[WARM_UP_STEPS:]
    own = [own_s for _, own_s in steps]
    return Cost(
        num_ranks,
        len(steps),
        median(own),
        _median_step_s(hooked),
        _median_step_s(plain),
        sum(own) / sum(step_s for step_s, _ in steps),
    )


def _median_step_s(trainer: RealTrainer) -> float:
    steps_s = [one["time/step"] for one in trainer.metrics() if "time/step" in one]
    return median(steps_s[WARM_UP_STEPS:])


def main() -> None:
    """Print the figures for one rank and for two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=100)
    num_steps = parser.parse_args().num_steps
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="hook-cost-") as folder:
            print(measure(Path(folder), num_ranks, num_steps).line(), f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
