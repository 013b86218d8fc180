"""Continuous batching gives every sequence what it would get alone, however it is packed with others."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from composer_prime.sites.embedded.inference import decoder as decoder_module
from composer_prime.sites.embedded.inference.decoder import Decoder, Sequence
from composer_prime.sites.embedded.inference.engine import GenerateRequest, Sampling
from composer_prime.sites.embedded.model import load_policy
from tests.sites.tiny_folder import save_random_tiny, score


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_policy(save_random_tiny(tmp_path_factory.mktemp("model")))


def ask(prompt: list[int], *, max_tokens: int = 8, seed: int = 0, **sampling) -> Sequence:
    request = GenerateRequest("id", tuple(prompt), Sampling(**sampling))
    return Sequence(request, max_tokens, sampling.get("stop_token_ids", frozenset()), random.Random(seed))


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def finish(decoder: Decoder) -> None:
    while decoder.num_running:
        decoder.step()


def assert_scored_as_alone(policy: PreTrainedModel, sequence: Sequence) -> None:
    prompt, temperature = list(sequence.request.token_ids), sequence.request.sampling.temperature
    expected = score(policy, prompt, sequence.token_ids, temperature or 1.0)
    assert sequence.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_come_and_go_are_scored_as_alone(policy: PreTrainedModel, seed: int) -> None:
    rng = random.Random(seed)
    decoder = Decoder(policy)
    sequences: list[Sequence] = []
    for _ in range(16):
        arriving = [
            ask(
                random_prompt(rng, rng.choice([1, 2, 7, 30, 90])),
                max_tokens=rng.choice([1, 2, 5, 20]),
                seed=rng.getrandbits(32),
                temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
            )
            for _ in range(rng.randrange(4))
        ]
        if arriving:
            decoder.admit(arriving)
        sequences += arriving
        for _ in range(rng.randrange(6)):
            if decoder.num_running:
                decoder.step()
    finish(decoder)
    assert len(sequences) > 10
    for sequence in sequences:
        assert len(sequence.token_ids) == sequence.max_tokens and sequence.finish_reason == "length"
        assert_scored_as_alone(policy, sequence)


def test_a_seed_gives_the_same_tokens_in_any_company(policy: PreTrainedModel) -> None:
    rng = random.Random(1)
    prompt = random_prompt(rng, 12)
    alone, beside = ask(prompt, max_tokens=16, seed=5), ask(prompt, max_tokens=16, seed=5)
    decoder = Decoder(policy)
    decoder.admit([alone])
    finish(decoder)
    decoder.admit([ask(random_prompt(rng, 50), max_tokens=9, seed=6)])
    decoder.step()
    decoder.admit([beside, ask(random_prompt(rng, 3), max_tokens=30, seed=7)])
    finish(decoder)
    assert alone.token_ids == beside.token_ids


def test_what_is_over_leaves_at_once_and_stop_tokens_are_kept(policy: PreTrainedModel) -> None:
    prompt = random_prompt(random.Random(2), 10)
    probe = ask(prompt, max_tokens=6, temperature=0.0)
    decoder = Decoder(policy)
    decoder.admit([probe])
    finish(decoder)
    third = probe.token_ids[2]
    num_until_third = probe.token_ids.index(third) + 1
    stopping = ask(prompt, max_tokens=6, temperature=0.0, stop_token_ids=frozenset({third}))
    longer = ask(prompt, max_tokens=9, seed=1)
    over = decoder.admit([stopping, longer])
    while stopping not in over:
        over = decoder.step()
        assert decoder.num_running == 2 - (stopping in over)
    assert stopping.token_ids == probe.token_ids[:num_until_third] and stopping.finish_reason == "stop"
    finish(decoder)
    assert len(longer.token_ids) == 9


def test_one_prompt_is_computed_once_until_weights_change(policy: PreTrainedModel, monkeypatch) -> None:
    computed: list[int] = []
    forward = Decoder._forward
    monkeypatch.setattr(
        Decoder, "_forward", lambda self, prompts: computed.append(len(prompts)) or forward(self, prompts)
    )
    rng = random.Random(3)
    prompt, other = random_prompt(rng, 20), random_prompt(rng, 25)
    decoder = Decoder(policy)
    group = [ask(prompt, seed=seed) for seed in range(4)]
    decoder.admit([*group, ask(other)])
    assert computed == [2]
    decoder.admit([ask(prompt, seed=9)])
    finish(decoder)
    assert computed == [2]
    assert len({tuple(sequence.token_ids) for sequence in group}) > 1
    for sequence in group:
        assert_scored_as_alone(policy, sequence)
    salted = GenerateRequest("id", tuple(prompt), Sampling(), cache_salt="other tenant")
    decoder.admit([Sequence(salted, 1, frozenset(), random.Random(0))])
    assert computed == [2, 1]
    decoder.forget()
    decoder.admit([ask(prompt)])
    assert computed == [2, 1, 1]


def test_kept_prompts_stay_within_their_bytes(policy: PreTrainedModel, monkeypatch) -> None:
    rng = random.Random(4)
    decoder = Decoder(policy)
    monkeypatch.setattr(decoder_module, "PROMPT_CACHE_BYTES", 100_000)
    for _ in range(30):
        decoder.admit([ask(random_prompt(rng, 20), max_tokens=1)])
    kept = sum(prompt.nbytes for prompt in decoder._prompts.values())
    assert 0 < kept == decoder._prompt_bytes <= 100_000


def test_more_prompt_tokens_than_one_forward_takes_are_cut(policy: PreTrainedModel, monkeypatch) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 64)
    rng = random.Random(5)
    sequences = [ask(random_prompt(rng, length), max_tokens=3, seed=length) for length in (40, 5, 100, 21, 6)]
    decoder = Decoder(policy)
    decoder.admit(sequences)
    finish(decoder)
    for sequence in sequences:
        assert_scored_as_alone(policy, sequence)


def test_sliding_windows_are_honoured() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.2,
    )
    windowed = AutoModelForCausalLM.from_config(config).eval()
    rng = random.Random(6)
    decoder = Decoder(windowed)
    sequences = [ask([rng.randrange(64) for _ in range(length)], max_tokens=12, seed=length) for length in (3, 17, 9)]
    decoder.admit(sequences)
    finish(decoder)
    for sequence in sequences:
        assert_scored_as_alone(windowed, sequence)


def test_a_policy_that_gives_no_numbers_breaks_its_sequences_only(tmp_path: Path) -> None:
    broken = load_policy(save_random_tiny(tmp_path))
    with torch.no_grad():
        broken.get_parameter("model.embed_tokens.weight")[7] = float(
            "nan"
        )  # tied: also the logit of token 7, so every draw is broken
    decoder = Decoder(broken)
    sequence = ask([1, 2, 3])
    assert decoder.admit([sequence]) == [sequence]
    assert sequence.is_broken and sequence.finish_reason is None and not decoder.num_running
