"""Request bodies in, answer bodies out: the shapes of vLLM's token route and of OpenAI's chat route, and nothing else.

A setting that an engine here wouldn't honour is refused unless it has the value that changes nothing, so that nobody
samples from another policy than they think.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from composer_prime.config.distill import MAX_K
from composer_prime.errors import BadInput
from composer_prime.sites.embedded.inference.engine import Completion, GenerateRequest, Sampling
from composer_prime.teachers.sampled import NO_EVIDENCE

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "stream": (False,),
    "top_logprobs": (0,),  # of the token route; the chat route has them
}
"""Settings we don't have, with the values that ask for nothing; None always does."""

_WITHOUT_EFFECT = frozenset(
    {
        "logprobs",  # always given
        "skip_special_tokens",  # about text, and tokens go over the wire
        "spaces_between_special_tokens",
        "detokenize",
        "include_stop_str_in_output",
        "routed_experts_prompt_start",  # what to return of a mixture of experts, which verifiers' client always says
        "reasoning_effort",  # of the renderer's concern
    }
)
_SAMPLING = frozenset({"temperature", "top_p", "max_tokens", "stop_token_ids", "seed"})
_CHAT = frozenset(
    {"model", "messages", "tools", "max_completion_tokens", "chat_template_kwargs", "tool_choice", "user"}
)
_TOKEN_BODY = frozenset({"model", "token_ids", "sampling_params", "cache_salt", "priority", "request_id", "stream"})


def parse_generate(body: Any, request_id: str) -> GenerateRequest:
    """The body of POST /inference/v1/generate. Raises BadInput saying what is wrong with it."""
    body = _object(body, "body")
    _refuse_unknown(body, _TOKEN_BODY, "body")
    _refuse_effective({"stream": body.get("stream")})
    salt = body.get("cache_salt")
    sampling = dict(_object(body.get("sampling_params") or {}, "sampling_params"))
    scores = sampling.pop("prompt_logprobs", None)
    if scores is not None and (type(scores) is not int or not 0 <= scores <= MAX_K):
        raise BadInput(f"prompt_logprobs ({scores!r}) must be a whole number from 0 to {MAX_K}: ask for fewer")
    if salt is not None and not isinstance(salt, str):
        raise BadInput(f"cache_salt ({salt!r}) must be a string")
    return GenerateRequest(
        request_id=request_id,
        token_ids=_token_ids(body.get("token_ids"), "token_ids"),
        sampling=parse_sampling(sampling),
        cache_salt=salt,
        prompt_logprobs=scores,
    )


def parse_sampling(asked: Mapping[str, Any]) -> Sampling:
    """Sampling parameters by vLLM's names. Raises BadInput on one that is out of bounds, unknown or not supported."""
    _refuse_unknown(asked, _SAMPLING | _WITHOUT_EFFECT | _NEUTRAL.keys(), "sampling_params")
    _refuse_effective(asked)
    stops = asked.get("stop_token_ids")
    return Sampling(
        temperature=_number(asked, "temperature", 1.0, low=0.0, high=100.0),
        top_p=_number(asked, "top_p", 1.0, low=1e-6, high=1.0),
        max_tokens=_whole(asked, "max_tokens", low=1),
        stop_token_ids=frozenset(_token_ids(stops, "stop_token_ids") if stops else ()),
        seed=_whole(asked, "seed", low=None),
    )


def generate_answer(completion: Completion) -> dict[str, Any]:
    """The answer of POST /inference/v1/generate, as renderers' client reads it, with the policy version.

    `prompt_logprobs` are in vLLM's shape, where there are some: for each token of the prompt an object by token id,
    null for the first. What JSON can't hold is `NO_EVIDENCE` there, as vLLM has it.
    """
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": {"content": content},
    }
    answer: dict[str, Any] = {"request_id": completion.request_id, "policy_version": completion.policy_version}
    if completion.prompt_logprobs is not None:
        scored = [
            {str(token): {"logprob": one if math.isfinite(one) else NO_EVIDENCE} for token, one in entry.items()}
            for entry in completion.prompt_logprobs
        ]
        answer["prompt_logprobs"] = [None, *scored]
    return answer | {"choices": [choice]}


def parse_tokenize(body: Any) -> tuple[str, bool]:
    """The body of POST /tokenize: the text, and whether the model's own tokens are put around it. Raises BadInput."""
    body = _object(body, "body")
    _refuse_unknown(body, frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}), "body")
    text, around = body.get("prompt"), body.get("add_special_tokens", True)
    if not isinstance(text, str):
        raise BadInput(f"prompt ({text!r}) must be a text")
    return text, bool(around)


