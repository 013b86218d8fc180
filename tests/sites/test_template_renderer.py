"""Twelve families' tokenizers and chat templates: prompts are the template's, sampled tokens stay, calls are read."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from renderers.base import ToolCallParseStatus
from transformers import PreTrainedTokenizerFast

from composer_prime.config.recipe import RendererConfig
from composer_prime.errors import ConfigError
from composer_prime.sites.embedded.renderer_choice import check_renderer, made_renderer, renderer_settings
from composer_prime.sites.embedded.template_renderer import TemplateRenderer, TemplateRendererConfig
from tests.sites.families import FAMILIES, save_tokenizer

Messages = list[dict[str, Any]]
REWRITES = {
    "qwen3": ("user", "tool"), "qwen3.5": ("user", "tool"), "deepseek-v3": ("user", "tool"),
    "gpt-oss": ("user", "tool"), "glm-4.5": ("user", "tool"), "mistral": ("user",),
}  # fmt: skip
"""Families whose templates write an answer otherwise once that follows: thinking goes, or what opened the prompt."""
CHOSEN = {"llama-3.1": "llama-3", "glm-4.5": "glm-4.5"}
"""Where a renderer of the renderers package writes all that the template writes."""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look into a box.",
        "parameters": {"type": "object", "properties": {"box": {"type": "string"}}},
    },
}
ARGUMENTS = {"box": "d"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is in box d?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "a brass key", "tool_call_id": "abcdefghi"}
ANSWER = {"role": "assistant", "content": "A brass key."}
AGAIN = {"role": "user", "content": "And in box e?"}

family = pytest.mark.parametrize("name", FAMILIES)
with_tools = pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedTokenizerFast]:
    made: dict[str, PreTrainedTokenizerFast] = {}

    def of(name: str) -> PreTrainedTokenizerFast:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_tokenizer(folder, name)
            made[name] = PreTrainedTokenizerFast.from_pretrained(folder)
        return made[name]

    return of


@pytest.fixture
def renderer(name: str, tokenizers: Callable[[str], PreTrainedTokenizerFast]) -> TemplateRenderer:
    return TemplateRenderer(tokenizers(name), TemplateRendererConfig(enable_thinking=False))  # type: ignore[call-arg]


def as_objects(messages: Messages, name: str) -> Messages:
    """Calls with their arguments as most templates want them."""
    if name == "deepseek-v3":
        return messages
    call = CALL | {"function": {"name": "look", "arguments": ARGUMENTS}}
    return [each | {"tool_calls": [call]} if "tool_calls" in each else each for each in messages]


def conversation(name: str, *, tools: bool) -> Messages:
    begun = [SYSTEM, USER] if FAMILIES[name].system else [USER]
    return [*begun, CALLS, RESULT] if tools else [*begun, ANSWER, AGAIN]


def sampled(renderer: TemplateRenderer, before: Messages, said: dict[str, Any], tools: list[Any] | None) -> list[int]:
    """What a policy would have sampled for the template to write that turn, its stop token included."""
    prompt = renderer.render_ids(before, tools=tools, add_generation_prompt=True)
    whole = renderer.render_ids([*before, said], tools=tools)
    start = next((i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(prompt))
    stops = renderer.get_stop_token_ids()
    end = next((place for place in range(start, len(whole)) if whole[place] in stops), len(whole))
    return [*whole[start:end], whole[end] if end < len(whole) else stops[-1]]


@family
@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_prompts_are_what_the_template_writes(name, tools, renderer, tokenizers):
    if tools and not FAMILIES[name].calls:
        pytest.skip("its template has no calls")
    messages, more = conversation(name, tools=tools), {"tools": [LOOK]} if tools else {}
    wanted = tokenizers(name).apply_chat_template(
        as_objects(messages, name),
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
        enable_thinking=False,
        **more,
    )
    rendered = renderer.render(messages, add_generation_prompt=True, **more)
    assert rendered.token_ids == wanted == renderer.render_ids(messages, add_generation_prompt=True, **more)
    bos = FAMILIES[name].bos
    assert bos is None or wanted.count(tokenizers(name).convert_tokens_to_ids(bos)) <= 1, "never doubled"


@family
def test_each_messages_own_tokens_are_known(name, renderer, tokenizers):
    messages = conversation(name, tools=False)
    rendered = renderer.render(messages)
    for place, message in enumerate(messages):
        own = [
            token for token, owner in zip(rendered.token_ids, rendered.message_indices, strict=True) if owner == place
        ]
        text = tokenizers(name).decode(own)
        assert message["content"] in text
        assert message["role"] == "assistant" or text == message["content"]
    roles = [rendered.message_roles[owner] if owner >= 0 else "" for owner in rendered.message_indices]
    assert rendered.sampled_mask == [role == "assistant" for role in roles]


@family
@pytest.mark.parametrize("follows", ["user", "tool"])
def test_sampled_tokens_stay_across_turns_or_the_whole_is_rendered_anew(name, follows, renderer, tokenizers):
    tools = [LOOK] if follows == "tool" else None
    if tools and not FAMILIES[name].calls:
        pytest.skip("its template has no calls")
    *before, said, new = conversation(name, tools=bool(tools))
    prompt = renderer.render_ids(before, tools=tools, add_generation_prompt=True)
    completion = sampled(renderer, before, said, tools)
    bridged = renderer.bridge_to_next_turn(prompt, completion, [new], tools=tools)
    if follows in REWRITES.get(name, ()):
        assert bridged is None
        return
    assert bridged is not None
    whole = renderer.render([*before, said, new], tools=tools, add_generation_prompt=True)
    assert bridged.token_ids == whole.token_ids
    other = [completion[0], *completion]  # no text that the template would write again
    kept = renderer.bridge_to_next_turn(prompt, other, [new], tools=tools)
    assert kept is not None and kept.token_ids == [*prompt, *other, *whole.token_ids[len(prompt) + len(completion) :]]
    body = [token for token, owner in zip(kept.token_ids, kept.message_indices, strict=True) if owner == 0]
    assert tokenizers(name).decode(body) == new["content"]
    assert renderer.bridge_to_next_turn(prompt, completion[:-1], [new], tools=tools) is None, "it was cut off"


@with_tools
def test_calls_are_read_as_the_template_writes_them(name, renderer):
    before = conversation(name, tools=True)[:-2]
    completion = sampled(renderer, before, CALLS, [LOOK])
    parsed = renderer.parse_response(completion, tools=[LOOK])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("look", ARGUMENTS)]
    assert parsed.content.strip() == ""
    said = sampled(renderer, before, ANSWER, None)
    assert renderer.parse_response(said).tool_calls == [] and renderer.parse_response(said).content == ANSWER["content"]


@pytest.mark.parametrize("name", ["qwen3", "llama-3.1", "mistral"])
def test_a_call_that_is_no_json_or_has_no_name_is_a_failed_call(name, renderer, tokenizers):
    opener = {"qwen3": "<tool_call>", "llama-3.1": "", "mistral": "[TOOL_CALLS] "}[name]
    for body, status in (
        ('{"name": "look", "arg', ToolCallParseStatus.INVALID_JSON),
        ('{"a": ' + "[" * 100_000, ToolCallParseStatus.INVALID_JSON),
        ('{"arguments": {}}', ToolCallParseStatus.MISSING_NAME),
    ):
        text = f"{opener}{body}"
        (call,) = renderer.parse_response(tokenizers(name).encode(text, add_special_tokens=False)).tool_calls
        assert call.status == status


@with_tools
def test_a_call_as_verifiers_tells_it_is_written_and_answered(name, renderer):
    """Ids are drawn, of which some templates take none but of nine letters and digits; no content is None."""
    before, call, result = conversation(name, tools=True)[:-2], CALLS, RESULT
    odd = (
        {**call, "content": None, "tool_calls": [CALL | {"id": "call_0f3a-17"}]},
        {**result, "tool_call_id": "call_0f3a-17"},
    )
    text = renderer.render_ids([*before, *odd], tools=[LOOK], add_generation_prompt=True)
    assert len(text) > len(renderer.render_ids(before, tools=[LOOK]))
    if name == "mistral":
        said = renderer._tokenizer.decode(text)
        (one,), (other,) = re.findall('"id": "([^"]*)"', said), re.findall('"call_id": "([^"]*)"', said)
        assert one == other and re.fullmatch("[0-9a-f]{9}", one)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_several_calls_of_an_answer_are_read_in_order(name, renderer):
    calls = [CALL, CALL | {"id": "abcdefghj", "function": {"name": "look", "arguments": '{"box": "e"}'}}]
    completion = sampled(renderer, [USER], CALLS | {"tool_calls": calls}, [LOOK])
    found = renderer.parse_response(completion, tools=[LOOK]).tool_calls
    assert [call.arguments for call in found] == [{"box": "d"}, {"box": "e"}]


@family
def test_auto_takes_a_renderer_that_writes_as_the_template_or_the_template(name, tmp_path):
    save_tokenizer(tmp_path, name)
    settings = renderer_settings(RendererConfig(), str(tmp_path), tmp_path)
    assert settings["name"] == CHOSEN.get(name, "custom")
    check_renderer(RendererConfig(), str(tmp_path), tmp_path)
    assert getattr(made_renderer(settings, tmp_path), "supports_tools", True) is FAMILIES[name].calls


def test_a_renderer_that_writes_otherwise_than_the_template_is_refused_or_accepted(tmp_path):
    tokenizer = save_tokenizer(tmp_path, "llama-3.1")
    named = RendererConfig(name="llama-3")
    check_renderer(named, "mine", tmp_path)
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "Cutting Knowledge Date", "You are Ann. Cutting Knowledge Date"
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"\(llama-3\) doesn't write .* at a second turn \('Cutting Know.*', not 'You are Ann"
    ):
        check_renderer(named, "mine", tmp_path)
    check_renderer(named.model_copy(update={"accept_template_difference": True}), "mine", tmp_path)
    check_renderer(RendererConfig(name="default"), "mine", tmp_path)
    assert renderer_settings(RendererConfig(), "mine", tmp_path)["name"] == "custom", "auto takes the template"


def test_a_hub_model_has_the_packages_renderer_while_that_writes_as_its_template(tmp_path):
    save_tokenizer(tmp_path, "qwen3")
    quiet, thinking = RendererConfig(), RendererConfig(enable_thinking=True)  # type: ignore[call-arg]
    assert renderer_settings(thinking, "Qwen/Qwen3-0.6B", tmp_path) == {"name": "qwen3", "enable_thinking": True}
    assert renderer_settings(quiet, "Qwen/Qwen3-0.6B", tmp_path)["name"] == "custom"
    assert renderer_settings(RendererConfig(name="prime-qwen3"), "mine", tmp_path) == {"name": "prime-qwen3"}
    assert renderer_settings(quiet, "tiny", tmp_path) == {"name": "qwen3", "enable_thinking": False}


def test_a_key_of_the_recipe_names_no_code(tmp_path):
    save_tokenizer(tmp_path, "plain")
    plain, foreign = (
        RendererConfig(name="default"),
        RendererConfig.model_validate({"name": "default", "import_path": "os.system", "tokenize": True}),
    )
    told, settings = (renderer_settings(each, "mine", tmp_path) for each in (plain, foreign))
    assert settings["import_path"] == told["import_path"]
    one, other = (made_renderer(each, tmp_path).render_ids([USER]) for each in (told, settings))
    assert one == other


def test_what_can_not_be_told_or_made_is_refused_in_a_line(tmp_path):
    tokenizer = save_tokenizer(tmp_path, "plain")
    for config, said in (
        (RendererConfig(name="qwen3"), r"\(qwen3\) can't write with this tokenizer: Special token"),
        (RendererConfig(name="qwen33"), r"orchestrator.renderer.name \(qwen33\) isn't a renderer"),
        (RendererConfig(name="qwen3", tool_parser="glm"), r"tool_parser \(glm\) is for the name \"default\""),
        (RendererConfig(name="default", tool_parser="hermes"), "Unknown tool_parser 'hermes'"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            check_renderer(config, "mine", tmp_path)
        assert "\n" not in str(refused.value)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r'\("auto"\) can\'t be told for mine, which has no chat template: save one as'
    ):
        check_renderer(RendererConfig(), "mine", tmp_path)
