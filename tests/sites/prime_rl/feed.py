"""Rollouts for upstream's trainer, packed and sent by upstream's own code: `python -m tests.sites.prime_rl.feed JOBS`.

JOBS is JSON: a list of {"folder", "num_ranks", "first", "last", "seed"}. The tokens are random, the probabilities near
those of a model that knows nothing.
"""

import asyncio
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from tests.sites.prime_rl.cpu_trainer import leave_out_gpu_packages

VOCABULARY, SEQUENCE, SAMPLES = 128, 48, 4


def sample(randomness: random.Random, vocabulary: int = VOCABULARY, lengths: tuple[int, int] = (12, 40)) -> Any:
    """One rollout, of a length from and to `lengths`: a prompt that is not trained on, and an answer."""
    from prime_rl.transports.rollouts.types import TrainingSample  # pyright: ignore[reportMissingImports]

    num_tokens = randomness.randint(*lengths)
    prompt = randomness.randint(2, 6)
    return TrainingSample(
        token_ids=[randomness.randrange(vocabulary) for _ in range(num_tokens)],
        mask=[place >= prompt for place in range(num_tokens)],
        logprobs=[-math.log(vocabulary) + randomness.uniform(-0.3, 0.3) for _ in range(num_tokens)],
        temperatures=[1.0] * num_tokens,
        env_name="random",
        advantages=[randomness.choice((-1.0, 0.5, 1.0))] * num_tokens,
    )


def send(folder: Path, num_ranks: int, first: int, last: int, seed: int) -> None:
    """The batches of steps `first` to `last`, for each rank of a trainer."""
    from prime_rl.trainer.batch import prepare_batch  # pyright: ignore[reportMissingImports]
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender  # pyright: ignore[reportMissingImports]

    sender = FileSystemMicroBatchSender(folder, num_ranks, first)
    for step in range(first, last + 1):
        randomness = random.Random(1000 * seed + step)
        samples = [sample(randomness) for _ in range(SAMPLES)]
        asyncio.run(sender.send(prepare_batch(samples, SEQUENCE, num_ranks, sum)))


def main() -> None:
    """Do all jobs in this one process, since upstream's imports take longest."""
    leave_out_gpu_packages()
    for job in json.loads(sys.argv[1]):
        send(**job | {"folder": Path(job["folder"])})


if __name__ == "__main__":
    main()
