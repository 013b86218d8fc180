"""What the tiny model with tools sees before RL is what environment and renderer will show it, token for token."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import asyncio
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from renderers import create_renderer
from verifiers.v1.mcp import ToolsetConfig

from composer_prime.config.recipe import RendererConfig
from composer_prime.sites.embedded.renderer_choice import renderer_settings
from composer_prime.sites.embedded.tools.in_process import ToolsetThread
from tiny_policy.built_in import conversations
from tiny_policy.built_in.conversations import Conversation, Segment, opening, tools_json
from tiny_policy.built_in.models import BUILT_IN
from tiny_policy.built_in.phrases import PHRASES
from tool_letters import BoxState, BoxTools, ToolLettersData

TOOLS_MODEL = BUILT_IN["tiny-tools"]
TOKENIZER = TOOLS_MODEL.tokenizer()


def encode(segments: list[Segment]) -> list[int]:
    return [token for each in segments for token in TOKENIZER.encode(each.text, add_special_tokens=False)]


def drawn(number: int) -> list[Conversation]:
    dice = random.Random(7)
    return [Conversation(dice) for _ in range(number)]


def messages_of(name: str, segments: list[Segment]) -> list[dict[str, Any]]:
    """A conversation as chat messages, read back from its text."""
    text = "".join(each.text for each in segments)
    first, *turns = text.split("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Code in box {first}"}]
    for turn in turns:
        said, _, answer = turn.partition("<|im_end|>")
        if said.startswith("<tool_call>"):
            call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            wire = {"id": "1", "type": "function", "function": call}
            messages.append({"role": "assistant", "content": "", "tool_calls": [wire]})
        else:
            messages.append({"role": "assistant", "content": said})
        if answer:
            content = answer.removeprefix("\n<|im_start|>user\n<tool_response>\n").removesuffix("\n</tool_response>")
            messages.append({"role": "tool", "tool_call_id": "1", "content": content})
    return messages


def test_a_conversation_has_the_tokens_that_the_renderer_gives_it() -> None:
    settings = renderer_settings(RendererConfig(), "tiny-tools", Path())
    assert settings is not None
    from renderers.configs import Qwen3RendererConfig

    renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(**settings))  # type: ignore[arg-type]
    for conversation in drawn(40):
        segments = list(conversation.segments())
        messages = messages_of(conversation.name, segments)
        rendered = renderer.render(messages, tools=tools_json()).token_ids  # type: ignore[arg-type]
        ours = encode([Segment(opening()), *segments])
        assert rendered[: len(ours)] == ours, messages


def test_the_tools_are_listed_and_answer_as_the_environments_own() -> None:
    async def compare() -> int:
        number = 0
        for conversation in drawn(60):
            data = {"box": conversation.name, "letter": conversation.letter, "answer": conversation.code}
            task = ToolLettersData.model_validate({**data, "locks": conversation.locks})
            trace: Any = SimpleNamespace(state=BoxState())
            thread = ToolsetThread([BoxTools(ToolsetConfig())], task)
            specs = {spec.name: spec for spec in await thread.open()}
            assert [spec.to_wire() for spec in specs.values()] == tools_json()
            try:
                messages = messages_of(conversation.name, list(conversation.segments()))
                for said, answered in itertools.pairwise(messages):
                    if answered["role"] != "tool":
                        continue
                    call = said["tool_calls"][0]["function"]
                    shown = answered["content"].partition("\n\nHint: ")[0]
                    if call["name"] not in {"open", "code", "unlock"}:
                        assert shown == f"error: unknown tool '{call['name']}'"
                        continue
                    answer = await thread.call(specs[call["name"]], call["arguments"], 60.0, trace)
                    number += 1
                    if "validation error" in answer:  # with pydantic's version in it
                        assert answer.partition("pydantic.dev")[0] == shown.partition("pydantic.dev")[0]
                    else:
                        assert answer == shown
            finally:
                await thread.close()
        return number

    assert asyncio.run(compare()) > 60


def test_without_hints_and_locks_one_conversation_in_five_or_so_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "HINTED", 0.0)
    monkeypatch.setattr(conversations, "LOCKED", 0.0)
    solved = 0
    for conversation in drawn(2000):
        list(conversation.segments())
        solved += conversation.is_solved
    assert 0.1 < solved / 2000 < 0.3


def test_phrases_are_tokens_of_their_own_and_letters_stand_for_themselves() -> None:
    assert len(TOKENIZER) == TOOLS_MODEL.config().vocab_size
    assert all(len(TOKENIZER.encode(phrase, add_special_tokens=False)) == 1 for phrase in PHRASES)
    for letter in "abcdefghijklmnopqrstuvwxyz":
        assert TOKENIZER.decode(TOKENIZER.encode(f'": "{letter}"}}}}\n', add_special_tokens=False)[1:2]) == letter
    text = "any text, 'quoted' and {braced}: \u00e4\u4e2d <b>"
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text
