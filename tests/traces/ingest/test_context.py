"""The order in which a model is shown a branch's messages: results after their calls, whatever the log says."""

import json
import random
from typing import Any

from composer_prime.traces.ingest.context import NO_RESULT, OTHER, in_order
from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.states import digest


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(*ids: str) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": id}


def test_results_stand_after_their_call_in_the_order_of_the_calls_whatever_lies_between() -> None:
    right = [user("q"), turn("a", "b"), result("a", "1"), result("b", "2"), user("aside"), turn("c"), result("c", "3")]
    assert in_order(right) == right
    logged = [right[0], right[1], right[4], right[3], right[2], right[5], right[6]]
    assert in_order(logged) == right


def test_a_call_that_was_never_answered_gets_a_stand_in_and_later_points_stay() -> None:
    shown = in_order([user("q"), turn("a", "b"), result("b", "2"), user("it crashed"), turn("c")])
    assert shown[2:4] == [result("a", NO_RESULT), result("b", "2")]
    assert shown[-1] == result("c", NO_RESULT)


def test_a_result_belongs_to_the_nearest_call_with_its_id_and_one_without_is_what_a_user_shows() -> None:
    reused = [turn("a"), result("a", "1"), turn("a"), result("a", "2")]
    assert in_order(reused) == reused
    assert in_order([user("q"), result("z", "lost")]) == [user("q"), user("lost")]


def test_in_order_changes_nothing_more_and_loses_nothing() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ids = [f"c{number}" for number in range(6)]
        messages = [user("q"), turn(*ids[:2]), turn(*ids[2:3]), user("w"), turn(*ids[3:])]
        for id in rng.sample(ids, rng.randrange(7)):
            after = next(n for n, message in enumerate(messages) if id in json.dumps(message.get("tool_calls", "")))
            messages.insert(rng.randrange(after + 1, len(messages) + 1), result(id, f"of {id}"))
        shown = in_order(messages)
        assert in_order(shown) == shown
        real = [message for message in shown if message["content"] != NO_RESULT]
        assert sorted(map(digest, real)) == sorted(map(digest, messages))
        calls = [id for message in shown for id in [call["id"] for call in message.get("tool_calls", [])]]
        assert [message["tool_call_id"] for message in shown if message["role"] == "tool"] == calls


def test_an_action_that_stands_in_for_what_text_can_not_say_is_no_decision_point(tmp_path) -> None:
    path = tmp_path / "given.json"
    parts = [{"type": "audio", "data": "..."}, {"type": "text", "text": "Listen."}]
    told = [user("q"), {"role": "assistant", "content": parts}, user("more"), {"role": "assistant", "content": "Yes."}]
    path.write_text(json.dumps(told))
    (state,) = read_file(path)[1].sessions[0].states()
    assert state.action["content"] == "Yes." and OTHER in state.messages[1]["content"], "it is shown to later ones"
