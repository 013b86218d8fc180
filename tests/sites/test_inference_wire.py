"""Bodies on the wire: what is understood, what is refused and in which words, and the exact shape of answers."""

import json
import math

import pytest

from composer_prime.errors import BadInput
from composer_prime.sites.embedded.inference import wire
from composer_prime.sites.embedded.inference.engine import Completion
from composer_prime.teachers.sampled import NO_EVIDENCE


def generate_body(**sampling) -> dict:
    return {"model": "tiny", "token_ids": [1, 2], "sampling_params": sampling}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "body must be an object, not list"),
        ({}, "token_ids must be a list of at least one token id"),
        ({"token_ids": [1, -2]}, r"token_ids \(-2\) must be whole numbers from 0"),
        ({"token_ids": [1, True]}, r"token_ids \(True\) must be whole numbers"),
        ({"token_ids": [1], "features": {}}, "body has features, which isn't supported: leave it out"),
        ({"token_ids": [1], "stream": True}, r"stream \(True\) isn't supported"),
        ({"token_ids": [1], "cache_salt": 3}, r"cache_salt \(3\) must be a string"),
        ({"token_ids": [1], "sampling_params": 3}, "sampling_params must be an object, not int"),
        (generate_body(prompt_logprobs=65), r"prompt_logprobs \(65\) must be a whole number from 0 to 64"),
        (generate_body(temperature=-0.1), r"temperature \(-0.1\) must be a number from 0 to 100"),
        (generate_body(temperature=float("nan")), r"temperature \(nan\) must be a number"),
        (generate_body(top_p=0), r"top_p \(0\) must be a number from 1e-06 to 1"),
        (generate_body(max_tokens=0), r"max_tokens \(0\) must be a whole number from 1"),
        (generate_body(seed="x"), r"seed \('x'\) must be a whole number"),
        (generate_body(top_k=5), r"top_k \(5\) isn't supported: leave it out"),
        (generate_body(stop=["\n"]), r"stop \(\['\\n'\]\) isn't supported"),
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
        ({"weight_dir": "x", "version": 1, "lora": 1}, "body has lora"),
    ],
)
def test_an_update_without_folder_or_version_is_refused(body: object, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        wire.parse_update(body)
    assert wire.parse_update({"weight_dir": "x", "version": 0}) == ("x", 0)


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
