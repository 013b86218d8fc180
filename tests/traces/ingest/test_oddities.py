"""What real files of each format hold beside the story: retries, streams, rewinds, condensations, files in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.context import OTHER
from composer_prime.traces.ingest.dialects.parts import either_message
from composer_prime.traces.ingest.dialects.streams import assembled, events_of
from composer_prime.traces.ingest.export import original_files
from composer_prime.traces.ingest.formats.harbor import to_atif
from composer_prime.traces.ingest.intake import find_files, read_file
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.states import TraceState
from tests.traces.ingest import stories
from tests.traces.ingest.api_stories import stream
from tests.traces.ingest.stories import MODEL
from tests.traces.ingest.test_formats import done, reading_of, session_of, told


def lines_of(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def states_of(reading: Reading) -> list[TraceState]:
    return [state for session in reading.sessions for state in session.states()]


def texts(state: TraceState) -> list[str]:
    return [message["content"] for message in state.messages]


def chat_call(question: str, answer: str, **more: Any) -> dict[str, Any]:
    response = {"model": MODEL, "choices": [{"message": {"role": "assistant", "content": answer}}]}
    return {"request": {"messages": [{"role": "user", "content": question}], **more}, "response": response}


# Calls of models


def test_streams_are_put_together_in_the_three_dialects() -> None:
    call = {"id": "c", "function": {"name": "run", "arguments": '{"a"'}}
    deltas = [{"content": "He"}, {"content": "llo", "tool_calls": [{"index": 0, **call}]}]
    deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]})
    chat = "".join(f"data: {json.dumps({'id': 'x', 'choices': [{'delta': delta}]})}\n\n" for delta in deltas)
    message = assembled(events_of(chat + "data: [DONE]\n"))["choices"][0]["message"]
    assert message["content"] == "Hello" and message["tool_calls"] == [
        {"id": "c", "name": "run", "arguments": '{"a": 1}'}
    ]
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    events = [
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {"model": "m", "output": []}},
    ]
    assert assembled(events) == {"model": "m", "output": [item]}
    whole = stories.blocks(told())[1]
    assert assembled(events_of(stream(whole, 1)))["content"][1] == whole["content"][1]


def test_failed_calls_probes_and_calls_without_an_answer_are_left_out_by_reason(tmp_path: Path) -> None:
    failed = {**chat_call("q", ""), "response": {"type": "error", "error": {"message": "overloaded"}}}
    unread = {**chat_call("q", ""), "response": {"input_tokens": 3}}
    reading = reading_of(tmp_path, [chat_call("q", "a"), failed, chat_call("quota", "#", max_tokens=1), unread])
    assert [state.action["content"] for state in states_of(reading)] == ["a"]
    assert reading.dropped == {"call that failed": 1, "call for one token": 1, "call in a dialect that isn't read": 1}


def test_a_spend_log_holds_its_request_and_its_response_as_texts(tmp_path: Path) -> None:
    call = chat_call("q", "a", model=MODEL)
    row = {"request_id": "r", "call_type": "acompletion", "messages": "{}", "response": json.dumps(call["response"])}
    row["proxy_server_request"] = json.dumps({"url": "http://x", "body": call["request"]})
    (state,) = states_of(reading_of(tmp_path, [row]))
    assert texts(state) == ["q"] and state.action["content"] == "a" and state.author == MODEL


def test_calls_with_other_tools_are_sessions_of_the_lines_that_tell_them(tmp_path: Path) -> None:
    tools = stories.chat_tools()
    calls = [chat_call("q", "a", tools=tools), chat_call("title?", "T"), chat_call("r", "b", tools=tools)]
    reading = reading_of(tmp_path, lines_of(*calls))
    assert [len(session.original[0].text.splitlines()) for session in reading.sessions] == [2, 1]
    for session in reading.sessions:
        (text,) = original_files(session).values()
        assert [again.to_json() for again in reading_of(tmp_path, text.encode()).sessions] == [session.to_json()]


def test_an_answer_that_two_instruments_log_counts_once_and_a_later_request_shows_it(tmp_path: Path) -> None:
    first, second = json.loads(stories.litellm(told()))[:2]
    reading = reading_of(tmp_path, [second, first, {**first, "response": {**first["response"], "id": None}}])
    early, late = states_of(reading)
    assert [early.parent, late.parent] == [None, early.turn] and done(early) == told().actions[0]


def test_a_span_whose_prompt_is_not_whole_and_the_span_around_vercels_calls_are_left_out(tmp_path: Path) -> None:
    answer = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Done."}]}])
    result = [{"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "ok"}]}]
    cut = {"gen_ai.input.messages": json.dumps(result), "gen_ai.output.messages": answer}
    silent = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": answer}
    shown = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    vercel = {
        "ai.operationId": "ai.streamText.doStream",
        "ai.prompt.messages": json.dumps(shown),
        "ai.prompt.tools": {"values": [json.dumps({"type": "function", "name": "run", "inputSchema": {}})]},
        "ai.response.toolCalls": json.dumps([{"toolCallId": "c", "toolName": "run", "input": '{"a": 1}'}]),
    }
    outer = {**vercel, "ai.operationId": "ai.streamText"}
    reading = reading_of(tmp_path, [{"attributes": given} for given in (cut, silent, outer, vercel)])
    (state,) = states_of(reading)
    assert done(state) == ("", [("run", {"a": 1})]) and texts(state) == ["q"] and len(state.tools) == 1
    assert reading.dropped == {
        "call of a model whose prompt isn't whole": 1,
        "call of a model without its messages": 1,
        "span that is no call of a model": 1,
    }


def test_langfuse_inputs_are_texts_messages_or_contents_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    declared = {"name": "greet", "parameters_json_schema": {"type": "object", "properties": {"who": {}}}}
    gemini = {
        "config": {"system_instruction": "Be kind.", "tools": [{"function_declarations": [declared]}]},
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    }
    called = {"content": {"role": "model", "parts": [{"function_call": {"name": "greet", "args": {"who": "x"}}}]}}
    told_by = [
        ("What?", "That."),
        ({"prompt": "What?"}, [{"toolCallId": "c", "toolName": "run", "input": {}}]),
        (json.dumps(gemini), called),
        ({"messages": ["role='user' content='q'"]}, {"choices": [{"message": {"content": "a"}}]}),
        ([{"role": "user", "content": "q"}], None),
    ]
    observations = [{"type": "GENERATION", "startTime": "t", "input": i, "output": o} for i, o in told_by]
    reading = reading_of(tmp_path, {"trace": {}, "observations": observations})
    first, second, third = states_of(reading)
    assert texts(first) == ["What?"] and first.action["content"] == "That."
    assert done(second)[1] == [("run", {})] and done(third)[1] == [("greet", {"who": "x"})]
    assert texts(third) == ["Be kind.", "hi"] and "who" in third.tools[0]["function"]["parameters"]["properties"]
    assert reading.dropped == {"generation without its messages or its answer": 2}


def test_a_langsmith_batch_is_read_with_what_was_patched_later(tmp_path: Path) -> None:
    run = {"id": "r", "run_type": "llm", "start_time": 1, "outputs": {}, "inputs": chat_call("q", "")["request"]}
    (state,) = states_of(reading_of(tmp_path, {"post": [run], "patch": [{"outputs": chat_call("q", "a")["response"]}]}))
    assert texts(state) == ["q"] and state.action["content"] == "a" and state.author == MODEL


# Agents' sessions


def test_runs_and_subagents_of_stream_json_are_trees_of_their_own(tmp_path: Path) -> None:
    def line(kind: str, session: str, content: Any, parent: str | None = None) -> dict[str, Any]:
        message = {"role": kind, "content": content, **({"id": f"m{content}"} if kind == "assistant" else {})}
        return {"type": kind, "message": message, "session_id": session, "parent_tool_use_id": parent}

    init = {"type": "system", "subtype": "init", "cwd": "/w"}
    lines = [
        {**init, "session_id": "a"},
        line("user", "a", "q"),
        line("assistant", "a", "One."),
        line("user", "a", "Explore.", "call"),
        line("assistant", "a", "Found.", "call"),
        line("assistant", "a", "Two."),
        {**init, "session_id": "b"},
        line("user", "b", "r"),
        line("assistant", "b", "Three."),
    ]
    for given in (lines_of(*lines), lines):
        session = session_of(tmp_path, given)
        assert session.format == "claude-stream-json" and session.cwd == "/w"
        assert [texts(state) for state in session.states()] == [["q"], ["Explore."], ["q", "One."], ["r"]]


def test_qwen_lines_rewind_grow_and_are_compressed(tmp_path: Path) -> None:
    def line(name: str, parent: str | None, **more: Any) -> dict[str, Any]:
        return {"uuid": name, "parentUuid": parent, "sessionId": "s", "type": "assistant", **more}

    def said(role: str, *parts: Any) -> dict[str, Any]:
        return {"message": {"role": role, "parts": list(parts)}}

    call = {"functionCall": {"name": "read_file", "args": {"path": "a"}}}
    answer = {"functionResponse": {"name": "read_file", "response": {"output": "x"}}}
    history = [{"role": "user", "parts": [{"text": "Summary."}]}, {"role": "model", "parts": [{"text": "Got it."}]}]
    lines = [
        line("1", None, type="user", **said("user", {"text": "q"})),
        line("2", "1", model="old", **said("model", {"text": "Discarded."})),
        line("3", "1", type="system", subtype="rewind", systemPayload={"targetUuid": "1"}),
        line("4", "3", type="user", **said("user", {"text": "Again."})),
        line("5", "4", **said("model", {"text": "Hm.", "thought": True})),
        line("5", "4", model="new", **said("model", call, {"text": "Reading."})),
        line("6", "5", type="tool_result", **said("user", answer)),
        line("7", "6", type="system", subtype="chat_compression", systemPayload={"compressedHistory": history}),
        line("8", "7", **said("model", {"text": "Done."})),
    ]
    first, second, last = session_of(tmp_path, lines_of(*lines)).states()
    assert first.author == "old" and texts(second) == ["q", "Again."]
    assert second.action["reasoning_content"] == "Hm." and done(second) == ("Reading.", [("read_file", {"path": "a"})])
    assert second.author == "new" and texts(last) == ["Summary.", "Got it."]


def test_openhands_v1_errors_answer_their_call_and_a_condensation_begins_a_branch(tmp_path: Path) -> None:
    events = [json.loads(line) for line in stories.openhands_v1(told()).splitlines()]
    place = next(n for n, event in enumerate(events) if event["kind"] == "ObservationEvent")
    call_id = events[place]["tool_call_id"]
    events[place] = {"id": "x", "kind": "AgentErrorEvent", "source": "agent", "error": "No.", "tool_call_id": call_id}
    gone = [event["id"] for event in events[3:-1]]
    cut = {"id": "c", "kind": "Condensation", "source": "environment", "forgotten_event_ids": gone, "summary": "S."}
    events.insert(len(events) - 1, cut)
    for given in (lines_of(*events), events):
        states = list(session_of(tmp_path, given).states())
        assert states[1].messages[3] == {"role": "tool", "content": "No.", "tool_call_id": call_id}
        assert texts(states[-1]) == [told().system, told().user, "S."] and len(states) == 6


def test_a_folder_of_openhands_events_one_a_file_is_one_session(tmp_path: Path) -> None:
    for number, line in enumerate(stories.openhands_v1(told()).splitlines()):
        (tmp_path / f"event-{number:05}-{number * 7919 % 1000}.json").write_text(json.dumps(json.loads(line), indent=1))
    (main,) = find_files([tmp_path])
    reading = read_file(main)[1]
    assert [done(state) for state in states_of(reading)] == told().actions
    (text,) = original_files(reading.sessions[0]).values()
    again = reading_of(tmp_path, text.encode())
    assert [session.to_json() for session in again.sessions] == [session.to_json() for session in reading.sessions]
    assert read_file(sorted(tmp_path.glob("event-*.json"))[3])[1].sessions == reading.sessions, "whichever is named"


def test_an_openhands_error_that_names_no_call_is_shown_to_the_model(tmp_path: Path) -> None:
    events = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "q"}},
        {"id": 1, "source": "agent", "observation": "error", "content": "Bad call.", "cause": None},
        {"id": 2, "source": "agent", "action": "message", "args": {"content": "Sorry."}},
    ]
    (state,) = states_of(reading_of(tmp_path, events))
    assert texts(state) == ["q", "Bad call."]


def test_a_step_of_swe_agent_never_sees_its_own_action_or_observation(tmp_path: Path) -> None:
    value = json.loads(stories.swe_agent(told()))
    history = value["history"]
    for step in value["trajectory"]:
        place = len(step.pop("query"))
        end = next((n for n in range(place + 1, len(history)) if history[n]["role"] == "assistant"), len(history))
        step["messages"] = history[:end]
    value["trajectory"][2]["response"] = value["trajectory"][2]["thought"] = ""
    value["trajectory"][2]["action"] = "make"
    place = [n for n, message in enumerate(history) if message["role"] == "assistant"][2]
    for step in value["trajectory"][2:]:
        step["messages"][place] = {**history[place], "content": "", "action": "make"}
    states = list(session_of(tmp_path, value).states())
    assert [done(state)[1] for state in states] == [calls for _, calls in told().actions]
    assert all(state.messages[-1]["role"] != "assistant" for state in states)
    assert [len(state.messages) for state in states] == [
        n for n, message in enumerate(history) if message["role"] == "assistant"
    ]


def test_a_swe_agent_step_that_the_history_lacks_is_left_out_and_the_next_are_right(tmp_path: Path) -> None:
    value = json.loads(stories.swe_agent(told()))
    for step in value["trajectory"]:
        del step["query"]
    retried = {"action": "?", "observation": "", "response": "A try that failed.", "thought": ""}
    value["trajectory"].insert(2, retried)
    reading = reading_of(tmp_path, value)
    assert [done(state) for state in states_of(reading)] == told().actions
    assert reading.dropped == {"step that doesn't say what the model was shown": 1}
    alone = [{**message, "agent": "main"} for message in value["history"]]
    assert [done(state) for state in states_of(reading_of(tmp_path, {"history": alone}))] == told().actions


def test_an_assistants_messages_in_a_row_are_one_response(tmp_path: Path) -> None:
    messages = stories.chat_messages(told())
    place = next(n for n, message in enumerate(messages) if len(message.get("tool_calls", [])) == 2)
    whole = messages[place]
    split = [{"role": "assistant", "content": whole["content"], "reasoning_content": whole["reasoning_content"]}]
    split += [{"role": "assistant", "content": None, "tool_calls": [call]} for call in whole["tool_calls"]]
    again = messages[:place] + split + messages[place + 1 :]
    one, other = (list(session_of(tmp_path, given).states()) for given in (messages, again))
    assert [(state.messages, state.action) for state in one] == [(state.messages, state.action) for state in other]


def test_a_providers_own_tool_is_no_call_and_the_text_around_it_is_one_action(tmp_path: Path) -> None:
    searched = [
        {"type": "text", "text": "Let me look."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "text", "text": "Found it."},
    ]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": searched}]
    (state,) = states_of(reading_of(tmp_path, messages))
    assert state.action == {"role": "assistant", "content": "Let me look.\nFound it."}
    text = [{"type": "output_text", "text": "Let me look."}]
    items = [
        {"type": "message", "role": "user", "content": "q"},
        {"type": "message", "role": "assistant", "content": text},
        {"type": "web_search_call", "status": "completed"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Found it."}]},
    ]
    (state,) = states_of(reading_of(tmp_path, items))
    assert state.action["content"] == "Let me look.\nFound it."


def test_content_that_has_a_text_keeps_it() -> None:
    content = [
        {"type": "document", "source": {"type": "text", "data": "A page."}},
        {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}},
        {"type": "search_result", "content": [{"type": "text", "text": "A hit."}]},
        {"type": "file", "path": "a.py", "content": "x = 1"},
        {"type": "refusal", "refusal": "No."},
        {"inlineData": {"mimeType": "image/png", "data": "iVBO"}},
    ]
    (message,) = either_message({"role": "user", "content": content})
    assert message["content"].split("\n") == ["A page.", OTHER, "A hit.", "x = 1", "No.", "[image]"]


def test_geminis_calls_without_ids_are_answered_in_their_order(tmp_path: Path) -> None:
    calls = [{"functionCall": {"name": "read", "args": {"path": path}}} for path in "ab"]
    answers = [{"functionResponse": {"name": "read", "response": {"output": text}}} for text in ("A", "B")]
    contents = [
        {"role": "user", "parts": [{"text": "q"}]},
        {"role": "model", "parts": calls},
        {"role": "user", "parts": answers},
        {"role": "model", "parts": [{"text": "Done."}]},
    ]
    *_, last = states_of(reading_of(tmp_path, contents))
    assert [message["content"] for message in last.messages if message["role"] == "tool"] == ["A", "B"]


def test_values_that_run_on_without_lines_are_records(tmp_path: Path) -> None:
    whole = [json.loads(line) for line in stories.otel(told()).splitlines()]
    glued = "".join(json.dumps(value, indent=1) for value in whole)
    assert [done(state) for state in states_of(reading_of(tmp_path, ("\ufeff" + glued).encode()))] == told().actions


def test_an_opencode_tool_that_failed_answers_and_an_aborted_message_is_left_out(tmp_path: Path) -> None:
    value = json.loads(stories.opencode(told()))
    first = value["messages"][1]["parts"]
    (tool, *_) = [part for part in first if part["type"] == "tool"]
    tool["state"] = {"status": "error", "input": tool["state"]["input"], "error": "It broke."}
    value["messages"].insert(2, {"info": {"role": "assistant", "error": {"name": "MessageAbortedError"}}, "parts": []})
    reading = reading_of(tmp_path, value)
    assert "It broke." in texts(states_of(reading)[1]) and len(states_of(reading)) == 6
    assert reading.dropped == {"message without content": 1}


# Harbor


def fake_python(tmp_path: Path, body: str) -> Path:
    """What is run as `PYTHON -c CODE AGENT FOLDER`."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_harbors_converter_is_given_the_session_where_it_looks_for_it(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("{}\n")
    given = fake_python(tmp_path, 'test "$3" = pi && cp "$4/pi/sessions/session.jsonl" "$4/trajectory.json"')
    assert to_atif(tmp_path / "s.jsonl", given, "pi") == b"{}\n"


@pytest.mark.parametrize(
    "body, agent, message",
    [
        ("exit 0", "pi", "Harbor makes no trajectory of .*s.jsonl: give a session of pi"),
        ("echo no harbor >&2; exit 1", "pi", r"--harbor \(.*python\) ended with 1: no harbor"),
        ("exit 0", "nobody", "agent 'nobody' isn't one that Harbor converts: give one of gemini-cli, "),
    ],
)
def test_what_harbor_can_not_convert_is_refused(body: str, agent: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match=message):
        to_atif(tmp_path / "s.jsonl", fake_python(tmp_path, body), agent)
    with pytest.raises(BadInput, match="can't be run"):
        to_atif(tmp_path / "s.jsonl", tmp_path / "nowhere", "pi")
