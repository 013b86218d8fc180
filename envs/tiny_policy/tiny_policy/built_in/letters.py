"""Supervised warm-up of the models for letters: they learn to be right now and then, so that RL has what to find.

A random policy never earns a reward, and one shown only right answers turns flat and stalls. So each prompt of the
letters tasks is shown with two answers, a plain copy (65 %) and the right one (35 %), until both are that likely; or
with the right one alone, until it begins to be found.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from composer_prime.errors import ModelError
from tiny_policy.built_in.warm_ups import WARM_UP, WarmUpConfig
from tiny_policy.descent import Progress, adamw, descend
from tiny_policy.qwen3 import QUIET

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LENGTH = 4
_MEASURED_TOGETHER = 16  # words in a forward: attention over a packed row costs the square of it


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """How it went: training steps, and the probability of the right answer to measured prompts at temperature 1."""

    steps: int
    accuracy: float


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Token ids around a word: `head + word + tail + answer + stop` is one turn as the qwen3 renderer writes it."""

    letters: Tensor  # (26 or fewer,) int64: id of each letter of the alphabet
    head: Tensor
    tail: Tensor
    stop: Tensor


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    config: WarmUpConfig = WARM_UP,
    progress: Progress | None = None,
) -> WarmUp:
    """Train `model` in place on demonstrations of the letters tasks; the same seed gives the same demonstrations.

    model    the tiny model, fp32, on any device. Left in eval mode.
    config   see there. "accuracy" is exact, not sampled: the mean probability of right answer and stop token.

    Raises ModelError when `config.max_steps` steps don't reach the accuracy.
    """
    layouts = {verb: _layout(tokenizer, verb, config.alphabet) for verb in ("Reverse", "Sort")}
    generator = torch.Generator().manual_seed(seed)
    optimizer = adamw(model, config.lr)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.ramp_steps))
    model.train()
    for step in range(1, config.max_steps + 1):
        verb = "Sort" if step % config.sort_every == 0 else "Reverse"
        copied, right = _answer_logprobs(model, layouts[verb], verb, _draw(config.batch_size, config, generator))
        descend(model, optimizer, -((1 - config.right) * copied + config.right * right).mean())
        ramp.step()
        if step % config.measure_every == 0:
            words = _draw(config.num_measured, config, generator)
            accuracy = _accuracy(model, layouts[config.measured], config.measured, words)
            if progress is not None:
                progress(f"step={step} accuracy={accuracy:.2f}")
            if config.accuracy[0] <= accuracy <= config.accuracy[1]:
                model.eval()
                return WarmUp(step, accuracy)
    raise ModelError(
        f"warm-up of the tiny model (run.seed {seed}) didn't come to an accuracy of {config.accuracy[0]} to "
        f"{config.accuracy[1]} within {config.max_steps} steps: choose another run.seed"
    )


def prompt_text(verb: str, word: str) -> str:
    """What the policy is shown for `<verb>: <word>`: the qwen3 renderer's text with thinking disabled."""
    return f"<|im_start|>user\n{verb}: {word}<|im_end|>\n<|im_start|>assistant\n{QUIET}"


def _layout(tokenizer: PreTrainedTokenizerBase, verb: str, alphabet: str) -> _Layout:
    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False))

    head, tail = prompt_text(verb, "|").split(": |")
    return _Layout(letters=encode(alphabet), head=encode(head + ": "), tail=encode(tail), stop=encode("<|im_end|>"))


def _draw(num_words: int, config: WarmUpConfig, generator: torch.Generator) -> Tensor:
    """Random words as letter numbers, (num_words, LENGTH) int64."""
    return torch.randint(len(config.alphabet), (num_words, LENGTH), generator=generator)


def _answer_logprobs(model: PreTrainedModel, layout: _Layout, verb: str, words: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the two answers' tokens, the copy and the right one, (num_words, LENGTH + 1) each.

    All in one row: the head that every prompt shares, then per word a block of word, tail, copy, right answer. A block
    sees the head and itself, its right answer doesn't see its copy, and positions are those of a turn on its own. That
    is a third of the tokens that a row per answer would cost.
    """
    num_words, num_head, num_tail = len(words), len(layout.head), len(layout.tail)
    copied = layout.letters[words]
    right = layout.letters[words.flip(1) if verb == "Reverse" else words.sort(1).values]
    blocks = torch.cat([copied, layout.tail.expand(num_words, -1), copied, right], dim=1)
    positions, visible = _packing(num_words, num_head, num_tail)
    device = model.device
    logits = model(
        input_ids=torch.cat([layout.head, blocks.flatten()])[None].to(device),
        position_ids=positions[None].to(device),
        attention_mask=visible[None, None].to(device),
        use_cache=False,
    ).logits
    last = LENGTH + num_tail - 1  # of the prompt, within a block
    logits = logits[0, num_head:].view(num_words, -1, logits.shape[-1])[:, last:]
    for_copy, for_right = logits[:, : LENGTH + 1], torch.cat([logits[:, :1], logits[:, LENGTH + 1 :]], dim=1)
    stop = layout.stop.expand(num_words, -1)
    return (
        _token_logprobs(for_copy, torch.cat([copied, stop], dim=1).to(device)),
        _token_logprobs(for_right, torch.cat([right, stop], dim=1).to(device)),
    )


@functools.cache
def _packing(num_words: int, num_head: int, num_tail: int) -> tuple[Tensor, Tensor]:
    """Positions, int64 (tokens,), and who sees whom, bool (tokens, tokens), of a head and `num_words` blocks."""
    block = 3 * LENGTH + num_tail
    answer = block - LENGTH  # where the right answer begins, within a block
    within = torch.arange(block)
    positions = torch.where(within < answer, within, within - LENGTH) + num_head
    positions = torch.cat([torch.arange(num_head), positions.repeat(num_words)])
    visible = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
    inside = torch.ones(block, block, dtype=torch.bool).tril()
    inside[answer:, answer - LENGTH : answer] = False
    visible[num_head:, num_head:] = torch.block_diag(*[inside] * num_words)
    return positions, visible


def _token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return -functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@torch.no_grad()
def _accuracy(model: PreTrainedModel, layout: _Layout, verb: str, words: Tensor) -> float:
    logprobs = [_answer_logprobs(model, layout, verb, part)[1].sum(dim=1) for part in words.split(_MEASURED_TOGETHER)]
    return float(torch.cat(logprobs).exp().mean())