def parse_detokenize(body: Any) -> tuple[int, ...]:
    """The body of POST /detokenize: the token ids. Raises BadInput."""
    body = _object(body, "body")
    _refuse_unknown(body, frozenset({"model", "tokens"}), "body")
    return _token_ids(body.get("tokens"), "tokens")


def parse_chat(
    body: Any, request_id: str, render: Callable[[list[Any], list[Any] | None, dict[str, Any]], list[int]]
) -> GenerateRequest:
    """The body of POST /v1/chat/completions. Raises BadInput saying what is wrong with it.

    render  token ids of (messages, tools, chat_template_kwargs), the generation prompt included.
    """
    body = _object(body, "body")
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadInput(f"message ({message!r}) must be an object with a role")
    if tools is not None and not isinstance(tools, list):
        raise BadInput("tools must be a list")
    asked = {name: value for name, value in body.items() if name not in _CHAT}
    if body.get("max_completion_tokens") is not None:
        asked["max_tokens"] = body["max_completion_tokens"]
    options = _object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    k = asked.pop("top_logprobs", None) or 0
    if type(k) is not int or not 0 <= k <= MAX_K:
        raise BadInput(f"top_logprobs ({k!r}) must be a whole number from 0 to {MAX_K}: ask for fewer")
    token_ids = render([{**message, "content": _text(message)} for message in messages], tools, options)
    sampling = parse_sampling(asked)
    return GenerateRequest(request_id, _token_ids(token_ids, "rendered messages"), sampling, top_logprobs=k)


def chat_answer(
    request: GenerateRequest, completion: Completion, model: str, decode: Callable[[list[int]], str], logprobs: bool
) -> dict[str, Any]:
    """The answer of POST /v1/chat/completions. `logprobs` adds those of the sampled tokens, the stop token included."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": decode(completion.token_ids)},
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    if logprobs:
        likeliest = completion.top_logprobs or [{}] * len(completion.token_ids)
        sampled = zip(completion.token_ids, completion.logprobs, likeliest, strict=True)
        choice["logprobs"] = {
            "content": [
                {
                    "token": f"token_id:{token}",
                    "logprob": logprob,
                    "top_logprobs": [{"token": f"token_id:{one}", "logprob": its} for one, its in top.items()],
                }
                for token, logprob, top in sampled
            ]
        }
    num_prompt, num_completion = len(request.token_ids), len(completion.token_ids)
    return {
        "id": completion.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "policy_version": completion.policy_version,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }


def parse_update(body: Any) -> tuple[str, int]:
    """The body of POST /update_weights: weight_dir and version. Raises BadInput saying what is wrong with it."""
    body = _object(body, "body")
    _refuse_unknown(body, frozenset({"weight_dir", "version"}), "body")
    folder, version = body.get("weight_dir"), _whole(body, "version", low=0)
    if not isinstance(folder, str) or not folder:
        raise BadInput(f"weight_dir ({folder!r}) must be the name of a folder")
    if version is None:
        raise BadInput("version must say how many training steps are behind the weights")
    return folder, version


def _text(message: Mapping[str, Any]) -> str | None:
    """A message's content as one text; parts that aren't text are refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadInput(f"content ({content!r}) must be a text or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadInput("content may have parts of type text only")
    return "".join(part["text"] for part in content)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{name} must be an object, not {type(value).__name__}")
    return value


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise BadInput(f"{name} must be a list of at least one token id")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise BadInput(f"{name} ({token!r}) must be whole numbers from 0")
    return tuple(value)


def _number(asked: Mapping[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadInput(f"{name} ({value!r}) must be a number from {low:g} to {high:g}")
    return float(value)


def _whole(asked: Mapping[str, Any], name: str, *, low: int | None) -> int | None:
    value = asked.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise BadInput(f"{name} ({value!r}) must be a whole number" + (f" from {low}" if low is not None else ""))
    return value


def _refuse_unknown(asked: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(asked.keys() - known)
    if unknown:
        raise BadInput(f"{where} has {unknown[0]}, which isn't supported: leave it out")


def _refuse_effective(asked: Mapping[str, Any]) -> None:
    for name, values in _NEUTRAL.items():
        value = asked.get(name)
        if value is not None and value not in values:
            raise BadInput(f"{name} ({value!r}) isn't supported: leave it out")
