"""The tokenizer of the tiny model that uses tools: tiny.py's bytes, and a token for each text that calls repeat.

A byte tokenizer spends 900 tokens on Qwen's words about three tools before the task begins. What a tokenizer learns
from many conversations with tools is spelled out here instead; any text can still be said, byte by byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_prime.sites.embedded.tiny import ARCHITECTURE, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
PIECES = (
    TOOLS_HEADER,
    TOOLS_FOOTER,
    '\n{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"properties": {"',
    '": {"title": "',
    '", "type": "string"}}, "required": ["',
    '"], "title": "',
    'Arguments", "type": "object"}}}',
    '\n{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}\n',
    '{"error": "',
    '", "error_kind": "',
    '", "hint": "',
    '"}',
    "bad_arguments",
    "error: unknown tool '",
    "Error executing tool ",
    ": 1 validation error for ",
    "Arguments\n",
    "\n  Field required [type=missing, input_value={'",
    "': '",
    "'}, input_type=dict]\n    For further information visit https://errors.pydantic.dev/",
    "/v/missing",
    "<think>\n\n</think>\n\n",
    "user",
    "user\n",
    "assistant\n",
    "system\n",
    *("open", "code", "unlock", "look", "find", "letter", "Letter", "box", "Box", "Code", "Unlock"),
    *(" in ", " of ", "call "),
    *("no ", "copy the ", "say the ", " first", "locked", "unlocked", "not ", "error", "\n\nHint: "),
    "\n\nHint: if you go on as planned, you call a tool that isn't there: ",
    "\nCall one of the tools that you were given, by its exact name.",
    "\n\nHint: if you now call ",
    " as planned, it refuses the arguments: ",
    "Check their names, types and values against the tool's description, and write valid JSON.",
)
"""Qwen's own words about tools, the JSON of schemas and calls, mcp's of a refused argument, and some common words. None
is a single letter: those stand for themselves."""

VOCABULARY_SIZE = ARCHITECTURE["vocab_size"] + len(PIECES)


def tool_config(architecture: dict[str, Any] = ARCHITECTURE) -> Qwen3Config:
    """One of tiny.py's architectures with these tokens."""
    from transformers import Qwen3Config

    return Qwen3Config(**{**architecture, "vocab_size": VOCABULARY_SIZE})


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """tiny.py's tokenizer; where several pieces begin at one place the longest counts."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    for piece in PIECES:
        tokenizer.add_tokens(AddedToken(piece, special=False, normalized=False))
    return tokenizer
