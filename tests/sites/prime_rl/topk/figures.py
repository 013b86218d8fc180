"""What distributions do in upstream's unmodified trainer on a CPU: its gradient, its bits without them, and their cost.

    PRIME_RL_SRC=<checkout> python -m tests.sites.prime_rl.topk.figures [--num-pairs 20]

in the environment of `make test-prime-rl`. Needs commit 559b447, whose trainer can be fed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from composer_prime.config.distill import DistillConfig
from composer_prime.sites.prime_rl.settings import DISTILL
from tests.sites.prime_rl.comparing import differs
from tests.sites.prime_rl.launched import REPOSITORY, WRAPPED
from tests.sites.prime_rl.real_runs import SHAPE, RealTrainer, save_to, source_path
from tests.sites.prime_rl.topk.feed_taught import is_taught

WATCHED = "tests.sites.prime_rl.topk.whole.loss"
PLAIN, FUSED = "disabled", 8
IPO: dict[str, Any] = {"type": "custom", "import_path": WRAPPED, "kwargs": {"inner": "ipo"}}
LARGER: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "head_dim": 64,
}
"""Where 8 candidates stand beside a step that has something to do."""
WARM_UP_PAIRS = 2


@dataclass(frozen=True)
class Case:
    """A head that is fused (its tokens a chunk) or plain, tied to the embedding or not, on so many ranks."""

    head: int | str
    tied: bool
    ranks: int

    def __str__(self) -> str:
        kind = "plain" if self.head == PLAIN else "fused"
        return f"{kind}, {'tied' if self.tied else 'untied'}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


CASES = [Case(head, tied, ranks) for ranks in (1, 2) for tied in (False, True) for head in (FUSED, PLAIN)]


def says(**table: Any) -> dict[str, str]:
    """What tells a trainer its [trainer.distill]."""
    return {DISTILL: DistillConfig(**table).model_dump_json()}


def model(folder: Path, *, tied: bool = False, **shape: Any) -> Path:
    """A Qwen3 with random weights; its head is its embedding if tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config: dict[str, Any] = SHAPE | shape | {"tie_word_embeddings": tied}
    return save_to(folder, Qwen3ForCausalLM(Qwen3Config(**config)))


@dataclass
class Planned(RealTrainer):
    """A trainer that `run` starts: what each of its ranks is to be given."""

    ranks: list[dict[str, Any]] = field(default_factory=list)

    def launch(self, module: str, arguments: list[str], path: list[Path]) -> None:
        """Start nothing yet."""
        self.ranks = [
            {"arguments": arguments, "environment": environment, "log": str(self.log(rank))}
            for rank, environment in enumerate(self.environments(path))
        ]


