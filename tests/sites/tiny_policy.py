"""A policy of two narrow layers with random weights, and samples to train it on."""

import random

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from composer_prime.sites.embedded.batches import TrainingSample

VOCABULARY = 32


def random_policy(seed: int = 0, **overrides) -> PreTrainedModel:
    """A random Qwen3 of hidden size 32, fp32, in training mode."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # so that a random policy is far from uniform
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3Config(**settings | overrides)).float().train()


def random_sample(rng: random.Random, length: int | None = None, *, with_ref: bool = False) -> TrainingSample:
    """A prompt of about half the tokens, then sampled ones with an advantage of their own."""
    length = length or rng.randint(2, 24)
    prompt = rng.randint(1, max(1, length - 1))
    mask = [index >= prompt for index in range(length)]
    advantage = rng.choice([-1.0, -0.5, 0.5, 1.0])
    return TrainingSample(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        mask=mask,
        logprobs=[-3.0 * rng.random() if trained else 0.0 for trained in mask],
        temperatures=[rng.choice([0.5, 1.0]) if trained else 1.0 for trained in mask],
        advantages=[advantage if trained else 0.0 for trained in mask],
        env_name="reverse-letters",
        reward=rng.random(),
        policy_version=0,
        ref_logprobs=[-rng.random() if trained else 0.0 for trained in mask] if with_ref else None,
    )


def random_samples(seed: int, num_samples: int, *, with_ref: bool = False) -> list[TrainingSample]:
    rng = random.Random(seed)
    return [random_sample(rng, with_ref=with_ref) for _ in range(num_samples)]


def logprobs_alone(model: PreTrainedModel, sample: TrainingSample) -> list[float]:
    """The sample's logprobs from a forward pass of its own, the plain way; nan for the first token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0].double()
    found = [float("nan")]
    for index in range(1, len(sample.token_ids)):
        row = (logits[index - 1] / sample.temperatures[index]).log_softmax(0)
        found.append(row[sample.token_ids[index]].item())
    return found
