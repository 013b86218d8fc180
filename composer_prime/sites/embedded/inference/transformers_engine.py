"""The default engine: a transformers model on a thread of its own, fed and answered from the event loop.

What a request may ask is checked here; worker.py is the thread, decoder.py the batching.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.inference.decoder import Sequence
from composer_prime.sites.embedded.inference.engine import Completion, Gate, GenerateRequest
from composer_prime.sites.embedded.inference.reload import copy_weights, read_weights
from composer_prime.sites.embedded.inference.worker import Worker
from composer_prime.sites.embedded.model import check_attends, load_policy


class TransformersEngine:
    """See `Engine`. Requests beyond `max_batch_size` wait their turn.

    folder         the model's.
    seed           of the requests that bring none: the same requests in the same order give the same tokens.
    max_model_len  upper bound; the model's own is taken when it is lower.
    on_failure     called on the event loop when the engine can't go on; all requests fail from then on.
    num_threads    torch's, for decoding.
    device         where the model is, in torch's word.
    is_permuted    whether one permutation of the vocabulary is put on all its logits: a control that is as sure as the
                   model, and wrong.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        max_batch_size: int,
        max_model_len: int,
        on_failure: Callable[[BaseException], None],
        num_threads: int = 1,
        device: str = "cpu",
        is_permuted: bool = False,
    ) -> None:
        self.max_model_len = max_model_len
        self.policy_version = 0
        self._folder = folder
        self._seeds = random.Random(seed)
        self._max_batch_size = max_batch_size
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._device = device
        self._is_permuted = is_permuted
        self._gate = Gate()
        self._is_started = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._worker = Worker(self._load, self._max_batch_size, loop, self._on_failure, self._num_threads)
        self._is_started = True
        model = await self._worker.start()
        self.max_model_len = min(self.max_model_len, _num_positions(model, self.max_model_len))
        self._vocabulary = model.config.get_text_config().vocab_size
        self._end_tokens = _end_tokens(model)
        self._model = model

    async def generate(self, request: GenerateRequest) -> Completion:
        sequence = self._sequence(request)
        async with self._gate.passing():
            version = self.policy_version
            await self._worker.run(sequence)
        if sequence.finish_reason is None:
            raise SiteError(
                f"policy version {version} gave logits that aren't finite after {len(sequence.token_ids)} tokens: "
                "lower the learning rate"
            )
        return Completion(
            request.request_id,
            sequence.token_ids,
            sequence.logprobs,
            sequence.finish_reason,
            policy_version=version,
            prompt_logprobs=sequence.prompt_logprobs,
            top_logprobs=sequence.top_logprobs,
        )

    async def load_weights(self, folder: Path, version: int) -> None:
        loop = asyncio.get_running_loop()
        weights = await loop.run_in_executor(None, read_weights, folder, self._model)
        async with self._gate.idle():
            await self._worker.call(lambda: copy_weights(weights, self._model))
            self.policy_version = version

    async def pause(self) -> None:
        await self._gate.pause()

    async def resume(self) -> None:
        await self._gate.resume()

    async def close(self) -> None:
        if self._is_started:
            await asyncio.get_running_loop().run_in_executor(None, self._worker.stop)

    def _load(self) -> PreTrainedModel:
        model = load_policy(self._folder, self._device)
        check_attends(model, self._folder)
        if self._is_permuted:
            model.register_forward_hook(_permute)
        return model

    def _sequence(self, request: GenerateRequest) -> Sequence:
        sampling = request.sampling
        room = self.max_model_len - len(request.token_ids)
        if room < 1:
            raise BadInput(
                f"prompt ({len(request.token_ids)} tokens) must be shorter than the context ({self.max_model_len} "
                "tokens): shorten it"
            )
        largest = max(request.token_ids)
        if largest >= self._vocabulary:
            raise BadInput(f"token_ids ({largest}) must be below the vocabulary's size ({self._vocabulary})")
        return Sequence(
            request,
            max_tokens=min(room, sampling.max_tokens or room),
            stop_token_ids=sampling.stop_token_ids | self._end_tokens,
            randomness=random.Random(sampling.seed if sampling.seed is not None else self._seeds.getrandbits(64)),
        )


def _permute(model: torch.nn.Module, arguments: object, output: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
    """A forward hook that puts the same permutation on the last dimension of every answer's logits."""
    assert output.logits is not None
    size = output.logits.shape[-1]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    output.logits = output.logits[..., order.to(output.logits.device)]
    return output


def _num_positions(model: PreTrainedModel, default: int) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or default


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a turn, as the model's generation config names them."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset([] if named is None else [named] if isinstance(named, int) else named)
