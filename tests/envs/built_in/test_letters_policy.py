"""What the models for letters know before RL."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig

from composer_prime.errors import ModelError
from composer_prime.sites.embedded.model import load_policy, resolve_model
from tests.sites.tiny_folder import save_random_tiny, score
from tiny_policy.built_in.letters import LENGTH, prompt_text, warm_up
from tiny_policy.built_in.warm_ups import SORT_WARM_UP, WarmUpConfig
from tiny_policy.qwen3 import tiny_tokenizer

RENDERER = create_renderer(tiny_tokenizer(), Qwen3RendererConfig(enable_thinking=False))


@pytest.mark.parametrize("verb", ["Reverse", "Sort"])
def test_warm_up_prompts_are_what_the_renderer_writes(verb: str) -> None:
    rendered = RENDERER.render_ids([{"role": "user", "content": f"{verb}: abfc"}], add_generation_prompt=True)
    assert tiny_tokenizer().encode(prompt_text(verb, "abfc"), add_special_tokens=False) == rendered


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_warm_policy_is_right_a_third_of_the_time(seed: int, tmp_path: Path) -> None:
    seen: list[str] = []
    folder = resolve_model("tiny", seed, tmp_path, progress=seen.append)
    policy = load_policy(folder)
    lowest, highest = WarmUpConfig().accuracy
    assert seen and lowest <= float(seen[-1].partition("accuracy=")[2]) <= highest
    assert resolve_model("tiny", seed, tmp_path, progress=lambda *_: pytest.fail("built twice")) == folder
    tokenizer = tiny_tokenizer()
    words = ["".join("abcdef"[(index // 6**place) % 6] for place in range(LENGTH)) for index in range(0, 6**LENGTH, 13)]

    def accuracy(verb: str, answers: list[str]) -> float:
        right = [
            sum(score(policy, tokenizer.encode(prompt_text(verb, word)), tokenizer.encode(f"{answer}<|im_end|>")))
            for word, answer in zip(words, answers, strict=True)
        ]
        return float(torch.tensor(right).exp().mean())

    assert lowest - 0.04 <= accuracy("Reverse", [word[::-1] for word in words]) <= highest + 0.04
    assert accuracy("Sort", ["".join(sorted(word)) for word in words]) > 0.02  # enough for RL to start from


@pytest.mark.slow
def test_tiny_sort_has_just_begun_to_sort_words_of_eight_letters(tmp_path: Path) -> None:
    policy, tokenizer = load_policy(resolve_model("tiny-sort", 0, tmp_path)), tiny_tokenizer()
    words = [
        "".join("abcdefgh"[(index // 8**place) % 8] for place in range(LENGTH)) for index in range(0, 8**LENGTH, 31)
    ]

    def right(answer: Callable[[str], str]) -> float:
        each = [
            sum(
                score(
                    policy, tokenizer.encode(prompt_text("Sort", word)), tokenizer.encode(f"{answer(word)}<|im_end|>")
                )
            )
            for word in words
        ]
        return float(torch.tensor(each).exp().mean())

    lowest, highest = SORT_WARM_UP.accuracy
    assert lowest / 2 <= right(lambda word: "".join(sorted(word))) <= 2 * highest
    assert right(lambda word: word) < lowest


def test_warm_up_that_never_gets_there_says_so(tmp_path: Path) -> None:
    policy = load_policy(save_random_tiny(tmp_path))
    with pytest.raises(ModelError, match=r"run\.seed 7.*within 15 steps: choose another run\.seed"):
        warm_up(policy, tiny_tokenizer(), 7, WarmUpConfig(max_steps=15))
