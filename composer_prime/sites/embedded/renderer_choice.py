"""Which renderer writes a model's conversations, and whether it writes them as the model's own chat template does."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_prime.config.recipe import TINY_MODELS, RendererConfig
from composer_prime.errors import ConfigError
from composer_prime.traces.pairs.encoding import num_equal

TEMPLATE = "composer_prime.sites.embedded.template_renderer.TemplateRenderer"
TEXT_RENDERERS = (
    "qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "llama-3", "gpt-oss", "glm-4.5", "glm-5", "glm-5.1",
    "minimax-m2", "deepseek-v3", "deepseek-r1",
)  # fmt: skip
"""Those of the renderers package that a model folder is compared with."""
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"box": "d"}'}}
_BOX = {"type": "object", "properties": {"box": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Look into a box.", "parameters": _BOX}}
_CONVERSATION: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is in box d?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "a key", "tool_call_id": "call00001", "name": "look"},
    {"role": "assistant", "content": "A key."},
    {"role": "user", "content": "Thanks."},
)
PARTS: dict[str, tuple[Sequence[Mapping[str, Any]], bool]] = {
    "a second turn": ((_CONVERSATION[1], *_CONVERSATION[4:]), False),
    "a system message": ((_CONVERSATION[0], _CONVERSATION[1], *_CONVERSATION[4:]), False),
    "tools": (_CONVERSATION[:2], True),
    "a call and its result": (_CONVERSATION[:4], True),
    "a turn after a call": (_CONVERSATION, True),
}
"""What is compared, and whether it has tools. What a template refuses to write is left out."""


def renderer_settings(config: RendererConfig, model: str, folder: Path) -> dict[str, Any]:
    """The settings of the renderers package for a model: what the recipe names; for "auto" what upstream knows by the
    model's name, else the first of all, if it writes what the template in its folder writes; else that template itself.

    Thinking is switched off where it can be, unless the recipe says otherwise. Raises ConfigError, also where "auto"
    can't tell.
    """
    from renderers import config_from_name

    name = _told(config, model, folder) if config.name == "auto" else config.name
    more = dict(config.model_extra or {})
    if name == "default":
        parser = {} if config.tool_parser is None else {"tool_parser": config.tool_parser}
        return {"enable_thinking": False, **more, **parser, "name": "custom", "import_path": TEMPLATE}
    try:
        plain = config_from_name(name)
        assert plain is not None  # that is "auto"
        typed = type(plain)
        quiet = {"enable_thinking": False} if "enable_thinking" in typed.model_fields else {}
        settings = {"name": name, **quiet, **more}
        typed.model_validate(settings)
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"orchestrator.renderer.name ({name}) isn't a renderer, or not with these keys: {cause}"
        ) from error
    if config.tool_parser is not None:
        raise ConfigError(
            f'orchestrator.renderer.tool_parser ({config.tool_parser}) is for the name "default", and {name} has its '
            "own: drop one of them"
        )
    return settings


def made_renderer(settings: Mapping[str, Any], folder: Path, tokenizer: Any = None) -> Any:
    """The renderer of such settings, with the tokenizer in a folder where none is given. Raises ConfigError."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig as AnyConfig
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    try:
        config = TypeAdapter(AnyConfig).validate_python(dict(settings))
        return create_renderer(tokenizer or load_tokenizer(str(folder)), config)
    except Exception as error:  # a renderer asserts what it needs of a tokenizer
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"orchestrator.renderer ({settings['name']}) can't write with this tokenizer: {cause}"
        ) from error


def check_renderer(config: RendererConfig, model: str, folder: Path) -> None:
    """Raise ConfigError where a model's renderer can't be told, doesn't fit its tokenizer, or writes otherwise than the
    model's own chat template, which the recipe may accept."""
    from renderers.base import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    renderer = made_renderer(renderer_settings(config, model, folder), folder, tokenizer)
    if not config.accept_template_difference and (found := difference(renderer, tokenizer, config)):
        raise ConfigError(
            f"orchestrator.renderer.name ({config.name}) doesn't write what this model's own chat template writes, "
            f'{found}: set it to "default", which is that template, or say accept_template_difference = true'
        )


def difference(renderer: Any, tokenizer: Any, config: RendererConfig) -> str:
    """Where a renderer and a tokenizer's chat template differ; "" where they don't, or there is no template.

    config   of the recipe: its further keys are the template's variables, too
    """
    from composer_prime.sites.embedded.template_renderer import TemplateRenderer, TemplateRendererConfig

    if tokenizer.chat_template is None:
        return ""
    variables = {"enable_thinking": False, **(config.model_extra or {})}
    template = TemplateRenderer(tokenizer, TemplateRendererConfig(**variables))
    for part, (messages, has_tools) in PARTS.items():
        tools = [_TOOL] if has_tools else None
        try:
            wanted = template.render_ids(messages, tools=tools, add_generation_prompt=True)
        except Exception:  # whatever a template raises for what it doesn't know
            continue
        text = tokenizer.decode(wanted)
        if not all(str(each["content"]) in text for each in messages) or (tools and "look" not in text):
            continue
        try:
            found = renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        except Exception as error:  # a renderer of another family
            return f"at {part} ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
        if tokenizer.decode(found) != text:  # pieces that a tokenizer joins may be cut otherwise
            start = num_equal(found, wanted)
            ours, theirs = (repr(tokenizer.decode(each[start : start + 12])) for each in (found, wanted))
            return f"at {part} ({ours}, not {theirs}, after {tokenizer.decode(found[:start])[-20:]!r})"
    return ""


def _told(config: RendererConfig, model: str, folder: Path) -> str:
    from renderers.base import MODEL_RENDERER_MAP, load_tokenizer

    if model in TINY_MODELS:
        return "qwen3"
    tokenizer, known = load_tokenizer(str(folder)), MODEL_RENDERER_MAP.get(model)
    if tokenizer.chat_template is None and known:
        return known
    if tokenizer.chat_template is None:
        raise ConfigError(
            f'orchestrator.renderer.name ("auto") can\'t be told for {model}, which has no chat template: save one as '
            f"chat_template.jinja beside its tokenizer, or name one of {', '.join(TEXT_RENDERERS)}"
        )
    for name in [known] if known else TEXT_RENDERERS:
        plain = RendererConfig(name=name, **(config.model_extra or {}))
        with contextlib.suppress(ConfigError):
            renderer = made_renderer(renderer_settings(plain, model, folder), folder, tokenizer)
            if not difference(renderer, tokenizer, plain):
                return name
    return "default"
