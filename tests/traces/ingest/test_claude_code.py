"""Claude Code's files: one call over several lines, trees, replays after compaction, and what is dropped."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.ingest.session import Session
from composer_prime.traces.states import TraceState, calls_of
from tests.traces.ingest.claude_session import MODEL, claude_session, write


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Session:
    (session,) = read_file(write(tmp_path_factory.mktemp("long")))[1].sessions
    return session


def states_of(session: Session) -> dict[str, TraceState]:
    return {state.action["content"]: state for state in session.states()}


def contents(state: TraceState) -> list[str]:
    return [message["content"] for message in state.messages]


def test_a_long_session_gives_the_turns_that_were_taken_and_counts_what_it_drops(tmp_path: Path) -> None:
    expected = claude_session()
    format, reading, _ = read_file(write(tmp_path))
    (session,) = reading.sessions
    taken = [(s.action["content"], [call["function"]["name"] for call in calls_of(s.action)]) for s in session.states()]
    assert format == "claude-code" and len(taken) == 200 and taken == expected.turns
    assert reading.dropped == expected.dropped and reading.num_records == expected.num_records
    assert {state.author for state in session.states()} == {MODEL}


def test_the_lines_of_one_call_are_one_node_with_its_last_usage(long: Session) -> None:
    step = next(node for node in long.nodes if node.message["content"] == "Step 0: Read module_0.py.")
    assert len(step.records) == 3 and step.usage is not None and step.usage["output_tokens"] == 41
    assert step.message["reasoning_content"] == "Next: Step 0: Read module_0.py."


def test_of_growing_prefixes_the_longest_stays_with_all_its_lines(long: Session) -> None:
    longest = [node for node in long.nodes if "so many words" in node.message["content"]]
    assert [len(node.records) for node in longest] == [3, 3]
    assert all(node.usage == {"input_tokens": 5, "output_tokens": len(node.message["content"])} for node in longest)


def test_a_rewound_try_is_a_branch_and_no_later_call_sees_it(long: Session) -> None:
    tried = states_of(long)["Using sed."]
    assert contents(tried)[-1] == "Try it with sed."
    later = [state for state in long.states() if "No: with the editor." in contents(state)]
    assert later and all("Try it with sed." not in contents(state) for state in later)
    assert later[0].parent == tried.parent


def test_a_line_that_is_no_message_links_what_is_around_it(long: Session) -> None:
    (number,) = [n for n, node in enumerate(long.nodes) if node.message.get("content") == "made"]
    node = long.nodes[number]
    assert (len(node.records), len(node.links)) == (1, 1) and node.parent is not None
    assert long.nodes[node.parent].message["content"] == "Running in the background."


def test_subagents_and_sidechains_are_trees_of_their_own(long: Session) -> None:
    states = states_of(long)
    assert contents(states["There are many."]) == ["Count the modules."]
    assert contents(states["Searching."]) == ["Find the callers of module 3."]
    assert contents(states["Two callers."]) == ["Find the callers of module 3.", "Searching.", "ok"]


def test_results_of_parallel_calls_are_all_seen_before_the_next_call(long: Session) -> None:
    parallel = next(n for n, node in enumerate(long.nodes) if len(calls_of(node.message)) == 2)
    later = next(state for state in long.states() if state.messages[-3:-2] == (shown(long, parallel),))
    assert [message["role"] for message in later.messages[-2:]] == ["tool", "tool"]
    assert [message["tool_call_id"] for message in later.messages[-2:]] == [
        call["id"] for call in calls_of(long.nodes[parallel].message)
    ]


def test_a_line_that_names_the_first_of_two_results_sees_both(tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": id, "name": "Read", "input": {}} for id in "xy"]
    answers = [[{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"}] for id in "xy"]
    for named in ("2", "3", "4"):
        path = tmp_path / f"{named}.jsonl"
        path.write_bytes(
            line("1", None, "user", "Q")
            + line("2", "1", "assistant", calls)
            + line("3", "2", "user", answers[0])
            + line("4", "2", "user", answers[1])
            + line("5", named, "assistant", "A")
        )
        *_, last = read_file(path)[1].sessions[0].states()
        assert contents(last) == ["Q", "", "of x", "of y"]


def shown(session: Session, number: int) -> Mapping[str, Any]:
    return {name: value for name, value in session.nodes[number].message.items() if name != "reasoning_content"}


def test_after_compaction_a_call_sees_the_summary_and_its_replays_are_copies(long: Session) -> None:
    summary = "Summary: modules are being repaired."
    after = [state for state in long.states() if summary in contents(state)]
    assert after and all(contents(state)[:2] == [summary, "Before compaction."] for state in after)
    copies = [node for node in long.nodes if node.is_copied]
    assert [node.message["content"] for node in copies] == ["Before compaction."]
    assert len([state for state in long.states() if state.action["content"] == "Before compaction."]) == 1


def test_a_synthetic_message_and_an_api_error_give_no_state(long: Session) -> None:
    assert sum(node.is_synthetic for node in long.nodes) == 1
    assert "No response requested." not in states_of(long)
    assert not any("529" in node.message["content"] for node in long.nodes)


def test_an_image_and_a_lone_surrogate_become_marks(tmp_path: Path, long: Session) -> None:
    assert any(node.message["content"] == "[image]" for node in long.nodes)
    path = tmp_path / "s.jsonl"
    path.write_bytes(line("u", None, "user", "a \ud800") + line("a", "u", "assistant", "b"))
    (session,) = read_file(path)[1].sessions
    assert session.nodes[0].message["content"] == "a \ufffd" and r"\ud800" in session.original[0].text


def line(uuid: str, parent: str | None, kind: str, content: Any, **fields: Any) -> bytes:
    message = {"role": kind, "content": content, **({"id": f"m-{uuid}", "model": MODEL} if kind == "assistant" else {})}
    data = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message}
    return json.dumps({**data, **fields}).encode() + b"\n"


def test_a_line_whose_parent_is_lost_follows_its_own_agents_message_before(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        line("1", None, "user", "Q")
        + line("2", None, "user", "side", isSidechain=True)
        + line("4", "3-is-lost", "assistant", "A")
        + line("5", "5", "assistant", "its own parent")
    )
    (session,) = read_file(path)[1].sessions
    first, second = session.states()
    assert contents(first) == ["Q"] and contents(second) == ["Q", "A"]


def test_null_usage_after_a_kill_keeps_the_last_that_there_was(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    lines = [line("1", None, "user", "Q")]
    for number, usage in enumerate([{"output_tokens": 1}, {"output_tokens": 9}, None]):
        block = [{"type": "text", "text": f"part {number}"}]
        message = {"id": "m", "role": "assistant", "content": block, "usage": usage}
        lines.append(line(f"a{number}", "1" if number == 0 else f"a{number - 1}", "assistant", "", message=message))
    path.write_bytes(b"".join(lines))
    (session,) = read_file(path)[1].sessions
    assert session.nodes[1].usage == {"output_tokens": 9}
    assert session.nodes[1].message["content"] == "part 0\npart 1\npart 2"


def test_lines_in_any_order_tell_the_same(tmp_path: Path) -> None:
    lines = [line("0", None, "user", "Q")]
    for turn in range(1, 20, 2):
        call = {"type": "tool_use", "id": f"t{turn}", "name": "Read", "input": {"n": turn}}
        answer = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"of {turn}"}
        lines.append(line(str(turn), str(turn - 1), "assistant", [call]))
        lines.append(line(str(turn + 1), str(turn), "user", [answer]))
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(lines))
    told = [contents(state) for state in read_file(path)[1].sessions[0].states()]
    assert len(told) == 10
    for seed in range(20):
        path.write_bytes(b"".join(random.Random(seed).sample(lines, len(lines))))
        (session,) = read_file(path)[1].sessions
        assert [contents(state) for state in session.states()] == told, seed


def attachment(uuid: str, parent: str, **attached: Any) -> bytes:
    data = {"type": "attachment", "uuid": uuid, "parentUuid": parent, "sessionId": "s", "attachment": attached}
    return json.dumps(data).encode() + b"\n"


def test_attachments_are_shown_where_they_stand_and_those_without_a_text_are_counted(tmp_path: Path) -> None:
    calls = [{"type": "tool_use", "id": id, "name": "Bash", "input": {}} for id in "xy"]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in "xy"]
    path = tmp_path / "s.jsonl"
    path.write_bytes(
        line("1", None, "user", "Q @notes.md")
        + attachment(
            "2", "1", type="file", filename="notes.md", content={"type": "text", "file": {"content": "Be brief."}}
        )
        + line("3", "2", "assistant", calls[:1])
        + attachment("4", "3", type="hook_success", hookName="h", stdout="{}", content="")
        + line("5", "4", "assistant", calls[1:], message={"id": "m-3", "role": "assistant", "content": calls[1:]})
        + attachment("6", "3", type="hook_additional_context", content=["Mind the lint."])
        + line("7", "3", "user", answers[:1])
        + line("8", "5", "user", answers[1:])
        + attachment("9", "8", type="queued_command", prompt="Stop after this.", commandMode="prompt")
        + line("10", "9", "assistant", "A")
    )
    reading = read_file(path)[1]
    first, last = reading.sessions[0].states()
    assert [text.split("\n")[-2:] for text in contents(first)] == [["Q @notes.md"], ["Be brief.", "</system-reminder>"]]
    assert contents(last)[2:5] == ["", "of x", "of y"]
    assert "Mind the lint." in contents(last)[5] and contents(last)[6] == "Stop after this."
    assert reading.dropped == {"attachment without a text": 1}
