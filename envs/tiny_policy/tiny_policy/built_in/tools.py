"""Brings a fresh model to where RL with tools begins: it writes well-formed calls, and succeeds now and then.

Trained on conversations.py's until their tokens are as likely as they can be: the policy then errs as
often as they do.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tiny_policy.built_in.conversations import Conversation, opening
from tiny_policy.built_in.warm_ups import TOOL_WARM_UP, ToolWarmUpConfig
from tiny_policy.descent import Progress, adamw, descend, learn_to_copy

ROW_CONVERSATIONS = 4


@dataclass(frozen=True)
class _Batch:
    """Rows of conversations behind the opening that those of a row share; (rows, tokens) each but the mask."""

    token_ids: Tensor
    positions: Tensor
    visible: Tensor  # bool (rows, 1, tokens, tokens)
    sampled: Tensor  # bool: the policy's own

    def to(self, device: torch.device) -> _Batch:
        return _Batch(*(one.to(device) for one in (self.token_ids, self.positions, self.visible, self.sampled)))


def warm_up_tools(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    config: ToolWarmUpConfig = TOOL_WARM_UP,
    progress: Progress | None = None,
) -> None:
    """Train `model` in place, fp32 where it is, on demonstrations; the same seed gives the same. Left in eval mode."""
    learn_to_copy(model, seed, steps=config.copy_steps, lr=config.lr, ramp_steps=config.ramp_steps)
    dice = random.Random(seed)
    encode = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False))
    head = encode(opening())
    optimizer = adamw(model, config.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / config.ramp_steps, (config.steps - step) / config.decay_steps, 1.0)
    )
    model.train()
    for step in range(1, config.steps + 1):
        batch = _pack(head, [_tokens(Conversation(dice), encode) for _ in range(config.batch_size)])
        loss = _loss(model, batch.to(model.device))
        descend(model, optimizer, loss)
        schedule.step()
        if progress is not None and step % config.say_every == 0:
            progress(f"step={step} loss={loss.item():.2f}")
    model.eval()


def _tokens(conversation: Conversation, encode: Callable[[str], list[int]]) -> tuple[list[int], list[float]]:
    """A conversation's token ids, and which of them the policy says."""
    ids, sampled = list[int](), list[float]()
    for segment in conversation.segments():
        ids += (encoded := encode(segment.text))
        sampled += [segment.weight] * len(encoded)
    return ids, sampled


def _pack(head: Sequence[int], conversations: Sequence[tuple[list[int], list[float]]]) -> _Batch:
    """ROW_CONVERSATIONS a row. Each sees the head and itself, at the positions that it would have alone; padding is a
    block of its own. Short rows: attention costs the square of their length, and a head each would double the rest."""
    rows = [
        conversations[first : first + ROW_CONVERSATIONS] for first in range(0, len(conversations), ROW_CONVERSATIONS)
    ]
    width = len(head) + max(sum(len(ids) for ids, _ in row) for row in rows)
    columns = list(zip(*(_fill(head, row, width) for row in rows), strict=True))
    token_ids, positions, blocks, sampled = (torch.tensor(column) for column in columns)
    visible = (blocks[:, :, None] == blocks[:, None]) | (blocks == 0)[:, None]
    visible &= torch.ones(width, width, dtype=torch.bool).tril()
    return _Batch(token_ids, positions, visible[:, None], sampled)


def _fill(
    head: Sequence[int], row: Sequence[tuple[list[int], list[float]]], width: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Token ids, positions, block numbers and what is the policy's own, `width` of each."""
    ids, positions, blocks, sampled = list(head), list(range(len(head))), [0] * len(head), [0.0] * len(head)
    for block, (said, is_own) in enumerate([*row, ([0] * width, [0.0] * width)], 1):
        ids += said
        positions += range(len(head), len(head) + len(said))
        blocks += [block] * len(said)
        sampled += is_own
    return ids[:width], positions[:width], blocks[:width], sampled[:width]


def _loss(model: PreTrainedModel, batch: _Batch) -> Tensor:
    """Mean negative log-likelihood of what the policy says; a conversation doesn't begin with it."""
    hidden = model.get_decoder()(
        input_ids=batch.token_ids, position_ids=batch.positions, attention_mask=batch.visible, use_cache=False
    ).last_hidden_state
    weights = batch.sampled[:, 1:]
    said = weights > 0
    head = model.get_output_embeddings()
    assert head is not None  # the tiny model has one
    logits = head(hidden[:, :-1][said])
    losses = functional.cross_entropy(logits, batch.token_ids[:, 1:][said], reduction="none")
    return (losses * weights[said]).sum() / weights.sum()
