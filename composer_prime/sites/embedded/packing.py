"""From samples to micro batches and from a model to the logprobs of their trained tokens.

Samples are packed into rows, block-diagonal: no token attends to another sample's. The vocabulary is touched only where
a trained token is predicted, which for short answers to long prompts is a small part of a batch.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from composer_prime.errors import SiteError
from composer_prime.sites.embedded.batches import TrainingSample

MICRO_BATCH_TOKENS = 1536
"""Tokens of one forward pass, about: larger ones take longer per token on a CPU, whose caches they leave."""

STREAMS = ("hint", "replay")
"""Of teachers' candidates: the hinted teacher's, and the mixture of the replay teachers'."""

_PADDING = {
    "input_ids": (torch.int64, 0),
    "position_ids": (torch.int64, 0),
    "loss_mask": (torch.bool, False),
    "advantages": (torch.float32, 0.0),
    "inference_logprobs": (torch.float32, 0.0),
    "temperatures": (torch.float32, 1.0),
    "ref_logprobs": (torch.float32, 0.0),
}


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass; tensors are `(rows, width)`, on the CPU.

    input_ids           int64; 0 in the padding at a row's end
    position_ids        int64, from 0 in each sample; padding counts on
    loss_mask           bool; False in padding and on each sample's first token, which nothing predicts
    advantages          fp32
    inference_logprobs  fp32, nats
    temperatures        fp32; 1.0 in padding
    ref_logprobs        fp32, nats; 0.0 says "no teacher here"
    seq_lens            per row, the lengths of its samples from left to right; the rest is padding
    candidates          int32 (rows, width, 2 or 4, k), as teachers/carrier.py packs them, zero where no teacher has
                        a word; None: nowhere
    """

    input_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    advantages: Tensor
    inference_logprobs: Tensor
    temperatures: Tensor
    ref_logprobs: Tensor
    seq_lens: tuple[tuple[int, ...], ...]
    candidates: Tensor | None = None

    def split(self, stream: Tensor) -> list[Tensor]:
        """A `(rows, width)` stream cut into one 1-D piece per sample, row by row; the padding is left out.

        The gradient of all pieces together is one concatenation, where slicing would add up a full stream for each.
        """
        width = stream.shape[1]
        sizes = [(*lengths, width - sum(lengths)) for lengths in self.seq_lens]
        pieces = stream.flatten().split([size for row in sizes for size in row])
        is_padding = [last for row in sizes for last in [*[False] * (len(row) - 1), True]]
        return [piece for piece, padding in zip(pieces, is_padding, strict=True) if not padding]


def pack(samples: Sequence[TrainingSample], seq_len: int, micro_tokens: int = MICRO_BATCH_TOKENS) -> list[MicroBatch]:
    """Pack samples into rows first-fit, longest first, and stack rows into micro batches of about `micro_tokens` each.

    A row is as wide as the longest sample: attention costs width squared. The result depends on the samples and
    their order alone. No samples: no micro batches.

    Raises SiteError when a sample is longer than `seq_len`.
    """
    if not samples:
        return []
    width = max(len(sample.token_ids) for sample in samples)
    if width > seq_len:
        raise SiteError(
            f"a sample has {width} tokens, which is more than seq_len ({seq_len}): raise seq_len, or lower "
            "orchestrator.train.sampling.max_completion_tokens"
        )
    rows = _first_fit(samples, width)
    num_rows = max(1, micro_tokens // width)
    return [_stack(rows[start : start + num_rows], width) for start in range(0, len(rows), num_rows)]


def _first_fit(samples: Sequence[TrainingSample], width: int) -> list[list[TrainingSample]]:
    rows: list[list[TrainingSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda one: -len(one.token_ids)):  # stable: equal lengths keep their order
        length = len(sample.token_ids)
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([])
            room.append(width)
            row = len(rows) - 1
        rows[row].append(sample)
        room[row] -= length
    return rows


def _stack(rows: Sequence[Sequence[TrainingSample]], width: int) -> MicroBatch:
    streams = {
        name: torch.full((len(rows), width), padding, dtype=dtype) for name, (dtype, padding) in _PADDING.items()
    }
    for row, samples in enumerate(rows):
        start = 0
        for sample in samples:
            stop = start + len(sample.token_ids)
            for name, values in _streams_of(sample).items():
                streams[name][row, start:stop] = torch.from_numpy(np.asarray(values)).to(streams[name].dtype)
            start = stop
        streams["position_ids"][row, start:] = torch.arange(start, width) - (start - len(samples[-1].token_ids))
    seq_lens = tuple(tuple(len(one.token_ids) for one in samples) for samples in rows)
    return MicroBatch(**streams, seq_lens=seq_lens, candidates=_stack_candidates(rows, width))


def _stack_candidates(rows: Sequence[Sequence[TrainingSample]], width: int) -> Tensor | None:
    shapes = {one.candidates.shape[1:] for samples in rows for one in samples if one.candidates is not None}
    if not shapes:
        return None
    (shape,) = shapes  # one k and one number of streams in a run
    stacked = torch.zeros((len(rows), width, *shape), dtype=torch.int32)
    for row, samples in enumerate(rows):
        start = 0
        for sample in samples:
            stop = start + len(sample.token_ids)
            if sample.candidates is not None:
                stacked[row, start:stop] = torch.from_numpy(sample.candidates)
            start = stop
    return stacked


def _streams_of(sample: TrainingSample) -> dict[str, Sequence[float] | range]:
    length = len(sample.token_ids)
    return {
        "input_ids": sample.token_ids,
        "position_ids": range(length),
        "loss_mask": [False, *sample.mask[1:]],
        "advantages": sample.advantages,
        "inference_logprobs": sample.logprobs,
        "temperatures": sample.temperatures,
        "ref_logprobs": sample.ref_logprobs or [0.0] * length,
    }


@dataclass(frozen=True)
class Taught:
    """What teachers say to trained tokens, beside what the policy says to the same candidates; m is at most the number
    of trained tokens times that of streams.

    places            int64 (m,): of the tokens, in the flat `(rows, width)`
    is_hint           bool (m,): the hinted teacher's; else the replay teachers'
    teacher_logprobs  fp32 (m, k), nats; -inf in empty slots, and in those of ids that the policy doesn't have
    student_logprobs  fp32 (m, k), nats, with a graph; of token 0 in empty slots
    """

    places: Tensor
    is_hint: Tensor
    teacher_logprobs: Tensor
    student_logprobs: Tensor


def trainer_logprobs(
    model: PreTrainedModel, batch: MicroBatch, streams: Collection[str] = STREAMS
) -> tuple[Tensor, Taught | None]:
    """Logprobs under `model` of the tokens of `loss_mask`, 0.0 elsewhere: fp32 `(rows, width)`, with a graph; and those
    of the candidates at these tokens, at temperature 1; None where there are none. Both are on the CPU, wherever the
    model is: a loss is many small steps on few numbers, some of them in fp64, which not every device has.

    streams  whose candidates are wanted, of `STREAMS`

    Token t of a sample is predicted by the logits of t - 1, divided by the temperature of t.

    transformers reads the blocks of a packed row off the position ids, which restart in each sample, as long as it is
    given no attention mask and no cache (masking_utils.find_packed_sequence_indices).
    """
    device = model.device
    targets = batch.loss_mask.flatten().nonzero().squeeze(1)
    with _head_sees_only(model, (targets - 1).to(device)):
        outputs = model(
            input_ids=batch.input_ids.to(device), position_ids=batch.position_ids.to(device), use_cache=False
        )
    plain = outputs.logits.squeeze(0).float()
    temperatures = batch.temperatures.flatten()[targets].unsqueeze(1)
    is_plain = bool((temperatures == 1).all())
    logits = plain if is_plain else plain / temperatures.to(device)
    log_sums = logits.logsumexp(1)
    tokens = batch.input_ids.flatten()[targets].unsqueeze(1).to(device)
    logprobs = (logits.gather(1, tokens).squeeze(1) - log_sums).cpu()
    empty = torch.zeros(batch.loss_mask.numel(), dtype=torch.float32)
    taught = _taught(plain, log_sums if is_plain else None, batch, targets, streams)
    return empty.index_copy(0, targets, logprobs).view(batch.loss_mask.shape), taught


def _taught(
    logits: Tensor, log_sums: Tensor | None, batch: MicroBatch, targets: Tensor, streams: Collection[str]
) -> Taught | None:
    """log_sums: of the logits, (targets,), where these are; None: not known yet. No copy of the logits is made."""
    if batch.candidates is None:
        return None
    packed = batch.candidates.flatten(0, 1)[targets].long()
    ids, bits = packed[:, 0::2], packed[:, 1::2]
    first = ids[:, :, 0]
    is_wanted = ((first < 0) & ("hint" in streams)) | ((first > 0) & ("replay" in streams))
    token, stream = is_wanted.nonzero(as_tuple=True)
    if len(token) == 0:
        return None
    chosen = ids[token, stream]
    places = chosen.abs() - 1
    is_known = (places >= 0) & (places < logits.shape[1])
    said = bits[token, stream].int().view(torch.float32)
    teacher = said.masked_fill(~is_known, -torch.inf)
    log_sums = logits.logsumexp(1) if log_sums is None else log_sums
    rows, columns = token.to(logits.device), places.masked_fill(~is_known, 0).to(logits.device)
    student = logits[rows.unsqueeze(1), columns] - log_sums[rows].unsqueeze(1)
    return Taught(targets[token], chosen[:, 0] < 0, teacher, student.cpu())


@contextmanager
def _head_sees_only(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """While inside, the model's logits are `(1, len(positions), vocabulary)`: those of these flat positions alone.

    A hook before the output embeddings picks the hidden states, so what a model does to its logits afterwards
    (scaling, soft caps) still happens; `logits_to_keep` can only pick the same columns of every row.
    """

    def pick(_head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[positions].unsqueeze(0), *inputs[1:])

    head = model.get_output_embeddings()
    assert head is not None  # load_policy gives causal LMs alone
    hook = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
