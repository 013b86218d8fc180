"""Messages to tokens by a model's own chat template, for models that the renderers package has no renderer for.

As its DefaultRenderer, and beyond it: sampled tokens stay as they are across turns, tools work where the template
writes calls as JSON, whatever stands around them, and each message's own tokens are known. All that is learned of a
template is learned by rendering conversations that are made up.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict
from renderers import ParsedResponse, RenderedTokens
from renderers.base import ParsedToolCall, ToolCallParseStatus, extract_message_tool_names
from renderers.configs import BaseRendererConfig
from renderers.parsers import TOOL_PARSERS, ThinkTextReasoningParser, get_tool_parser

from composer_prime.traces.pairs.encoding import num_equal

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

_MARK = "zq0text0qz"
_CALL_IDS = ("zqcall001", "zqcall002")
"""Of nine letters and digits, which some templates ask for."""
_NAME, _ARGUMENTS = "zq0name0qz", {"zq0key0qz": "zq0value0qz"}
_USER: dict[str, Any] = {"role": "user", "content": "zq0user0qz"}
_SYSTEM = {"role": "system", "content": "zq0system0qz"}
_FUNCTION = {"name": _NAME, "description": "zq", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}


class TemplateRendererConfig(BaseRendererConfig):
    """Further keys go to the template as they stand."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tool_parser: str | None = None
    """One of renderers.parsers.TOOL_PARSERS; None: calls are read as the template writes them."""

    _internal_fields: ClassVar[frozenset[str]] = frozenset({"tool_parser"})
    _allow_opaque_template_kwargs: ClassVar[bool] = True


class CallForm(NamedTuple):
    """How a template writes calls: JSON between two texts, with name and arguments under two keys; or the name, a text
    in the middle, and the arguments as JSON."""

    opener: str
    closer: str
    name_key: str = ""
    arguments_key: str = ""
    middle: str = ""


