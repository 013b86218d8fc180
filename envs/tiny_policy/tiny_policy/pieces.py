"""The tokenizer of a tiny policy: a token a byte, and one for each text and each word that demonstrations repeat.

A byte tokenizer spends hundreds of tokens on a list of tools before the task begins. Here a tool of the list is one
token, and so is a word that many tasks share. What only a few tasks say, such as a name or a number, is spelled out, so
that it can be copied and put together letter by letter.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiny_policy.playing import Demonstration
from tiny_policy.qwen3 import MARKUP_TOKENS, QUIET, SPECIAL_TOKENS, TOOLS_FOOTER, TOOLS_HEADER, qwen_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORD = r"\n|[^\W\d]+|\d|[^\w\n]+"
"""A line's end, a run of letters, a digit, a run of what is left. A line's end stands alone, so that a message's tokens
don't depend on whether a hint follows it."""
MAX_WORDS = 1024
MIN_SHARE = 0.05
"""Share of the demonstrated tasks that must have a word in their conversations to make it a token."""
FIXED_PHRASES = (
    TOOLS_HEADER,
    TOOLS_FOOTER,
    QUIET,
    '\n{"name": "',
    '", "arguments": {"',
    '"}}\n',
    '{"error": "',
    '", "error_kind": "',
    '", "hint": "',
)
"""Qwen's own words about tools, the thinking that is off, and the JSON of calls and of errors. They are few tokens, so
that a value's place is told from all other places in JSON."""


@dataclass(frozen=True)
class Pieces:
    """Texts that are tokens: `phrases` wherever they stand, `words` where they are a whole word."""

    phrases: tuple[str, ...]
    words: tuple[str, ...]


def find_pieces(families: Sequence[Sequence[Demonstration]]) -> Pieces:
    """The texts that become tokens, the most widely used words first."""
    tools = {json.dumps(tool, ensure_ascii=False) for family in families for each in family for tool in each.tools}
    phrases = (*FIXED_PHRASES, *sorted(f"\n{tool}" for tool in tools))
    template = make_tokenizer(Pieces((), ()))
    by_length = sorted((*phrases, *SPECIAL_TOKENS, *MARKUP_TOKENS), key=len, reverse=True)
    fixed = re.compile("|".join(map(re.escape, by_length)))
    words: dict[int, set[str]] = {}
    for each in itertools.chain.from_iterable(families):
        text = template.apply_chat_template(
            each.messages,  # pyright: ignore[reportArgumentType]
            tools=each.tools or None,  # pyright: ignore[reportArgumentType]
            tokenize=False,
            enable_thinking=False,
        )
        words.setdefault(id(each.task), set()).update(re.findall(WORD, fixed.sub("\n", str(text))))
    counts = Counter(word for found in words.values() for word in found if len(word.encode()) > 1)
    least = max(2, MIN_SHARE * len(words))
    kept = sorted((word for word, count in counts.items() if count >= least), key=lambda word: (-counts[word], word))
    return Pieces(phrases, tuple(kept[:MAX_WORDS]))


def make_tokenizer(pieces: Pieces) -> PreTrainedTokenizerFast:
    """Ids: bytes, then words, then Qwen's special tokens, its markup and the phrases."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(part for part, _ in to_bytes.pre_tokenize_str(piece)) for piece in pieces.words]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORD), "isolated"), to_bytes])
    return qwen_tokenizer(backend, pieces.phrases)
