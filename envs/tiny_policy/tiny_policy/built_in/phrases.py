"""The texts that are tokens for the models that use tools, beside bytes: those that calls repeat.

A byte tokenizer spends 900 tokens on Qwen's words about three tools before the task begins. What a tokenizer learns
from many conversations with tools is spelled out here instead; any text can still be said, byte by byte.
"""

from tiny_policy.qwen3 import QUIET, TOOLS_FOOTER, TOOLS_HEADER

PHRASES = (
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
    QUIET,
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
