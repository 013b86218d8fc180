"""The tiny model with random weights instead of a warm-up, as a folder, and the plain way to score what it sampled."""

from multiprocessing import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from composer_prime.sites.embedded.model import resolve_model
from tiny_policy.built_in import letters
from tiny_policy.qwen3 import tiny_config, tiny_tokenizer

END_OF_TURN = 258
PAST_VOCABULARY = 265


def save_random_tiny(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """Write model and tokenizer. Logits are spread enough that tokens differ in probability by orders of magnitude."""
    config = tiny_config()
    config.update({"initializer_range": 0.08, **overrides})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def score(model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the completion's tokens from one unbatched forward without a cache, in fp64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].double()
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(completion)]


def build_together(cache: Path, barrier: Barrier, folders: "Queue[str]") -> None:
    """In a process of its own: resolve the tiny model, past the look at the cache only when all parties are."""
    letters.warm_up = lambda *args, **kwargs: barrier.wait()
    folders.put(str(resolve_model("tiny", 0, cache)))
