"""Taught rollouts for upstream's trainers, packed and sent by upstream's own code; every folder gets the same."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.pool import Score
from composer_prime.teachers.stamp import scoring_paths, stamp_candidates
from composer_prime.teachers.wire import Scores
from tests.sites.prime_rl.feed import SAMPLES, SEQUENCE, VOCABULARY, sample
from tests.sites.prime_rl.topk.carried import drawn, stream
from tests.traces.turns import node, trace

K = 8
SURE = 0.93
"""What the better teacher gives to the token that should come."""


@dataclass(frozen=True)
class Feed:
    """Batches for trainers of `num_ranks`, steps 1 to `last`.

    kind  "drawn": random candidates at each trained token but the third ones
          "pairs": the same at each trained token, in one of every two steps that have the same rollouts: the first of
          one pair, the second of the next
          "better": our stamps of a teacher, as both streams, which says that each token is the one before it plus 1
    """

    folders: list[str]
    num_ranks: int = 1
    last: int = 1
    kind: str = "drawn"
    vocabulary: int = VOCABULARY
    sequence: int = SEQUENCE
    lengths: tuple[int, int] = (12, 40)


def is_taught(step: int) -> bool:
    """Whether a step of "pairs" carries candidates; they count from 1."""
    return step % 4 in (1, 0)


def samples_drawn(feed: Feed, step: int) -> list[Any]:
    """One step's of the kind "drawn"."""
    samples = plain(feed, step)
    for number, one in enumerate(samples):
        carry(feed, one, 100 * step + number, torch.arange(len(one.token_ids)) % 3 != 0)
    return samples


def samples_in_pairs(feed: Feed, step: int) -> list[Any]:
    """One step's of the kind "pairs"."""
    samples = plain(feed, (step + 1) // 2)
    for number, one in enumerate(samples):
        if is_taught(step):
            carry(feed, one, 100 * step + number, torch.ones(len(one.token_ids), dtype=torch.bool))
    return samples


def plain(feed: Feed, seed: int) -> list[Any]:
    """Random rollouts."""
    randomness = random.Random(seed)
    return [sample(randomness, feed.vocabulary, feed.lengths) for _ in range(SAMPLES)]


def carry(feed: Feed, one: Any, seed: int, taught: torch.Tensor) -> None:
    """Put random candidates into a sample, at its trained tokens that are taught."""
    from prime_rl.transports.rollouts.types import RoutedExperts  # pyright: ignore[reportMissingImports]

    num_tokens = len(one.token_ids)
    ids, logprobs = drawn(num_tokens, K, feed.vocabulary, seed)
    untaught = ~torch.tensor(one.mask) | ~taught
    ids[untaught], logprobs[untaught] = -1, -torch.inf
    array = stream(ids, logprobs, torch.zeros(num_tokens, dtype=torch.bool))
    one.routed_experts = RoutedExperts(array.numpy().tobytes(), list(array.shape), "int32")


def samples_of_a_better_teacher(feed: Feed, step: int) -> list[Any]:
    """One step's of the kind "better": traces that are stamped as our environment does, by upstream's own samples."""
    from prime_rl.orchestrator.trajectories import trace_to_samples  # pyright: ignore[reportMissingImports]

    samples = []
    for one in plain(feed, step):
        num_prompt = one.mask.index(True)
        prompt, answer = one.token_ids[:num_prompt], one.token_ids[num_prompt:]
        made = trace(node(None, "user", prompt), node(0, "assistant", answer, num_sampled=len(answer)))
        made.nodes[1].logprobs = one.logprobs[num_prompt:]
        made.nodes[1].advantages = one.advantages[num_prompt:]
        said = better(one.token_ids, feed.vocabulary)
        hinted = {id(made.nodes[1]): said[num_prompt:]}
        scores = [[Score("big", 1.0, Scores([0.0] * len(said), said))]]
        stamp_candidates(made, scoring_paths(made), scores, hinted, top_k=K, num_streams=2)
        (sent,) = trace_to_samples(made, env_name="letters")
        sent.temperatures = [1.0] * len(sent.token_ids)
        samples.append(sent)
    return samples


def better(token_ids: list[int], vocabulary: int) -> Candidates:
    """What the better teacher says to each token: the one before it plus 1, and little to the seven after that."""
    before = np.array([0, *token_ids[:-1]], np.int32)[:, None]
    logprobs = np.log(np.array([SURE, *[0.01 * (1 - SURE)] * (K - 1)], np.float32))
    ids = (before + np.arange(1, K + 1, dtype=np.int32)) % vocabulary
    return Candidates(ids, np.tile(logprobs, (len(token_ids), 1)))


KINDS: dict[str, Callable[[Feed, int], list[Any]]] = {
    "drawn": samples_drawn,
    "pairs": samples_in_pairs,
    "better": samples_of_a_better_teacher,
}


def send(feed: Feed) -> None:
    """Send the batches of all steps."""
    from prime_rl.trainer.batch import prepare_batch  # pyright: ignore[reportMissingImports]
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender  # pyright: ignore[reportMissingImports]

    senders = [FileSystemMicroBatchSender(Path(folder), feed.num_ranks, 1) for folder in feed.folders]
    for step in range(1, feed.last + 1):
        batches = prepare_batch(KINDS[feed.kind](feed, step), feed.sequence, feed.num_ranks, sum)
        for sender in senders:
            asyncio.run(sender.send(batches))
