"""Continuous batching over one transformers model, on the calling thread: sequences start and end at any step.

Prompts that came together, and the same prompt coming again, are computed once: a group of rollouts asks for the same
prompt many times. Decoding then runs all sequences one token further per step.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from composer_prime.sites.embedded.inference.engine import FinishReason, GenerateRequest
from composer_prime.sites.embedded.inference.rows import KeyValues, Rows
from composer_prime.sites.embedded.inference.sampling import draw, likeliest

PREFILL_TOKENS = 8192
"""Tokens, padding included, of one forward over prompts; more prompts make more forwards."""
SCORE_TOKENS = 1024
"""The same for prompts that are scored, all of whose logits are there at once: 600 MB at a vocabulary of 150,000."""
PROMPT_CACHE_BYTES = 64 * 2**20
"""Keys and values of recent prompts that are kept for when they come again."""

_PromptKey = tuple[str | None, tuple[int, ...]]


@dataclasses.dataclass
class Sequence:
    """One request on its way. `finish_reason` is set when it is done, `is_broken` when the policy gave no number."""

    request: GenerateRequest
    max_tokens: int
    stop_token_ids: frozenset[int]
    randomness: random.Random
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    is_broken: bool = False

    def take(self, token: int, logprob: float) -> bool:
        """Append a sampled token; whether the sequence is over with it."""
        if logprob != logprob:
            self.is_broken = True
            return True
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Of the n tokens of a prompt after its first: their own logprobs, and the k likeliest ids with theirs."""

    tokens: list[int]
    own: list[float]
    ids: list[list[int]]
    logprobs: list[list[float]]

    def by_token(self, k: int) -> list[dict[int, float]]:
        """The own and the k likeliest of each token."""
        return [
            {token: own} | dict(zip(ids[:k], logprobs[:k], strict=True))
            for token, own, ids, logprobs in zip(self.tokens, self.own, self.ids, self.logprobs, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt's keys and values, the logits of the token after it, (vocabulary,), and its tokens' scores if asked."""

    key_values: KeyValues
    logits: Tensor
    scores: _Scores | None = None

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self.key_values)


class Decoder:
    """The sequences in flight on one model. Not thread-safe."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model  a causal LM in eval mode whose layers all attend (no recurrent state)."""
        self._model = model
        self._device = model.device
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        """As transformers calls it since 5.24, and before."""
        self._rows = Rows()
        self._running: list[Sequence] = []  # by row
        self._prompts: OrderedDict[_PromptKey, _Prompt] = OrderedDict()
        self._prompt_bytes = 0
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        self._is_windowed = bool(getattr(config, "sliding_window", None)) or any(k != "full_attention" for k in kinds)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @torch.inference_mode()
    def admit(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Compute prompts and draw a first token for each; those that are over with it are returned."""
        prompts = self._prefill([sequence.request for sequence in sequences])
        for sequence, prompt in zip(sequences, prompts, strict=True):
            if prompt.scores is not None and sequence.request.prompt_logprobs is not None:
                sequence.prompt_logprobs = prompt.scores.by_token(sequence.request.prompt_logprobs)
        finished = self._draw(sequences, torch.stack([prompt.logits for prompt in prompts]))
        going_on = [index for index, is_over in enumerate(finished) if not is_over]
        self._rows.add([prompts[index].key_values for index in going_on])
        self._running.extend(sequences[index] for index in going_on)
        return [sequence for sequence, is_over in zip(sequences, finished, strict=True) if is_over]

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Draw one more token for every running sequence; those that are over with it are returned."""
        rows = self._rows
        rows.grow_column()
        visible = rows.visible().to(self._device)
        logits = self._model(
            input_ids=torch.tensor([[sequence.token_ids[-1]] for sequence in self._running]).to(self._device),
            position_ids=rows.positions().to(self._device),
            # Four dimensions are taken as they are, which saves a quarter millisecond; a window has to be added to two.
            attention_mask=visible if self._is_windowed else visible[:, None, None, :],
            use_cache=True,
            **{self._cache_name: rows.cache},
        ).logits[:, -1]
        rows.step()
        finished = self._draw(self._running, logits)
        over = []
        for row in reversed(range(len(finished))):
            if finished[row]:
                over.append(self._running[row])
                self._running[row] = self._running[rows.remove(row)]
                self._running.pop()
        return over

    def forget(self) -> None:
        """Drop what past weights computed, while nothing runs: kept prompts, and buffers that may hold their NaNs."""
        self._rows = Rows()
        self._prompts.clear()
        self._prompt_bytes = 0

    def _draw(self, sequences: SequenceOf[Sequence], logits: Tensor) -> list[bool]:
        asked = [sequence.request.sampling for sequence in sequences]
        where = torch.device("cpu") if self._device.type == "mps" else self._device  # MPS has no fp64
        logits = logits.to(where).float()
        temperature = torch.tensor([sampling.temperature for sampling in asked]).to(where)
        tokens, logprobs = draw(
            logits,
            temperature,
            torch.tensor([sampling.top_p for sampling in asked]).to(where),
            torch.tensor([sequence.randomness.random() for sequence in sequences], dtype=torch.float64).to(where),
        )
        for row, sequence in enumerate(sequences):
            if k := sequence.request.top_logprobs:
                sequence.top_logprobs = [*(sequence.top_logprobs or []), likeliest(logits[row], temperature[row], k)]
        drawn = zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        return [sequence.take(token, logprob) for sequence, token, logprob in drawn]

    def _prefill(self, requests: SequenceOf[GenerateRequest]) -> list[_Prompt]:
        plain = self._compute([request for request in requests if request.prompt_logprobs is None])
        scored = self._score([request for request in requests if request.prompt_logprobs is not None])
        return [next(scored if request.prompt_logprobs is not None else plain) for request in requests]

    def _compute(self, requests: SequenceOf[GenerateRequest]) -> Iterator[_Prompt]:
        """The requests' prompts in their order, each computed once, or taken from those that came before."""
        keys: list[_PromptKey] = [(request.cache_salt, request.token_ids) for request in requests]
        found: dict[_PromptKey, _Prompt] = {}
        for key in keys:
            if key in self._prompts:
                self._prompts.move_to_end(key)
                found[key] = self._prompts[key]
        missing = sorted({key for key in keys if key not in found}, key=lambda key: (len(key[1]), key[1]))
        for batch in _batches(missing, PREFILL_TOKENS):
            for key, prompt in zip(batch, self._forward([token_ids for _, token_ids in batch]), strict=True):
                found[key] = prompt
                self._remember(key, prompt)
        return (found[key] for key in keys)

    def _score(self, requests: SequenceOf[GenerateRequest]) -> Iterator[_Prompt]:
        """The requests' prompts in their order, with logprobs; none is kept: what is scored doesn't come again."""
        keys: list[_PromptKey] = [(request.cache_salt, request.token_ids) for request in requests]
        scored = max((request.prompt_logprobs or 0 for request in requests), default=0)
        found: dict[_PromptKey, _Prompt] = {}
        for batch in _batches(sorted(set(keys), key=lambda key: (len(key[1]), key[1])), SCORE_TOKENS):
            prompts = self._forward([token_ids for _, token_ids in batch], scored)
            found.update(zip(batch, prompts, strict=True))
        return (found[key] for key in keys)

    def _forward(self, prompts: SequenceOf[tuple[int, ...]], scored: int | None = None) -> list[_Prompt]:
        """Compute prompts of possibly different lengths, padded on the left; with `scored` likeliest tokens at each."""
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        tokens = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        real = torch.arange(width) >= torch.tensor(padding)[:, None]
        positions = (real.long().cumsum(dim=1) - 1).clamp_(min=0)
        tokens, real, positions = (one.to(self._device) for one in (tokens, real, positions))
        cache = DynamicCache()  # without the config: windowed layers would drop what a row keeps and masks
        logits = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=real,
            use_cache=True,
            logits_to_keep=1 if scored is None else 0,  # 0: all
            **{self._cache_name: cache},
        ).logits
        layers = [(cast(Tensor, keys), cast(Tensor, values)) for keys, values, *_ in cache]
        return [
            _Prompt(
                # Copies: a view would keep the whole batch alive.
                [(keys[row, :, pad:].clone(), values[row, :, pad:].clone()) for keys, values in layers],
                logits[row, -1].clone(),
                None if scored is None else _score(logits[row, pad:-1].float(), tokens[row, pad + 1 :], scored),
            )
            for row, pad in enumerate(padding)
        ]

    def _remember(self, key: _PromptKey, prompt: _Prompt) -> None:
        self._prompts[key] = prompt
        self._prompt_bytes += prompt.nbytes
        while self._prompt_bytes > PROMPT_CACHE_BYTES:
            _, dropped = self._prompts.popitem(last=False)
            self._prompt_bytes -= dropped.nbytes


def _score(logits: Tensor, tokens: Tensor, k: int) -> _Scores:
    """Of each of `tokens`, (n,), under its row of `logits`, fp32 (n, vocabulary), with the k likeliest."""
    total = logits.logsumexp(dim=1, keepdim=True)
    own = (logits.gather(1, tokens[:, None]) - total)[:, 0]
    likeliest = logits.topk(min(k, logits.shape[1]), dim=1)
    return _Scores(tokens.tolist(), own.tolist(), likeliest.indices.tolist(), (likeliest.values - total).tolist())


def _batches(keys: SequenceOf[_PromptKey], max_tokens: int) -> list[list[_PromptKey]]:
    """Cut prompts, shortest first, into batches of at most `max_tokens` padded tokens (or one longer prompt)."""
    batches: list[list[_PromptKey]] = []
    for key in keys:
        if not batches or (len(batches[-1]) + 1) * len(key[1]) > max_tokens:
            batches.append([])
        batches[-1].append(key)
    return batches
