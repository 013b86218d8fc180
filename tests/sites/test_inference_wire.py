"""Bodies on the wire: what is understood, what is refused and in which words, and the exact shape of answers."""

import json
import math

import pytest

from composer_prime.errors import BadInput
from composer_prime.sites.embedded.inference import wire
from composer_prime.sites.embedded.inference.engine import Completion, GenerateRequest, Sampling
from composer_prime.teachers.sampled import NO_EVIDENCE


def generate_body(**sampling) -> dict:
    return {"model": "tiny", "token_ids": [1, 2], "sampling_params": sampling}


def test_what_verifiers_train_client_sends_is_understood() -> None:
    body = generate_body(
        temperature=0.7,
        top_p=0.9,
        max_tokens=8,
        stop_token_ids=[258, 256],
        seed=3,
        logprobs=1,
        skip_special_tokens=False,
        routed_experts_prompt_start=4,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    assert wire.parse_generate(body | {"cache_salt": "3", "priority": 0}, "id") == GenerateRequest(
        "id", (1, 2), Sampling(0.7, 0.9, 8, frozenset({256, 258}), 3), "3"
    )
    assert wire.parse_generate({"token_ids": [5]}, "id") == GenerateRequest("id", (5,), Sampling())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "body must be an object, not list"),
        ({}, "token_ids must be a list of at least one token id"),
        ({"token_ids": []}, "token_ids must be a list of at least one token id"),
        ({"token_ids": [1, -2]}, r"token_ids \(-2\) must be whole numbers from 0"),
        ({"token_ids": [1, True]}, r"token_ids \(True\) must be whole numbers"),
        ({"token_ids": ["a"]}, r"token_ids \('a'\) must be whole numbers"),
        ({"token_ids": [1], "features": {}}, "body has features, which isn't supported: leave it out"),
        ({"token_ids": [1], "stream": True}, r"stream \(True\) isn't supported"),
        ({"token_ids": [1], "cache_salt": 3}, r"cache_salt \(3\) must be a string"),
        ({"token_ids": [1], "sampling_params": 3}, "sampling_params must be an object, not int"),
        (generate_body(prompt_logprobs=65), r"prompt_logprobs \(65\) must be a whole number from 0 to 64"),
        (generate_body(prompt_logprobs=True), r"prompt_logprobs \(True\) must be a whole number"),
        (generate_body(temperature=-0.1), r"temperature \(-0.1\) must be a number from 0 to 100"),
        (generate_body(temperature="hot"), r"temperature \('hot'\) must be a number"),
        (generate_body(temperature=float("nan")), r"temperature \(nan\) must be a number"),
        (generate_body(top_p=0), r"top_p \(0\) must be a number from 1e-06 to 1"),
        (generate_body(max_tokens=0), r"max_tokens \(0\) must be a whole number from 1"),
        (generate_body(max_tokens=1.5), r"max_tokens \(1.5\) must be a whole number"),
        (generate_body(seed="x"), r"seed \('x'\) must be a whole number"),
        (generate_body(n=2), r"n \(2\) isn't supported: leave it out"),
        (generate_body(top_k=5), r"top_k \(5\) isn't supported: leave it out"),
        (generate_body(stop=["\n"]), r"stop \(\['\\n'\]\) isn't supported"),
        (generate_body(stop_token_ids=[-1]), r"stop_token_ids \(-1\) must be"),
        (generate_body(beam_width=3), "sampling_params has beam_width, which isn't supported"),
    ],
)
def test_a_body_that_would_be_misunderstood_is_refused_with_the_reason(body: object, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        wire.parse_generate(body, "id")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, r"weight_dir \(None\) must be the name of a folder"),
        ({"weight_dir": "x"}, "version must say how many training steps"),
        ({"weight_dir": "x", "version": -1}, r"version \(-1\) must be a whole number from 0"),
        ({"weight_dir": "x", "version": 1, "lora": 1}, "body has lora"),
    ],
)
def test_an_update_without_folder_or_version_is_refused(body: object, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        wire.parse_update(body)
    assert wire.parse_update({"weight_dir": "x", "version": 0}) == ("x", 0)


def test_a_generate_answer_is_what_renderers_client_reads() -> None:
    answer = wire.generate_answer(Completion("id", [7, 258], [-0.5, -1.25], "stop", policy_version=3))
    assert json.loads(json.dumps(answer, allow_nan=False)) == {
        "request_id": "id",
        "policy_version": 3,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": [7, 258],
                "logprobs": {
                    "content": [
                        {"token": "token_id:7", "token_id": 7, "logprob": -0.5},
                        {"token": "token_id:258", "token_id": 258, "logprob": -1.25},
                    ]
                },
            }
        ],
    }


def test_prompt_logprobs_are_asked_for_by_vllms_name_and_given_in_its_shape() -> None:
    for asked in (None, 0, 1, 64):
        assert wire.parse_generate(generate_body(prompt_logprobs=asked), "id").prompt_logprobs == asked
    scored = Completion("id", [7], [-0.5], "stop", policy_version=3, prompt_logprobs=[{5: -2.5, 9: -0.5}, {4: -0.25}])
    answer = wire.generate_answer(scored)
    assert answer["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -2.5}, "9": {"logprob": -0.5}},
        {"4": {"logprob": -0.25}},
    ]


@pytest.mark.parametrize("score", [-math.inf, math.nan, math.inf])
def test_a_score_that_json_cannot_hold_is_answered_as_vllm_says_that_there_is_none(score: float) -> None:
    scored = Completion("id", [7], [-0.5], "stop", policy_version=3, prompt_logprobs=[{5: score, 9: -0.5}])
    answer = json.loads(json.dumps(wire.generate_answer(scored), allow_nan=False))
    assert answer["prompt_logprobs"] == [None, {"5": {"logprob": NO_EVIDENCE}, "9": {"logprob": -0.5}}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [({}, "prompt \\(None\\) must be a text"), ({"prompt": "x", "messages": []}, "body has messages")],
)
def test_a_text_to_tokenize_must_be_one(body: dict, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        wire.parse_tokenize(body)
    assert wire.parse_tokenize({"prompt": "x"}) == ("x", True)
    assert wire.parse_tokenize({"prompt": "x", "add_special_tokens": False, "model": "m"}) == ("x", False)
    with pytest.raises(BadInput, match="tokens must be a list"):
        wire.parse_detokenize({"tokens": "x"})


def test_chat_messages_are_rendered_as_text_with_their_options() -> None:
    seen = []

    def render(messages: list, tools: list | None, options: dict) -> list[int]:
        seen.append((messages, tools, options))
        return [1, 2, 3]

    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    asked = wire.parse_chat(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": parts}],
            "max_completion_tokens": 4,
            "temperature": 0.5,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": False,
            "logprobs": True,
        },
        "id",
        render,
    )
    assert asked == GenerateRequest("id", (1, 2, 3), Sampling(temperature=0.5, max_tokens=4))
    assert seen == [([{"role": "user", "content": "Hello"}], None, {"enable_thinking": False})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "messages must be a list of at least one message"),
        ({"messages": ["hi"]}, r"message \('hi'\) must be an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"content \(3\) must be a text or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text only"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools must be a list"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": True}, r"stream \(True\) isn't supported"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused_with_the_reason(body: object, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        wire.parse_chat(body, "id", lambda messages, tools, options: [1])
