"""What teachers say in a micro batch: read from the field that upstream carries for its router replay, and drops here.

`routed_experts` is int32 [1, n, 2, k], or [1, n, 4, k] where a token may have both teachers: for each of its streams a
row of ids, each plus 1, and a row of fp32 log-probabilities by their bits. Ids below 0 are a hinted teacher's. All on
the CPU, before the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from composer_prime.errors import ConfigError

FIELD = "routed_experts"
TEMPERATURE = 1.0
"""At which every teacher speaks; the policy must be sampled at it, since only its lse is known."""


@dataclass(frozen=True)
class Taught:
    """The taught tokens of a micro batch, m in all; one that has both teachers is there twice.

    places    int64 (m,): where the token stands in the packed row
    tokens    int64 (m,): its id
    ids       int64 (m, k): the teacher's candidates; 0 in an empty slot
    logprobs  fp32 (m, k), nats; -inf in an empty slot
    hinted    bool (m,): by the hinted teacher, else by replay's
    in_rl     bool (m,): whether upstream's RL loss trains the token too
    """

    places: Tensor
    tokens: Tensor
    ids: Tensor
    logprobs: Tensor
    hinted: Tensor
    in_rl: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, chosen: Tensor) -> "Taught":
        """Some of them, by a mask or by indices."""
        return Taught(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def between(self, start: int, stop: int) -> "Taught":
        """Those that are predicted at the positions from `start` to before `stop`: one before their own."""
        return self[(self.places > start) & (self.places <= stop)]


def read(batch: Mapping[str, Any]) -> Taught | None:
    """The taught tokens of one of upstream's micro batches, its tensors [1, n]; None where it carries nothing.

    Only tokens of the loss mask are taught, so that padding isn't; and never the first of a packed sequence, which
    nothing predicts.

    Raises ConfigError for a field that holds something else, and for a batch whose policy has another distribution
    than its logits at temperature 1.
    """
    carried = batch.get(FIELD)
    if carried is None:
        return None
    _check(batch, carried)
    mask = batch["loss_mask"][0].to(torch.bool).clone()
    lengths = torch.tensor(batch["sequence_lengths"])
    mask[lengths.cumsum(0) - lengths] = False
    weights = batch.get("rl_weights")
    in_rl = torch.ones_like(mask) if weights is None else weights[0] != 0
    parts = []
    for stream in carried[0].unflatten(1, (-1, 2)).unbind(1):
        ids, logprobs = stream[:, 0].long(), stream[:, 1].contiguous().view(torch.float32)
        places = ((ids[:, 0] != 0) & mask).nonzero().flatten()
        ids, filled = ids[places], ids[places] != 0
        parts.append(
            Taught(
                places=places,
                tokens=batch["input_ids"][0, places],
                ids=torch.where(filled, ids.abs() - 1, 0),
                logprobs=torch.where(filled, logprobs[places], -torch.inf),
                hinted=ids[:, 0] < 0,
                in_rl=in_rl[places],
            )
        )
    taught = Taught(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Taught)))
    _check_temperature(batch["temperatures"][0, taught.places])
    return taught


def _check(batch: Mapping[str, Any], carried: Tensor) -> None:
    if carried.dtype != torch.int32 or carried.ndim != 4 or carried.shape[2] not in (2, 4):
        raise ConfigError(
            f"{FIELD} in a batch is {str(carried.dtype).removeprefix('torch.')} {tuple(carried.shape)}, and "
            "[trainer.distill] reads int32 (1, tokens, 2 or 4, k) there: let inference return no routed experts "
            "(enable_return_routed_experts = false), or take [trainer.distill] away"
        )
    masked = [name for name, value in batch.items() if "sampling_mask" in name and value is not None]
    if masked:
        raise ConfigError(
            f"a batch has {masked[0]}, by which the trainer's log-probabilities are those of a truncated distribution: "
            "sample without top_p, top_k and min_p, or take [trainer.distill] away"
        )


def _check_temperature(temperatures: Tensor) -> None:
    other = temperatures[temperatures != TEMPERATURE]
    if len(other):
        raise ConfigError(
            f"a taught token was sampled at temperature {other[0].item():g}, and its teacher speaks at "
            f"{TEMPERATURE:g}: set orchestrator.train.sampling.temperature to {TEMPERATURE:g}, or take "
            "[trainer.distill] away"
        )