def run(trainers: Sequence[Planned], *, fp32: bool = False, **feed: Any) -> None:
    """Feed trainers the same batches (see `Feed`), and wait until they, side by side, have trained on them."""
    for one in trainers:
        one.start()
    feed |= {"folders": [str(one.folder) for one in trainers], "num_ranks": trainers[0].num_ranks}
    job = json.dumps({"fp32": fp32, "feed": feed, "trainers": [rank for one in trainers for rank in one.ranks]})
    path = os.pathsep.join([*map(str, [*source_path(), REPOSITORY]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.sites.prime_rl.topk.side_by_side", job]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Apart:
    """How far gradients of the first step lie from that of the full logits, as shares of its norm.

    ours    with the adapter, the parameter that is furthest
    added   without the term: what the adapter has to give
    """

    ours: float
    added: float


def apart(folder: Path, case: Case, *, stock: bool = True) -> Apart:
    """Three trainers on the same taught rollouts: ours, the term by its definition, and without it if `stock`."""
    weights = model(folder / "model", tied=case.tied)
    term = {"ours": (case.head, says()), "whole": (PLAIN, {"WHOLE_TERM": "1"}), "stock": (case.head, {})}
    trainers = {}
    for name, (head, env) in term.items():
        table = {"model": {"fused_lm_head_token_chunk_size": head}, "max_steps": 1, "ckpt": None}
        loss = {"loss": IPO | {"import_path": WATCHED}}
        env = {"KEEP_GRADIENT": str(folder / f"{name}.pt"), **env}
        if stock or name != "stock":
            trainers[name] = Planned(folder / name, case.ranks, env, model=weights, config=table | loss)
    run(list(trainers.values()), fp32=True)
    kept: dict[str, dict[str, Tensor]] = {name: torch.load(folder / f"{name}.pt") for name in trainers}
    whole = kept["whole"]
    norm = torch.stack([value.norm() for value in whole.values()]).norm()

    def furthest(other: dict[str, Tensor]) -> float:
        assert other.keys() == whole.keys()
        return max(((other[name] - whole[name]).norm() / norm).item() for name in whole)

    return Apart(furthest(kept["ours"]), furthest(kept["stock"]) if stock else math.nan)


def differing_when_off(folder: Path) -> dict[str, bool]:
    """By how distributions are off: whether fp32 weights after two steps differ from those of upstream's loss alone."""
    weights = model(folder / "model")

    def trainer(name: str, env: dict[str, str], loss: dict[str, Any]) -> Planned:
        table = {"ckpt": {"interval": 2}, "max_steps": 2, "loss": loss}
        return Planned(folder / name, 1, env, model=weights, config=table)

    stock = trainer("stock", {}, {"type": "ipo"})
    off = {"top_k = 0": says(top_k=0), "weights of 0": says(hint_tau=0.0, replay_tau=0.0)}
    ours = {name: trainer(f"off-{number}", env, IPO) for number, (name, env) in enumerate(off.items())}
    run([stock, *ours.values()], last=2)
    return {name: differs(one.checkpoint(2), stock.checkpoint(2)) for name, one in ours.items()}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of upstream's load_data and forward_backward, and what is added where all trained tokens are taught.

    plain_s  median, of the steps without candidates
    shares   of each pair of steps with the same rollouts, taught over plain less 1
    """

    plain_s: float
    shares: list[float]

    @property
    def share(self) -> float:
        """The median pair's."""
        return median(self.shares)

    def line(self) -> str:
        """For people."""
        ordered = sorted(self.shares)
        low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        return (
            f"k = 8: {100 * self.share:+.1f} % of a step's {1e3 * self.plain_s:.0f} ms of CPU time "
            f"(middle half of {len(ordered)} pairs: {100 * low:+.1f} to {100 * high:+.1f} %)"
        )


def cost(folder: Path, num_pairs: int) -> Cost:
    """One trainer on pairs of steps, of which one is taught."""
    num_steps = 2 * (num_pairs + WARM_UP_PAIRS)
    table = {"model": {"seq_len": 512}, "max_steps": num_steps, "ckpt": None}
    loss, env = {"loss": IPO | {"import_path": WATCHED}}, says() | {"CPU_SECONDS": "1"}
    trainer = Planned(folder / "timed", 1, env, model=model(folder / "model", **LARGER), config=table | loss)
    sizes = {"vocabulary": LARGER["vocab_size"], "sequence": 512, "lengths": (120, 128)}
    run([trainer], last=num_steps, kind="pairs", **sizes)
    spent = {
        one["step"]: one["time/load_data"] + one["time/forward_backward"]
        for one in trainer.metrics()
        if "time/step" in one
    }
    pairs = []
    for first in range(1 + 2 * WARM_UP_PAIRS, num_steps, 2):
        taught, plain = sorted((first, first + 1), key=is_taught, reverse=True)
        pairs.append((spent[plain], spent[taught] / spent[plain] - 1))
    return Cost(median(plain_s for plain_s, _ in pairs), [share for _, share in pairs])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-pairs", type=int, default=20)
    num_pairs = parser.parse_args().num_pairs
    with tempfile.TemporaryDirectory(prefix="topk-") as name:
        folder = Path(name)
        for number, case in enumerate(CASES):
            found = apart(folder / str(number), case, stock=number == 0)
            without = "" if math.isnan(found.added) else f" (without the term {found.added:.1e})"
            print(f"{case}: gradient apart {found.ours:.1e}{without}", flush=True)
        for what, is_other in differing_when_off(folder / "off").items():
            print(f"{what}: {'other weights' if is_other else 'bit-equal'}", flush=True)
        print(cost(folder / "cost", num_pairs).line(), f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
