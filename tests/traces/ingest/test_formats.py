"""Each format read: the same story comes out of all, and what each leaves out is counted."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.traces.ingest.context import NO_RESULT
from composer_prime.traces.ingest.formats import FORMATS, detect
from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.ingest.reading import Reading
from composer_prime.traces.ingest.records import entries_of
from composer_prime.traces.ingest.secret_patterns import SecretCutter
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.states import TraceState, calls_of
from tests.traces.ingest import stories
from tests.traces.ingest.stories import MODEL, NO_SYSTEM, WRITERS, Story, chat_messages, story


def reading_of(tmp_path: Path, value: Any) -> Reading:
    """What a document, or the bytes of a file, is read as."""
    path = tmp_path / "given.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return read_file(path)[1]


def session_of(tmp_path: Path, value: Any) -> Session:
    (session,) = reading_of(tmp_path, value).sessions
    return session


def done(state: TraceState) -> tuple[str, list[tuple[str, Any]]]:
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls_of(state.action)]
    return state.action["content"], calls


def told() -> Story:
    return story(random.Random(0), 6)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_tells_the_same_decision_points_and_keeps_or_counts_each_record(name: str, tmp_path: Path) -> None:
    reading = reading_of(tmp_path, WRITERS[name][1](told()))
    (session,) = reading.sessions
    assert session.format == WRITERS[name][0]
    states = list(session.states())
    assert [done(state) for state in states] == told().actions
    assert [state.turn for state in states] == list(range(6))
    assert [state.parent for state in states] == [None, 0, 1, 2, 3, 4]
    expected = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in chat_messages(told())]
    expected[1]["content"] = told().user
    expected = expected[1:] if name in NO_SYSTEM else expected
    assert list(states[-1].messages) == expected[:-1]
    assert {state.author for state in states} <= {MODEL, None}
    kept = {record for node in session.nodes for record in node.records}
    assert len(kept) == reading.num_used and len(kept) + sum(reading.dropped.values()) == reading.num_records


@pytest.mark.parametrize(
    "name", sorted({*WRITERS} - {"swe-agent", "mini-swe-agent", "codex", "openai-responses", "openllmetry", *NO_SYSTEM})
)
def test_listed_tools_are_taken_and_others_inferred(name: str, tmp_path: Path) -> None:
    listed = session_of(tmp_path, WRITERS[name][1](told())).tools
    assert [tool["function"]["name"] for tool in listed] == ["run", "edit"]
    assert listed[0]["function"]["parameters"]["required"] == ["command"]
    *_, last = session_of(tmp_path, stories.codex(told())).states()
    assert {tool["function"]["name"] for tool in last.tools} == {"run", "edit"} and not last.has_tools
    arguments = last.tools[0]["function"]["parameters"]["properties"]
    assert arguments == {"command": {"type": "string"}, "line": {"type": "integer"}}


def test_inferred_tools_are_those_known_by_then_and_no_part_of_the_question(tmp_path: Path) -> None:
    def states(num_turns: int, extra: str) -> list[TraceState]:
        messages = [{"role": "user", "content": "Go."}]
        for turn in range(num_turns):
            call = {"id": f"c{turn}", "function": {"name": extra if turn == 8 else "run", "arguments": "{}"}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{turn}", "content": "ok"},
            ]
        return list(session_of(tmp_path, messages).states())

    short, long = states(8, "run"), states(20, "edit")
    assert [state.question for state in long[:8]] == [state.question for state in short]
    offered = [{tool["function"]["name"] for tool in state.tools} for state in long]
    assert offered == [{"run"}] * 8 + [{"run", "edit"}] * 12
    listed = {
        "messages": [dict(m) for m in short[-1].messages] + [dict(short[-1].action)],
        "tools": stories.chat_tools(),
    }
    *_, last = session_of(tmp_path, listed).states()
    assert last.messages == short[-1].messages and last.question != short[-1].question, "listed tools are part of it"


def test_thinking_is_in_the_action_and_never_in_what_later_calls_see(tmp_path: Path) -> None:
    for name in ("atif", "openenv", "verifiers", "codex", "openhands", "openai-responses", "openai-chat"):
        states = list(session_of(tmp_path, WRITERS[name][1](told())).states())
        assert states[0].action["reasoning_content"] == "Why 0?", name
        assert not any("reasoning_content" in message for state in states for message in state.messages), name


def test_the_traces_of_these_tests_are_such_as_verifiers_reads() -> None:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Reward
    from verifiers.v1.types import Tool

    trace = stories.verifiers_trace(told())
    assert all(MessageNode.model_validate(node).sampled == node["sampled"] for node in trace["nodes"])
    assert [Tool.model_validate(tool).name for tool in trace["tools"]] == ["run", "edit"]
    assert Reward.model_validate(trace["rewards"]["right"]).value == 0.5


def test_verifiers_keeps_branches_copies_and_the_weighted_reward(tmp_path: Path) -> None:
    trace = stories.verifiers_trace(told())
    wrote = {"role": "assistant", "content": "Another way."}
    trace["nodes"].append({"parent": 1, "message": wrote, "sampled": True})
    trace["nodes"].append({"parent": 1, "message": {**wrote, "content": "Shown."}, "sampled": False})
    trace["nodes"].append({"parent": 99, "message": wrote, "sampled": True})
    trace["nodes"].append({"parent": 1, "message": None, "sampled": True})
    reading = reading_of(tmp_path, trace)
    (session,) = reading.sessions
    states = list(session.states())
    assert [state.action["content"] for state in states[-2:]] == ["Done.", "Another way."]
    assert states[-1].parent is None and len(states[-1].messages) == 2
    assert states[0].reward == 0.5
    assert reading.dropped == {"parent missing": 1, "node without a message": 1}


def test_verifiers_episodes_give_a_session_a_trace_and_a_half_last_line_is_counted(tmp_path: Path) -> None:
    trace = stories.verifiers_trace(told())
    second = {**trace, "id": "t2", "rewards": {}}
    failed = {"id": "e2", "env": {"id": "x"}, "task": {}, "ok": False, "errors": []}
    whole = json.dumps({"id": "e1", "traces": [trace, second, {"id": "t3", "nodes": []}]}) + "\n"
    whole += json.dumps(failed) + "\n"
    reading = reading_of(tmp_path, (whole + whole[:200]).encode())
    assert [session.reward for session in reading.sessions] == [0.5, None]
    assert len({session.id for session in reading.sessions}) == 2
    assert reading.dropped == {"episode without a trace": 2, "truncated last line": 1}
    assert reading.num_records == 2 * len(trace["nodes"]) + 3


def test_atif_knows_copied_context_steps_without_a_model_and_subagents(tmp_path: Path) -> None:
    value = json.loads(stories.atif(told()))
    value["steps"][2]["is_copied_context"] = True
    value["steps"][3]["llm_call_count"] = 0
    value["steps"].append({"step_id": 9, "source": "robot", "message": "?"})
    value["steps"].append(
        {"step_id": 10, "source": "user", "message": [{"type": "image"}, {"type": "text", "text": "x"}]}
    )
    inner = json.loads(stories.atif(told()))
    value["subagent_trajectories"] = [{**inner, "trajectory_id": "inner"}]
    reading = reading_of(tmp_path, value)
    (session,) = reading.sessions
    assert len(list(session.states())) == 4 + 6
    assert session.nodes[-1].parent is not None
    assert [message.message["content"] for message in session.nodes if "[image]" in message.message["content"]] == [
        "[image]\nx"
    ]
    assert reading.dropped == {"step of no known source": 1} and reading.num_records == 10 + 8


def test_an_atif_result_that_names_no_call_answers_the_only_one_or_is_shown_by_the_user(tmp_path: Path) -> None:
    value = json.loads(stories.atif(told()))
    one, two = (next(s for s in value["steps"] if len(s.get("tool_calls", [])) == number) for number in (1, 2))
    del one["observation"]["results"][0]["source_call_id"]
    two["observation"]["results"] = [{"content": "Both ran."}]
    (*_, last) = session_of(tmp_path, value).states()
    after = {
        m["tool_calls"][0]["id"]: last.messages[n + 1 : n + 4] for n, m in enumerate(last.messages) if "tool_calls" in m
    }
    assert after[one["tool_calls"][0]["tool_call_id"]][0]["content"] not in (NO_RESULT, "")
    *results, shown = after[two["tool_calls"][0]["tool_call_id"]]
    assert [message["content"] for message in results] == [NO_RESULT, NO_RESULT]
    assert shown == {"role": "user", "content": "Both ran."}


@pytest.mark.parametrize("version", ["ATIF-v1.0", "ATIF-v1.8"])
def test_atif_versions_are_read(version: str, tmp_path: Path) -> None:
    assert session_of(tmp_path, {**json.loads(stories.atif(told())), "schema_version": version}).format == "atif"


@pytest.mark.parametrize("file, text", [("reward.txt", "0.75\n"), ("reward.json", '{"reward": 0.75, "n": 1}')])
def test_a_trials_reward_is_read_beside_its_trajectory(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "verifier").mkdir()
    (tmp_path / "agent" / "trajectory.json").write_bytes(stories.atif(told()))
    (tmp_path / "verifier" / file).write_text(text)
    (session,) = read_file(tmp_path / "agent" / "trajectory.json")[1].sessions
    assert session.reward == 0.75


def test_codex_compaction_begins_a_branch_and_usage_goes_to_the_call_that_it_closes(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in stories.codex(told()).splitlines()]
    cut = {"timestamp": "t", "type": "compacted", "payload": {"message": "Summary."}}
    after = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Go on."}]}
    lines += [cut, {"timestamp": "t", "type": "response_item", "payload": after}]
    stray = {"type": "function_call_output", "call_id": "call_0_0", "output": "late"}
    lines.append({"timestamp": "t", "type": "response_item", "payload": stray})
    reading = reading_of(tmp_path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    (session,) = reading.sessions
    *_, done_state, last = session.states()
    assert [message["content"] for message in last.messages] == ["Summary."] and last.parent is None
    assert last.author == MODEL and done_state.action["content"] == "Done."
    usages = [node.usage for node in session.nodes if node.is_turn][:-1]
    assert len(usages) == 6 and all(usage is not None for usage in usages)
    assert reading.dropped == {"event without a message": 1, "tool result without a call": 1}


def test_openhands_actions_without_metadata_become_calls_and_condensation_a_branch(tmp_path: Path) -> None:
    events = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "Repair it."}},
        {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "Look."}},
        {"id": 2, "source": "agent", "observation": "run", "content": "a.py", "cause": 1},
        {"id": 3, "source": "agent", "action": "run", "args": {"command": "cat a.py"}},
        {"id": 4, "source": "agent", "observation": "run", "content": "x", "cause": 3},
        {"id": 5, "source": "agent", "observation": "run", "content": "again", "cause": 3},
        {
            "id": 6,
            "action": "condensation",
            "source": "agent",
            "args": {"forgotten_event_ids": [1, 2], "summary": "S."},
        },
        {"id": 7, "source": "agent", "action": "message", "args": {"content": "Done."}},
    ]
    reading = reading_of(tmp_path, events)
    (session,) = reading.sessions
    first, second, last = session.states()
    assert done(first) == ("Look.", [("run", {"command": "ls"})]) and len(second.messages) == 3
    assert [message["content"] for message in last.messages] == ["Repair it.", "S.", "", "x"]
    assert last.action["content"] == "Done." and reading.dropped == {"duplicate tool result": 1}


def test_swe_agent_with_a_history_alone(tmp_path: Path) -> None:
    value = json.loads(stories.swe_agent(told()))
    demonstration = {"role": "assistant", "content": "Like this.", "is_demo": True}
    value["history"].insert(2, demonstration)
    for step in value["trajectory"]:
        del step["query"]
    value["trajectory"].append({"action": "", "observation": "", "response": "", "thought": ""})
    reading = reading_of(tmp_path, value)
    (session,) = reading.sessions
    states = list(session.states())
    assert [done(state) for state in states] == told().actions
    assert states[0].messages[2]["content"] == "Like this."
    assert reading.dropped == {"step without a response": 1}


def test_swe_agent_steps_with_elided_history_are_branches(tmp_path: Path) -> None:
    value = json.loads(stories.swe_agent(told()))
    for message in value["trajectory"][-1]["query"]:
        if message["role"] == "tool":
            message["content"] = "(old output omitted)"
    *_, last = session_of(tmp_path, value).states()
    assert {m["content"] for m in last.messages if m["role"] == "tool"} == {"(old output omitted)"}
    assert len(list(session_of(tmp_path, value).states())) == 6


def test_openenv_reads_the_dialects_of_responses_and_anthropic(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "c", "name": "run", "input": {"command": "ls"}}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a.py"}]}
    said = [("user", "Q"), ("assistant", [call]), ("user", [answer])]
    messages = [{"role": role, "content": content} for role, content in said]
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Done."}]
    anthropic = {"request": {"system": "S.", "messages": messages}, "response": {"model": "m", "content": blocks}}
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}]
    responses = {"request": {"input": "Q", "instructions": "S."}, "response": {"output": output}}
    google = {"request": {"contents": []}, "response": {"candidates": []}}
    turns = [{"node_id": str(number), **turn} for number, turn in enumerate([anthropic, responses, google])]
    reading = reading_of(tmp_path, {"schema_version": 1, "turns": turns})
    assert reading.sessions[0].format == "api-log"
    first, second = reading.sessions[0].states()
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool"]
    assert first.action == {"role": "assistant", "content": "Done.", "reasoning_content": "hm"} and first.author == "m"
    assert [message["content"] for message in second.messages] == ["S.", "Q"] and second.action["content"] == "Yes."
    assert reading.dropped == {"call in a dialect that isn't read": 1}


def test_a_response_with_its_input_gives_one_decision_point(tmp_path: Path) -> None:
    items = stories.response_items(told())
    value = {
        "object": "response",
        "model": MODEL,
        "instructions": "Be brief.",
        "input": items[:-1],
        "output": items[-1:],
    }
    (state,) = session_of(tmp_path, value).states()
    assert state.messages[0] == {"role": "system", "content": "Be brief."} and state.action["content"] == "Done."
    chained = reading_of(tmp_path, {**value, "previous_response_id": "r0"})
    assert chained.dropped == {"context in another response": len(items)} and not chained.sessions


def test_chat_reads_older_function_calls_and_drops_orphans(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": '{"command": "ls"}'}},
        {"role": "function", "name": "run", "content": "a.py"},
        {"role": "tool", "tool_call_id": "gone", "content": "?"},
        {"role": "critic", "content": "!"},
        {"role": "assistant", "content": "Done."},
    ]
    reading = reading_of(tmp_path, messages)
    first, second = reading.sessions[0].states()
    assert done(first) == ("", [("run", {"command": "ls"})]) and len(second.messages) == 3
    assert reading.dropped == {"tool result without a call": 1, "message of no known role": 1}


def test_chats_one_a_line_are_sessions_of_their_own(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, stories.chat(told()) + stories.chat(story(random.Random(1), 3)))
    assert [len(list(session.states())) for session in reading.sessions] == [6, 3]


@pytest.mark.parametrize(
    "text, nearest, lack",
    [
        ('{"schema_version": "ATIF-v2.0", "steps": []}', "atif", "schema_version ATIF-v1.0 to ATIF-v1.8"),
        ('{"type": "user", "message": {"content": ""}, "uuid": "u"}', "claude-code", "sessionId or parentUuid"),
        ('{"timestamp": "t", "type": "event_msg"}', "codex", "a payload object"),
        ('{"turns": [{"request": {"messages": []}}]}', "api-log", "a response beside the request"),
        ('{"message": {"content": ""}}', "claude-code", "type user or assistant, uuid, sessionId or parentUuid"),
        ('{"what": "ever"}', "openai-chat", "a list of messages, or an object with messages, a message with a role"),
    ],
)
def test_an_unknown_format_is_refused_with_the_nearest_and_what_it_lacks(text: str, nearest: str, lack: str) -> None:
    with pytest.raises(
        BadInput, match=f"no known format: the nearest is {nearest}, and it lacks {lack}.*open an issue"
    ):
        detect(entries_of(text.encode(), SecretCutter({})), "given.json")


def test_a_file_without_json_says_that_it_may_be_cut() -> None:
    with pytest.raises(BadInput, match=r"cut.json holds no line of JSON: give a whole file"):
        detect(entries_of(b'{"messages": [\n{"role": ', SecretCutter({})), "cut.json")


@pytest.mark.parametrize("name", [*WRITERS, "claude-code"])
def test_no_file_has_the_marks_of_two_formats_as_a_list_or_as_lines(name: str) -> None:
    data = next(iter(stories.files_of(name, 0).values()))
    values = [entry.value for entry in entries_of(data, SecretCutter({}))]
    inner = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    for form in (values, inner, [inner]):
        claimed = [name for name, format in FORMATS.items() if any(not format.lacks(value) for value in form)]
        assert claimed in ([], [WRITERS.get(name, (name,))[0]]), form
