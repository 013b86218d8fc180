"""Taught rollouts for upstream's trainer, packed and sent by upstream's own code: `python -m ...feed_taught JOB`.

JOB is JSON: {"folder", "num_ranks", "last"}. As `feed`, with 8 candidates at each trained token but the third ones.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

import torch

from tests.sites.prime_rl.cpu_trainer import leave_out_gpu_packages
from tests.sites.prime_rl.feed import SAMPLES, SEQUENCE, VOCABULARY, sample
from tests.sites.prime_rl.topk.carried import drawn, stream

K = 8


def main() -> None:
    """Send the batches of all steps."""
    leave_out_gpu_packages()
    from prime_rl.trainer.batch import prepare_batch  # pyright: ignore[reportMissingImports]
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender  # pyright: ignore[reportMissingImports]
    from prime_rl.transports.rollouts.types import RoutedExperts  # pyright: ignore[reportMissingImports]

    job = json.loads(sys.argv[1])
    sender = FileSystemMicroBatchSender(Path(job["folder"]), job["num_ranks"], 1)
    for step in range(1, job["last"] + 1):
        randomness = random.Random(step)
        samples = [sample(randomness) for _ in range(SAMPLES)]
        for number, one in enumerate(samples):
            num_tokens = len(one.token_ids)
            ids, logprobs = drawn(num_tokens, K, VOCABULARY, 100 * step + number)
            untaught = ~torch.tensor(one.mask) | (torch.arange(num_tokens) % 3 == 0)
            ids[untaught], logprobs[untaught] = -1, -torch.inf
            array = stream(ids, logprobs, torch.zeros(num_tokens, dtype=torch.bool))
            one.routed_experts = RoutedExperts(array.numpy().tobytes(), list(array.shape), "int32")
        asyncio.run(sender.send(prepare_batch(samples, SEQUENCE, job["num_ranks"], sum)))


if __name__ == "__main__":
    main()
