"""Asking text teachers behind real HTTP servers: once, with what the author saw, through faults and in tiers."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.ledger import Record
from composer_prime.traces.ask.prices import NANO
from composer_prime.traces.ask.teacher import DEAD_AFTER, TRIES, USELESS_AFTER
from composer_prime.traces.ingest.context import NO_RESULT
from composer_prime.traces.ingest.intake import read_file
from tests.traces.ask.text_teacher import READ_FILE, FakeTextTeacher, call, number_of, serving, trace

STATES = [trace(number) for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> AnswerFolder:
    """Where `asking` puts its answers."""
    return AnswerFolder(tmp_path / "answers")


def outcomes(folder: AnswerFolder) -> list[str]:
    return [record.outcome for record in folder.ledger()]


def settled(records: tuple[Record, ...]) -> float:
    return sum(record.usd_settled or 0 for record in records)


def always(message: dict[str, Any]) -> FakeTextTeacher:
    return FakeTextTeacher(says=lambda body: message)


def test_a_teacher_sees_the_messages_and_tools_of_the_author_and_not_its_thinking(serve, asking, folder, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    fake, state = FakeTextTeacher(), trace(1)
    thought = {"role": "assistant", "content": "Hm.", "reasoning_content": "secret thoughts"}
    state = type(state)("s", 0, None, (*state.messages, thought), state.tools, state.action)
    asking([state], [serve(fake, api_key_var="SOME_KEY", temperature=0.5)])
    (body,) = fake.bodies
    assert body == {
        "model": "big",
        "messages": [*state.messages[:2], {"role": "assistant", "content": "Hm."}],
        "tools": [READ_FILE],
        "max_tokens": 200,
        "temperature": 0.5,
    }
    assert fake.keys == ["Bearer sk-1"]
    (answer,) = folder.answers()
    assert (answer.state, answer.teacher, answer.model, answer.weight) == (state.id, "teacher", "big-2026", 1.0)
    assert answer.action["tool_calls"] == fake.says(body)["tool_calls"]


def test_a_log_that_lacks_a_calls_result_is_asked_about_everywhere_as_servers_take_it(serve, asking, folder, tmp_path):
    made, person = call("a"), {"role": "user", "content": "Go on."}
    both = {**made, "tool_calls": [{**made["tool_calls"][0], "id": id} for id in "23"]}
    told = [person, made, person, both, {"role": "tool", "tool_call_id": "3", "content": "text"}]
    told += [made, person, made]
    (tmp_path / "log.json").write_text(json.dumps({"messages": told, "tools": [READ_FILE]}))
    states = list(read_file(tmp_path / "log.json")[1].sessions[0].states())
    fake = FakeTextTeacher()
    report = asking(states, [serve(fake)])
    assert len(fake.bodies) == 4 == len(states) and report.is_complete
    assert outcomes(folder) == ["answered"] * 4
    longest = max(fake.bodies, key=lambda body: len(body["messages"]))["messages"]
    shown = [message["content"] for message in longest if message["role"] == "tool"]
    assert shown == [NO_RESULT, NO_RESULT, "text", NO_RESULT]


def test_what_the_ledger_settled_is_what_the_server_served(serve, asking, folder):
    fake = FakeTextTeacher()
    report = asking(STATES, [serve(fake)])
    records = folder.ledger()
    assert outcomes(folder) == ["answered"] * 6 and report.is_complete
    assert settled(records) == pytest.approx(fake.served_usd) == pytest.approx(report.usd)
    assert all(record.usd_settled <= record.usd_reserved for record in records if record.usd_settled is not None)
    assert all(record.prompt_tokens and record.completion_tokens and record.latency_s is not None for record in records)


def test_a_repeated_run_and_another_store_with_the_same_question_cost_nothing(serve, asking, folder):
    fake = FakeTextTeacher()
    teacher = serve(fake)
    asking(STATES, [teacher])
    before, answers = folder.ledger(), list(folder.answers())
    again = asking(STATES, [teacher])
    elsewhere = [type(state)("other", 9, 3, state.messages, state.tools, call("z")) for state in STATES[:2]]
    asking([*elsewhere, *elsewhere], [teacher])
    assert len(fake.bodies) == 6 and again.num_calls == 0 and again.usd_run == 0
    assert folder.ledger() == before and list(folder.answers()) == answers


def test_another_teacher_is_all_that_is_asked_when_it_comes_later(serve, asking, folder):
    first, second = FakeTextTeacher(), FakeTextTeacher()
    one, other = serve(first), serve(second, name="late", weight=2.0)
    asking(STATES, [one])
    asking(STATES, [one, other])
    assert (len(first.bodies), len(second.bodies)) == (6, 6)
    weights = {answer.teacher: answer.weight for answer in folder.answers()}
    assert weights == {"teacher": 1.0, "late": 2.0} and len(list(folder.answers())) == 12


def test_a_new_name_or_weight_costs_nothing_and_another_model_takes_the_names_vote(serve, asking, folder):
    fake = FakeTextTeacher()
    teacher = serve(fake)
    asking(STATES, [teacher])
    asking(STATES, [teacher.model_copy(update={"name": "renamed", "weight": 3.0})])
    assert {(answer.teacher, answer.weight) for answer in folder.answers()} == {("renamed", 3.0)}
    assert len(fake.bodies) == 6
    asking(STATES, [teacher.model_copy(update={"name": "renamed", "model": "bigger"})])
    assert len(fake.bodies) == 12
    assert {answer.model for answer in folder.answers()} == {"bigger-2026"} and len(list(folder.answers())) == 6


UNUSABLE = {
    "arguments that aren't JSON": {
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read_file", "arguments": "{path:"}}]
    },
    "arguments that are no object": {
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read_file", "arguments": "[1]"}}]
    },
    "a tool that isn't offered": call("a", name="delete_file"),
    "calls that aren't a list": {"role": "assistant", "tool_calls": 7},
    "no function": {"role": "assistant", "tool_calls": [3]},
    "nothing": {"role": "assistant", "content": " "},
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_answer_that_is_no_action_is_paid_for_and_asked_no_second_time(serve, asking, folder, kind):
    fake = always(UNUSABLE[kind])
    teacher = serve(fake)
    asking(STATES[:2], [teacher])
    report = asking(STATES[:2], [teacher])
    assert outcomes(folder) == ["unusable"] * 2 and len(fake.bodies) == 2
    assert report.teachers[0].num_unusable == 2 and report.is_complete
    assert settled(folder.ledger()) == pytest.approx(fake.served_usd) and not list(folder.answers())


@pytest.mark.parametrize(("given", "meant"), [("", {}), ({"path": "a", "line": 3}, {"path": "a", "line": 3})])
def test_arguments_may_be_nothing_or_an_object(serve, asking, folder, given, meant):
    asking(STATES[:1], [serve(always({"tool_calls": [{"function": {"name": "read_file", "arguments": given}}]}))])
    (answer,) = folder.answers()
    assert json.loads(answer.action["tool_calls"][0]["function"]["arguments"]) == meant


@pytest.mark.parametrize("kind", ["cut", "empty", "tool", "text", "foreign"])
def test_five_answers_in_a_row_that_are_of_no_use_stop_a_teacher_and_say_why_and_what_was_spent(
    serve, asking, folder, kind
):
    says = {"empty": UNUSABLE["nothing"], "tool": UNUSABLE["a tool that isn't offered"]}.get(kind, call("a"))
    fake = FakeTextTeacher(
        says=lambda body: says,
        fault=lambda number: kind if kind in ("text", "foreign") else "ok",
        finish_reason="length" if kind == "cut" else "stop",
    )
    report = asking([trace(number) for number in range(30)], [serve(fake), serve(FakeTextTeacher(), name="well")])
    useless, well = report.teachers
    assert len(fake.bodies) == USELESS_AFTER == useless.num_unusable and well.num_answered == 30
    why = {"cut": "cut at max_tokens", "empty": "it is empty", "tool": "isn't offered"}.get(kind, "no choices")
    assert why in (useless.stopped or "") and f"${useless.usd:.6f} went for them" in (useless.stopped or "")
    assert not report.is_complete and useless.usd >= round(fake.served_usd, 9)


def test_a_usable_answer_between_ends_the_run_of_useless_ones(serve, asking):
    def says(body: Mapping[str, Any]) -> dict[str, Any]:
        return call("a") if number_of(body) % 5 == 0 else UNUSABLE["nothing"]

    report = asking([trace(number) for number in range(20)], [serve(FakeTextTeacher(says=says), max_in_flight=1)])
    assert (report.teachers[0].num_answered, report.teachers[0].num_unusable) == (4, 16) and report.is_complete


@pytest.mark.parametrize(("fault", "outcome"), [("broken", "refused"), ("gateway", "lost")])
def test_a_passing_fault_is_tried_again_and_costs_what_it_may_have_cost(serve, asking, folder, fault, outcome):
    fake = FakeTextTeacher(fault=lambda number: fault if number < 2 else "ok")
    report = asking(STATES[:1], [serve(fake)])
    assert outcomes(folder) == [outcome, outcome, "answered"] and report.is_complete
    lost = sum(record.usd_reserved for record in folder.ledger() if record.outcome == "lost")
    assert settled(folder.ledger()) + lost >= fake.served_usd
    assert (lost > 0) == (fault == "gateway") and report.usd_lost == pytest.approx(lost)


def test_an_answer_that_does_not_come_in_time_is_lost(serve, asking, folder):
    over = threading.Event()
    fake = FakeTextTeacher(hook=lambda number, when: number or over.wait(60))
    try:
        report = asking(STATES[:1], [serve(fake, timeout_s=0.5)])
    finally:
        over.set()
    assert outcomes(folder)[0] == "lost" and report.num_lost >= 1


def test_a_teacher_is_tried_a_bounded_number_of_times(serve, asking, folder):
    fake = FakeTextTeacher(fault=lambda number: "broken")
    report = asking(STATES[:1], [serve(fake)])
    assert len(fake.bodies) == TRIES and report.teachers[0].num_failed == 1 and not report.is_complete
    assert report.teachers[0].last_failure == "500: broken"


def test_a_teacher_that_dies_drops_out_and_the_others_go_on(serve, asking, folder):
    states = [trace(number) for number in range(20)]
    dying = FakeTextTeacher(fault=lambda number: "ok" if number < 4 else "dead")
    well = FakeTextTeacher()
    teachers = [serve(dying, name="dying", max_in_flight=1), serve(well, name="well")]
    report = asking(states, teachers)
    assert len(dying.bodies) == 4 + DEAD_AFTER * TRIES and len(well.bodies) == 20
    by_name = {one.name: one for one in report.teachers}
    assert (by_name["dying"].num_answered, by_name["dying"].num_failed) == (4, 16)
    assert by_name["well"].num_answered == 20 and by_name["well"].stopped is None
    assert "dying is asked no more" in "\n".join(report.lines()) and not report.is_complete
    dying.fault = lambda number: "ok"
    assert asking(states, teachers).is_complete and len(well.bodies) == 20


def test_a_server_that_is_not_there_costs_nothing(serve, asking, folder):
    with serving(FakeTextTeacher()) as url:
        teacher = FakeTextTeacher().config(url)
    report = asking(STATES, [teacher])
    assert set(outcomes(folder)) == {"refused"} and settled(folder.ledger()) == 0
    assert "can't be reached" in (report.teachers[0].stopped or "")


def test_questions_that_a_server_refuses_do_not_end_the_teacher(serve, asking):
    fake = FakeTextTeacher(fault=lambda number: "refused" if number else "ok")
    report = asking([trace(number) for number in range(20)], [serve(fake, max_in_flight=1)])
    assert (report.teachers[0].num_failed, report.teachers[0].num_answered) == (19, 1)
    assert report.teachers[0].stopped is None and not report.is_complete


def test_a_server_that_never_answered_and_refuses_five_questions_is_stopped(serve, asking):
    fake = FakeTextTeacher(fault=lambda number: "refused")
    report = asking([trace(number) for number in range(20)], [serve(fake)])
    assert len(fake.bodies) == USELESS_AFTER and "the last with: 400: refused" in (report.teachers[0].stopped or "")


PARAMETERS = {
    "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.": (
        "max_completion_tokens in place of max_tokens"
    ),
    "Unsupported value: 'temperature' does not support 0 with this model.": 'temperature = "unsent"',
    "Unknown field `top_k`": "change its top_k",
}


@pytest.mark.parametrize("words", PARAMETERS)
def test_a_refusal_that_names_a_parameter_stops_the_teacher_at_once_with_the_setting(serve, asking, words):
    fake = FakeTextTeacher(fault=lambda number: "refused", words=words)
    report = asking(STATES, [serve(fake, extra_body={"top_k": 3})])
    assert len(fake.bodies) == 1 and not report.is_complete
    assert words in (report.teachers[0].stopped or "") and PARAMETERS[words] in (report.teachers[0].stopped or "")


def test_a_prompt_that_is_too_long_is_about_that_question_though_the_refusal_names_max_tokens(serve, asking):
    words = "'max_tokens' is too large: 200. This model's maximum context length is 8 tokens"
    fake = FakeTextTeacher(fault=lambda number: "refused" if number == 1 else "ok", words=words)
    report = asking(STATES, [serve(fake, max_in_flight=1)])
    assert (report.teachers[0].num_failed, report.teachers[0].num_answered) == (1, 5)


def test_a_wrong_key_stops_the_teacher_at_once_and_costs_nothing(serve, asking):
    fake = FakeTextTeacher(fault=lambda number: "key", words="Incorrect API key provided")
    report = asking(STATES, [serve(fake)])
    assert len(fake.bodies) == 1 and report.usd == 0 and report.teachers[0].stopped == "401: Incorrect API key provided"


def test_a_teacher_whose_prices_have_doubled_is_stopped_until_they_are_corrected(serve, asking, folder):
    fake = FakeTextTeacher(factor=2, states_cost=True)
    teacher = serve(fake, max_in_flight=1)
    report = asking(STATES, [teacher])
    assert len(fake.bodies) == 1 and "more than its prices" in (report.teachers[0].stopped or "")
    assert settled(folder.ledger()) == pytest.approx(fake.served_usd)
    asking(STATES, [teacher])
    assert len(fake.bodies) == 1
    prices = {"usd_per_million_prompt_tokens": 6.0, "usd_per_million_completion_tokens": 30.0}
    assert asking(STATES, [teacher.model_copy(update=prices)]).is_complete and len(fake.bodies) == 6


def test_the_next_tier_is_asked_only_where_no_two_answers_agree(serve, asking):
    agreed = {json.dumps(list(state.messages)) for state in STATES[:4]}
    one = always(call("a"))
    other = FakeTextTeacher(says=lambda body: call("a" if json.dumps(body["messages"]) in agreed else "b"))
    third, dear, dearest = always(call("c")), always(call("a")), FakeTextTeacher()
    teachers = [serve(one, name="one"), serve(other, name="other"), serve(third, name="third")]
    teachers += [serve(dear, name="dear", tier=7), serve(dearest, name="dearest", tier=9)]
    report = asking(STATES, teachers)
    assert (len(one.bodies), len(other.bodies), len(dear.bodies), len(dearest.bodies)) == (6, 6, 2, 0)
    assert {json.dumps(body["messages"]) for body in dear.bodies} == {
        json.dumps(list(state.messages)) for state in STATES[4:]
    }
    assert report.is_complete


def test_one_usable_answer_settles_nothing_while_there_is_somebody_to_ask(serve, asking):
    useless = FakeTextTeacher(says=lambda body: call("a", name="none") if number_of(body) % 2 else call("a"))
    next_up, last = always(call("a")), FakeTextTeacher()
    teachers = [serve(always(call("a")), name="one"), serve(useless, name="useless")]
    asking(STATES, [*teachers, serve(next_up, name="next", tier=1), serve(last, name="last", tier=2)])
    assert {number_of(body) for body in next_up.bodies} == {1, 3, 5} and not last.bodies


def test_a_second_process_is_refused_while_one_asks(serve, asking, folder):
    fake = FakeTextTeacher()
    teacher = serve(fake)
    with folder.held([], NANO), pytest.raises(BadInput, match="being asked for by another process"):
        asking(STATES, [teacher])
    assert not fake.bodies
    assert asking(STATES, [teacher]).is_complete


def test_a_key_that_is_not_set_is_asked_for_before_anything_is_sent(serve, asking):
    fake = FakeTextTeacher()
    with pytest.raises(BadInput, match=r"api_key_var \(NO_SUCH_KEY\) isn't set"):
        asking(STATES, [serve(fake), serve(fake, name="keyed", api_key_var="NO_SUCH_KEY")])
    assert not fake.bodies


def test_an_empty_pool_and_an_empty_store_are_refused(serve, asking):
    with pytest.raises(BadInput, match="6 decision points and 0 teachers"):
        asking(STATES, [])
    with pytest.raises(BadInput, match="0 decision points: nothing is left to ask about"):
        asking([], [serve(FakeTextTeacher())])


def test_a_folder_without_answers_says_how_to_get_some(folder):
    with pytest.raises(BadInput, match="composer-prime replay ask"):
        list(folder.answers())
