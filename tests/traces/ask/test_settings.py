"""What a teacher's table sets: the request's fields, headers and path, the key of its answers, and cached prompts."""

import json
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ask.prices import Usage, charge, read_usage, worst_case
from composer_prime.traces.ask.questions import Wording, frame_bytes, key_of, sampling_id
from composer_prime.traces.states import said
from tests.traces.ask.text_teacher import FakeTextTeacher, call, trace

CACHE = {"prompt_cache": "anthropic", "usd_per_million_cache_write_tokens": 3.75, "usd_per_million_cached_tokens": 0.3}


def test_each_teacher_is_asked_as_its_table_says(serve, asking, monkeypatch):
    monkeypatch.setenv("GATE_PASS", "open sesame")
    fake = FakeTextTeacher()
    teacher = serve(
        fake,
        max_completion_tokens=300,
        temperature="unsent",
        reasoning_effort="low",
        extra_body={"provider": {"order": ["a"]}},
        headers={"X-Gate": "$GATE_PASS", "X-Title": "traces"},
        path="/api/chat",
    )
    asking([trace(1)], [teacher])
    (body,) = fake.bodies
    del body["messages"], body["tools"]
    told = {"max_completion_tokens": 300, "reasoning_effort": "low", "provider": {"order": ["a"]}}
    assert body == {"model": "big", **told}
    (headers,) = fake.headers
    assert (headers["X-Gate"], headers["X-Title"], headers["path"]) == ("open sesame", "traces", "/api/chat")


def test_what_a_header_says_is_written_nowhere_and_never_shown(serve, asking, monkeypatch, tmp_path):
    monkeypatch.setenv("GATE_PASS", "open sesame")
    fake = FakeTextTeacher(fault=lambda number: "key" if number else "ok", words="no entry with open sesame")
    report = asking([trace(number) for number in range(3)], [serve(fake, headers={"X-Gate": "$GATE_PASS"})])
    assert report.teachers[0].stopped == "401: no entry with [redacted]"
    assert not any(b"sesame" in path.read_bytes() for path in (tmp_path / "answers").iterdir())
    with pytest.raises(BadInput, match=r"headers.X-Gate \(NO_SUCH\) isn't set"):
        asking([trace(1)], [serve(fake, headers={"X-Gate": "$NO_SUCH"})])


CHANGES: dict[str, Any] = {
    "max_tokens": 300,
    "max_completion_tokens": 200,
    "temperature": "unsent",
    "reasoning_effort": "high",
    "extra_body": {"seed": 1},
    "headers": {"X-Mode": "b"},
    "path": "/other",
    "model": "bigger",
}
SAME: dict[str, Any] = {"batch": True, "weight": 2.0, "name": "other", "timeout_s": 9.0, "max_in_flight": 2, **CACHE}


def test_what_changes_an_answer_changes_its_key_and_nothing_else_does():
    plain = FakeTextTeacher().config("http://127.0.0.1:1")
    others = {sampling_id(plain.model_copy(update={name: value})) for name, value in CHANGES.items()}
    assert len(others - {sampling_id(plain)}) == len(CHANGES)
    assert sampling_id(plain.model_copy(update=SAME)) == sampling_id(plain)
    keys = {key_of(one, trace(number).question) for one in (sampling_id(plain), *others) for number in (1, 2)}
    assert len(keys) == 2 * (1 + len(CHANGES))


def test_a_request_is_never_longer_than_what_was_reserved_for_it():
    for settings in ({}, CACHE, {"extra_body": {"a": "b"}}):
        teacher = FakeTextTeacher().config("http://127.0.0.1:1", **settings)
        state = trace(1)
        parts = sum(said(part).num_bytes + 1 for part in (*state.messages, *state.tools))
        body = Wording().request(state, teacher)
        assert len(body) <= frame_bytes(teacher) + parts <= len(body) + 120


def test_prompt_caching_marks_the_last_message_with_a_text_and_is_priced_by_usage(serve, asking):
    fake = FakeTextTeacher()
    teacher = serve(fake, **CACHE)
    start = trace(1)
    empty = type(start)("s", 0, None, (*start.messages, call("a")), start.tools, start.action)
    answered = {"role": "tool", "tool_call_id": "1", "content": "text"}
    full = type(start)("s", 1, None, (*empty.messages, answered), start.tools, start.action)
    asking([full], [teacher])
    text = {"type": "text", "text": "text", "cache_control": {"type": "ephemeral"}}
    assert fake.bodies[0]["messages"][-1] == {**answered, "content": [text]}
    sent = json.loads(Wording().request(empty, teacher))["messages"]  # an empty text can't carry it
    assert sent[-1] == call("a") and sent[-2]["content"][0]["text"] == start.messages[-1]["content"]
    told = {"prompt_tokens": 1000, "completion_tokens": 10}
    details = {"prompt_tokens_details": {"cached_tokens": 600, "cache_write_tokens": 300}}
    flat = {"cache_read_input_tokens": 600, "cache_creation_input_tokens": 300}
    for more in (details, flat):
        usage = read_usage({"usage": told | more})
        assert usage is not None and usage == Usage(1000, 600, 300, 10)
        assert charge(teacher, usage) == 100 * 3000 + 600 * 300 + 300 * 3750 + 10 * 15000
    assert worst_case(teacher, 0) == 1024 * 3750 + 200 * 15000
