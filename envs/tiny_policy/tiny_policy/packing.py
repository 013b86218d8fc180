"""Samples packed into rows as a tree: what several begin with, such as the list of tools, is computed once.

A conversation and its turns with hints differ in little, and so do the openings of all tasks. Each token sees those
before it in its own sample, at the positions that it would have alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tiny_policy.rendering import Sample

ROW_TOKENS = 1024
"""Tokens that a row has at most, unless one family alone has more: attention costs the square of its length."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, and which tokens are taught.

    token_ids, positions  int64 (rows, tokens)
    visible               bool (rows, 1, tokens, tokens)
    rows, places          int64 (taught,): where the token stands after which a taught one is said
    targets, turns        int64 (taught,): the taught token, and the number of its turn in the batch, from 0
    hinted                whether each turn follows a hint
    """

    token_ids: Tensor
    positions: Tensor
    visible: Tensor
    rows: Tensor
    places: Tensor
    targets: Tensor
    turns: Tensor
    hinted: list[bool]

    def turn_logprobs(self, model: Any) -> Tensor:
        """Log-probability of each turn, in nats, (turns,)."""
        hidden = model.get_decoder()(
            input_ids=self.token_ids, position_ids=self.positions, attention_mask=self.visible, use_cache=False
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden[self.rows, self.places])
        losses = functional.cross_entropy(logits, self.targets, reduction="none")
        return torch.zeros(len(self.hinted)).index_add(0, self.turns, -losses)


class _Row:
    """A tree of samples, its tokens in the order in which one walks it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        """One more than the place of the last token that sees this one."""
        self.families: list[Sequence[Sample]] = []

    def add_all(self) -> list[tuple[Sample, list[int]]]:
        """Lay the families' samples out; each with the places of its tokens."""
        before, path, laid = list[int](), list[int](), []
        samples = [each for family in self.families for each in family]
        for each in sorted(samples, key=lambda sample: sample.token_ids):
            same = num_same(before, each.token_ids)
            self._end(path[same:])
            path = path[:same]
            for position in range(same, len(each.token_ids)):
                path.append(len(self.token_ids))
                self.token_ids.append(each.token_ids[position])
                self.positions.append(position)
                self.ends.append(0)
            laid.append((each, list(path)))
            before = each.token_ids
        self._end(path)
        return laid

    def _end(self, places: Sequence[int]) -> None:
        for place in places:
            self.ends[place] = len(self.token_ids)

    def pad(self, width: int) -> None:
        """Fill the row up with tokens that nobody sees."""
        for place in range(len(self.token_ids), width):
            self.token_ids.append(0)
            self.positions.append(0)
            self.ends.append(place + 1)


def num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def size(family: Sequence[Sample]) -> int:
    """Tokens that a family takes in a row of its own."""
    ordered = sorted(sample.token_ids for sample in family)
    return len(ordered[0]) + sum(len(after) - num_same(before, after) for before, after in itertools.pairwise(ordered))


def pack(families: Sequence[Sequence[Sample]]) -> Batch:
    """One batch of families of samples; those of a family share a row."""
    packed, used, shared = [_Row()], 0, families[0][0].token_ids
    for family in families:
        here = num_same(shared, family[0].token_ids)
        more = size(family) - (here if packed[-1].families else 0)
        if packed[-1].families and used + more > ROW_TOKENS:
            packed.append(_Row())
            used, more = 0, size(family)
        packed[-1].families.append(family)
        used += more
    taught: list[tuple[int, int, int, int]] = []
    hinted: list[bool] = []
    for number, row in enumerate(packed):
        for each, places in row.add_all():
            for position, turn in enumerate(each.turns):
                if turn:
                    taught.append((number, places[position - 1], each.token_ids[position], len(hinted) + turn - 1))
            hinted += [each.hinted] * max(each.turns)
    width = max(len(row.token_ids) for row in packed)
    for row in packed:
        row.pad(width)
    ends = torch.tensor([row.ends for row in packed])
    order = torch.arange(width)
    visible = (order[:, None] >= order) & (order[:, None] < ends[:, None])
    rows, places, targets, turns = torch.tensor(taught).T.contiguous()
    return Batch(
        torch.tensor([row.token_ids for row in packed]),
        torch.tensor([row.positions for row in packed]),
        visible[:, None],
        rows,
        places,
        targets,
        turns,
        hinted,
    )