class TemplateRenderer:
    """Renders with `tokenizer.apply_chat_template`. Its config's further keys are the template's variables."""

    config_class = TemplateRendererConfig
    is_prefix_stable = False
    supports_process_multimodal = False

    def __init__(self, tokenizer: Any, config: TemplateRendererConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self._named_parser = None if config.tool_parser is None else get_tool_parser(config.tool_parser, tokenizer)

    @property
    def supports_tools(self) -> bool:
        """Whether calls in answers can be read."""
        return self._tool_parser is not None or self._call_form is not None

    def render_ids(self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = False) -> list[int]:
        return self._encoded(self._text(messages, tools, add_generation_prompt))[0]

    def render(self, messages: Messages, *, tools: Tools = None, add_generation_prompt: bool = False) -> RenderedTokens:
        text = self._text(messages, tools, add_generation_prompt)
        return self._attributed([], text, self._spans(messages, tools, text), messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Messages,
        *,
        tools: Tools = None,
    ) -> RenderedTokens | None:
        """The next prompt, which begins with the tokens that were sampled; None where the template writes earlier turns
        anew: then the whole is rendered, and is a branch of its own."""
        roles = {message.get("role") for message in new_messages}
        stop = previous_completion_ids[-1] if previous_completion_ids else None
        if (
            not roles <= {"user", "tool"}
            or stop not in self.get_stop_token_ids()
            or any(self._rewriting[str(role)] for role in roles)
        ):
            return None
        calls = [message.get("tool_call_id") or _CALL_IDS[0] for message in new_messages if message["role"] == "tool"]
        try:
            text = self._text([_USER, self._said(*calls), *new_messages], tools, add_generation_prompt=True)
        except Exception:  # whatever a template raises
            return None
        mark = _NAME if calls else _MARK
        end = text.find(stop_text := self._tokenizer.decode([stop]), text.rfind(mark))
        if mark not in text or end < 0:
            return None
        tail = text[end + len(stop_text) :]
        return self._attributed(
            [*previous_prompt_ids, *previous_completion_ids], tail, _found(new_messages, tail), new_messages
        )

    def parse_response(
        self, token_ids: list[int], *, tools: Tools = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        stops = set(self.get_stop_token_ids())
        while token_ids and token_ids[-1] in stops:
            token_ids = token_ids[:-1]
        calls: list[ParsedToolCall] = []
        if self._tool_parser is not None:
            token_ids, calls = self._tool_parser.extract(token_ids)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        prefilled = self._tokenizer.decode((prompt_ids or [])[-8:]).rstrip().endswith("<think>")
        reasoning = None
        if "<think>" in text or prefilled:
            reasoning, text = ThinkTextReasoningParser(self._tokenizer).extract(f"<think>{text}" if prefilled else text)
        if self._tool_parser is None and self._call_form is not None:
            text, calls = read_calls(text, self._call_form)
        text = text.rpartition(self._opener)[2] if self._opener.strip() else text.removeprefix(self._opener)
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return ParsedResponse(content=text, reasoning_content=reasoning or None, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops

    @cached_property
    def _stops(self) -> list[int]:
        """The ends of a turn: the model's own, those of its generation settings, and what the template closes with."""
        found = [self._tokenizer.eos_token_id]
        settings = Path(self._tokenizer.name_or_path) / "generation_config.json"
        if settings.is_file():
            said = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
            found += said if isinstance(said, list) else [said]
        added = self._tokenizer.added_tokens_decoder
        closed = self._encoded(self._text([_USER, self._said()]).rpartition(_MARK)[2].lstrip())[0]
        found += [token for token in closed[:1] if token in added]
        return list(dict.fromkeys(token for token in found if token is not None))

    @cached_property
    def _opener(self) -> str:
        """What the template writes between the prompt for an answer and the answer's text."""
        begun, whole = self._text([_USER], add_generation_prompt=True), self._text([_USER, self._said()])
        return whole.removeprefix(begun).partition(_MARK)[0] if whole.startswith(begun) else ""

    @cached_property
    def _call_turn(self) -> str:
        """A made-up call as the template writes it; "" for one that writes none."""
        try:
            begun = self.render_ids([_USER], tools=[_TOOL], add_generation_prompt=True)
            whole = self.render_ids([_USER, self._said(_CALL_IDS[0])], tools=[_TOOL])
        except Exception:  # whatever a template raises
            return ""
        turn = self._tokenizer.decode(whole[num_equal(begun, whole) :])
        return turn if _NAME in turn else ""

    @cached_property
    def _call_form(self) -> CallForm | None:
        """None for a template that writes no calls, or not as JSON."""
        return find_call_form(self._call_turn)

    @cached_property
    def _tool_parser(self) -> Any:
        """The one that the config names; else, where calls aren't such JSON, one that reads the template's."""
        if self._named_parser is not None:
            return self._named_parser
        if not self._call_turn or (self._call_form is not None and not self._call_form.middle):
            return None
        wanted = [(_NAME, _ARGUMENTS)]
        for name in TOOL_PARSERS:
            parser = get_tool_parser(name, self._tokenizer)
            read = parser.extract(self._encoded(self._call_turn)[0])[1]
            if [(call.name, call.arguments) for call in read] == wanted:
                return parser
        return None

    @cached_property
    def _rewriting(self) -> dict[str, bool]:
        """For a user's and a tool's message that follows, whether what was before looks another way then."""
        return {role: self._rewrites_before(role) for role in ("user", "tool")}

    def _rewrites_before(self, role: str) -> bool:
        said = self._said(*_CALL_IDS[: role == "tool"]) | {"reasoning_content": "zq0why0qz"}
        plain = said | {"content": f"<think>\nzq0why0qz\n</think>\n\n{said['content']}"}
        after = {"role": role, "content": "zq", **({"tool_call_id": _CALL_IDS[0]} if role == "tool" else {})}
        found = []
        for head, tools, turn in product(([_USER], [_SYSTEM, _USER]), (None, [_TOOL]), (said, plain)):
            try:
                whole = self._text([*head, turn, after], tools)
                before = self._text(head, tools, add_generation_prompt=True), self._ended([*head, turn], tools)
            except Exception:  # whatever a template raises for what it doesn't know
                continue
            found.append(not all(map(whole.startswith, before)))
        return any(found) or not found

    def _ended(self, messages: Messages, tools: Tools = None) -> str:
        """A conversation that ends with an answer, without what is written after its last turn alone."""
        text = self._text(messages, tools).rstrip()
        stops = tuple(self._tokenizer.decode([stop]) for stop in self.get_stop_token_ids())
        closed = text.removesuffix(self._tokenizer.eos_token or "").rstrip()
        return closed if closed.endswith(stops) else text

    def _text(self, messages: Messages, tools: Tools = None, add_generation_prompt: bool = False) -> str:
        more = dict(self.config.model_extra or {}) | ({} if tools is None else {"tools": list(tools)})
        more |= {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            return self._tokenizer.apply_chat_template([_plain(message, json.loads) for message in messages], **more)
        except TypeError:  # a template that puts the arguments' text in as it is
            return self._tokenizer.apply_chat_template([_plain(message, str) for message in messages], **more)

    def _encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    def _said(self, *calls: str) -> dict[str, Any]:
        function = {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}
        made = [{"id": each, "type": "function", "function": function} for each in calls]
        return {"role": "assistant", "content": "" if calls else _MARK, **({"tool_calls": made} if calls else {})}

    def _spans(self, messages: Messages, tools: Tools, text: str) -> list[tuple[int, int, int]]:
        """Where in the text each message's own characters are: what its author said, or what a policy would sample."""
        spans = _found(messages, text)
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            try:
                begun = self._text(messages[:place], tools, add_generation_prompt=True)
                ended = self._ended(messages[: place + 1], tools)
            except Exception:  # whatever a template raises
                continue
            if text.startswith(ended) and (start := num_equal(begun, ended)) < len(ended):
                spans = [span for span in spans if span[2] != place] + [(start, len(ended), place)]
        return spans

    def _attributed(
        self, before: list[int], text: str, spans: Sequence[tuple[int, int, int]], messages: Messages
    ) -> RenderedTokens:
        ids, offsets = self._encoded(text)
        owners = [-1] * len(ids)
        for start, end, place in spans:
            for token, (first, last) in enumerate(offsets):
                if start <= first and last <= end and first < last:
                    owners[token] = place
        roles = [str(message.get("role") or "") for message in messages]
        samples = [owner >= 0 and roles[owner] == "assistant" for owner in owners]
        return RenderedTokens(
            token_ids=before + ids,
            message_indices=[-1] * len(before) + owners,
            sampled_mask=[False] * len(before) + samples,
            is_content=[False] * len(before) + [owner >= 0 for owner in owners],
            message_roles=roles,
            message_tool_names=extract_message_tool_names(list(messages)),  # type: ignore[arg-type]
        )


def find_call_form(said: str) -> CallForm | None:
    """From a turn with one made-up call in it, as a template writes it, how calls are written."""
    starts = [start for start, char in enumerate(said) if char in "[{"]
    for begin in starts:
        try:
            held, length = json.JSONDecoder().raw_decode(said[begin:])
        except ValueError:
            continue
        opener, closer = said[:begin], said[begin + length :].strip()
        if held == _ARGUMENTS and _NAME in opener:
            opener, _, middle = opener.rpartition(_NAME)
            return CallForm(opener.strip(), closer, middle=middle.strip())
        call = held[0] if isinstance(held, list) and held else held
        call = call.get("function", call) if isinstance(call, dict) else {}
        keys = {str(value): key for key, value in call.items()}
        arguments = next((keys[text] for text in (str(_ARGUMENTS), json.dumps(_ARGUMENTS)) if text in keys), None)
        if _NAME in keys and arguments is not None:
            return CallForm(opener.strip(), closer, name_key=keys[_NAME], arguments_key=arguments)
    return None


def read_calls(text: str, form: CallForm) -> tuple[str, list[ParsedToolCall]]:
    """What an answer says beside its calls, and its calls, with those that are malformed."""
    start = text.find(form.opener) if form.opener else len(text) - len(text.lstrip())
    if start < 0 or (not form.opener and not re.match(r'\s*\[?\s*\{\s*"', text)):
        return text, []
    calls, rest, decoder = list[ParsedToolCall](), text[start:], json.JSONDecoder(strict=False)
    while rest := rest.strip().removeprefix(form.opener).lstrip(" \n;,"):
        name, middle, said = rest.partition(form.middle) if form.middle else ("", "", rest)
        try:
            held, length = decoder.raw_decode(said := said.lstrip())
        except (ValueError, RecursionError):  # a policy may open a thousand brackets
            if not calls or rest.startswith(("{", "[")) or middle:
                calls.append(ParsedToolCall(raw=rest, status=ToolCallParseStatus.INVALID_JSON))
            break
        raw = rest[: len(rest) - len(said) + length]
        calls += [_call(each, name.strip(), raw, form) for each in (held if isinstance(held, list) else [held])]
        rest = _after(said[length:], form.closer.partition(form.opener)[0] if form.opener else form.closer)
    return text[:start], calls


def _after(rest: str, closer: str) -> str:
    """Without the beginning of the closing text, of which a stop token may have been cut off."""
    rest = rest.lstrip()
    return rest[num_equal(rest, closer) :]


def _call(held: Any, name: Any, raw: str, form: CallForm) -> ParsedToolCall:
    arguments = held
    if not form.middle:
        held = held.get("function", held) if isinstance(held, dict) else {}
        name, arguments = held.get(form.name_key), held.get(form.arguments_key, {})
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, arguments=arguments, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments)


def _found(messages: Messages, text: str) -> list[tuple[int, int, int]]:
    """Where the messages' contents stand in a text, one after the other."""
    spans, after = [], 0
    for place, message in enumerate(messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        start = max(text.find(said, after), 0) or text.find(said) if said else -1  # a template may change the order
        if start >= 0:
            after = start + len(said)
            spans.append((start, after, place))
    return spans


def _plain(message: Mapping[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    """A message as templates of all kinds can write it: content that is text, where verifiers says None; calls' ids of
    nine letters and digits, where some take no others and verifiers draws longer ones; their arguments as `read`."""

    def nine(call_id: Any) -> str:
        said = str(call_id)
        return said if re.fullmatch("[A-Za-z0-9]{9}", said) else hashlib.sha256(said.encode()).hexdigest()[:9]

    def called(call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        with suppress(TypeError, ValueError):  # a policy's, which is malformed, stays
            function["arguments"] = read(function["arguments"])
        return {**call, "id": nine(call.get("id")), "function": function}

    told = {**message, "content": message.get("content") or ""}
    if calls := told.get("tool_calls"):
        told["tool_calls"] = [called(call) for call in calls]
    return told | ({"tool_call_id": nine(told["tool_call_id"])} if told.get("tool_call_id") else {})
