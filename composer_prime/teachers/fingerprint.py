"""Whether a served model reads token ids as the policy does: both tokenizers are put to the same questions.

Token ids are all that travels to a teacher, so another vocabulary would make its numbers nonsense without an error.
A server shows no tokenizer files, but it decodes and encodes: every id of the policy's vocabulary, and a text whose
pieces depend on merges, digits, spaces and special tokens.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_prime.config.model_folder import loading

BLOCK_IDS = 4096
"""Token ids that are decoded by one request."""

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, can't it?\n\n\tdef f(x):\n        return x ** 2  # 3.14159\n"
    "naïve café Ünïcødé Привет мир 你好世界 こんにちは 🙂👩‍🚀 https://example.org/?a=1&b=%20 1234567890    end"
)


@dataclass(frozen=True)
class Fingerprint:
    """A tokenizer's answers.

    blocks  the texts of ids 0 to 4095, 4096 to 8191, ..., without blanks, about which decoders differ by settings
    probe   the token ids of `PROBE` and the special tokens' names
    """

    blocks: tuple[str, ...]
    probe: tuple[int, ...]

    @property
    def sha256(self) -> str:
        """Of all the answers, in hex."""
        return hashlib.sha256(json.dumps([self.blocks, self.probe]).encode()).hexdigest()

    def difference(self, other: "Fingerprint") -> str | None:
        """Where the two first part, in words; None when they are equal."""
        for number, (ours, theirs) in enumerate(zip(self.blocks, other.blocks, strict=True)):
            if ours != theirs:
                return f"token ids {number * BLOCK_IDS} to {(number + 1) * BLOCK_IDS - 1} mean something else"
        return None if self.probe == other.probe else "the same text makes other token ids"


@dataclass(frozen=True)
class Questions:
    """What every tokenizer is asked: how many ids to decode, and the text to encode."""

    num_ids: int
    text: str

    @property
    def blocks(self) -> list[list[int]]:
        """The ids, cut into requests."""
        starts = range(0, self.num_ids, BLOCK_IDS)
        return [list(range(start, min(start + BLOCK_IDS, self.num_ids))) for start in starts]

    @classmethod
    def of(cls, tokenizer: Any) -> "Questions":
        """Those that tell another tokenizer from this one, which is transformers'."""
        return cls(len(tokenizer), PROBE + "".join(tokenizer.all_special_tokens))


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer in a folder or of a Hugging Face id. Raises ModelError when it can't be loaded."""
    from transformers import AutoTokenizer

    with loading(f"tokenizer ({name})", "give a folder or a Hugging Face id"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def own_fingerprint(tokenizer: Any, questions: Questions) -> Fingerprint:
    """The answers of a transformers tokenizer in this process."""
    texts = [tokenizer.decode(block) for block in questions.blocks]
    return fingerprint(texts, tokenizer.encode(questions.text, add_special_tokens=False))


async def served_fingerprint(
    questions: Questions,
    decode: Callable[[Sequence[int]], Awaitable[str]],
    encode: Callable[[str], Awaitable[Sequence[int]]],
) -> Fingerprint:
    """The answers of a tokenizer behind a server; raises what `decode` and `encode` raise."""
    texts = [await decode(block) for block in questions.blocks]
    return fingerprint(texts, await encode(questions.text))


def fingerprint(texts: Sequence[str], probe: Sequence[int]) -> Fingerprint:
    """The record of a tokenizer's answers. Blanks are left out of texts: a decoder may clean them up."""
    return Fingerprint(tuple(text.replace(" ", "") for text in texts), tuple(probe))
