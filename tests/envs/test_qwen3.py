"""The tokenizer of tiny policies, and its chat template: as the qwen3 renderer reads and writes."""

import pytest
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig

from tiny_policy.qwen3 import tiny_config, tiny_tokenizer

RENDERER = create_renderer(tiny_tokenizer(), Qwen3RendererConfig(enable_thinking=False))
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_template_and_renderer_write_the_same_without_thinking(tools: list | None) -> None:
    tokenizer = tiny_tokenizer()
    for messages in (CONVERSATION[:2], CONVERSATION[1:2], CONVERSATION[:4], CONVERSATION):
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        rendered = RENDERER.render_ids(messages, tools=tools, add_generation_prompt=True)
        assert tokenizer.encode(str(text), add_special_tokens=False) == rendered


def test_tokenizer_is_one_token_a_byte_and_reads_back_any_text() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == tiny_config().vocab_size == 265
    text = "naïve 日本 \n\t<think>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("naïve 日本 \n\t".encode()) + 1
    assert tokenizer.decode(ids) == text
