"""`composer-prime replay ingest` and `replay export`: what they print, and what they refuse."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from composer_prime.cli.main import app
from composer_prime.errors import BadInput
from composer_prime.traces.ingest.store import TraceStore
from tests.traces.ingest.claude_session import write
from tests.traces.ingest.stories import WRITERS, files_of
from tests.traces.ingest.test_store import put


def command(*arguments: object) -> Result:
    wide = {"COLUMNS": "200"}
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env=wide, catch_exceptions=False)


def test_a_folder_of_all_formats_goes_in_with_a_row_a_file_and_sums(tmp_path: Path) -> None:
    logs, count = tmp_path / "logs", len(WRITERS) + 1
    for name in WRITERS:
        put(logs, name)
    write(logs / "claude")
    (logs / "notes.json").write_text('{"what": "ever"}')
    shown = command("ingest", logs, "--to", tmp_path / "store").output
    assert all(name in shown for name in {format for format, _ in WRITERS.values()} | {"claude-code"})
    assert f"all {count}" in shown and "1 duplicate uuid" in shown and "1 Anthropic key" in shown
    assert f"{count} of {count} sessions added" in shown
    assert "passed over: " in shown and shown.count("notes.json") == 1
    assert "the nearest is openai-chat" in shown.replace("\n", " ")
    assert len(TraceStore(tmp_path / "store").ids()) == count
    assert f"0 of {count} sessions added" in command("ingest", logs, "--to", tmp_path / "store").output


def test_a_dry_run_writes_nothing_and_says_what_would_be_added(tmp_path: Path) -> None:
    path = put(tmp_path, "codex")
    assert "1 of 1 sessions would be added" in command("ingest", path, "--to", tmp_path / "store", "--dry-run").output
    assert not (tmp_path / "store").exists()
    command("ingest", path, "--to", tmp_path / "store")
    before = (tmp_path / "store" / "index.json").read_bytes()
    other = put(tmp_path, "atif")
    again = command("ingest", path, other, "--to", tmp_path / "store", "--dry-run").output
    assert "1 of 2 sessions would be added" in again
    assert (tmp_path / "store" / "index.json").read_bytes() == before
    assert len(TraceStore(tmp_path / "store").ids()) == 1


def test_an_unknown_file_that_is_named_is_refused_and_what_came_before_it_stays(tmp_path: Path) -> None:
    good, bad = put(tmp_path, "codex"), tmp_path / "bad.json"
    bad.write_text('{"schema_version": "ATIF-v3.1", "steps": []}')
    with pytest.raises(BadInput, match=r"the nearest is atif, and it lacks schema_version ATIF-v1.0 to ATIF-v1.8"):
        command("ingest", good, bad, "--to", tmp_path / "store")
    assert len(json.loads((tmp_path / "store" / "index.json").read_bytes())["sessions"]) == 1


def test_a_path_where_nothing_is_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone\.jsonl isn't there: give files, or folders that hold some"):
        command("ingest", put(tmp_path, "codex"), tmp_path / "gone.jsonl", "--to", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_sessions_without_tools_or_without_a_decision_point_are_said(tmp_path: Path) -> None:
    only_text = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    (tmp_path / "text.json").write_text(json.dumps(only_text))
    (tmp_path / "asked.json").write_text(json.dumps(only_text[:1]))
    shown = command("ingest", tmp_path / "text.json", tmp_path / "asked.json", "--to", tmp_path / "store").output
    assert "text.json: 1 of 1 sessions have no tools: their actions are text" in shown
    assert "not used: 1 session without a decision point" in shown
    assert "asked.json: no decision point of a model: nothing is stored" in shown
    assert len(TraceStore(tmp_path / "store").ids()) == 1


def test_a_file_that_two_formats_claim_is_an_error_and_its_format_can_be_given(tmp_path: Path) -> None:
    chat, codex = (files_of(name, 0)["s.json"] for name in ("openai-chat", "codex"))
    (tmp_path / "both.jsonl").write_bytes(chat + codex)
    with pytest.raises(BadInput, match=r"both.jsonl has the marks of openai-chat and of codex: say which by --format"):
        command("ingest", tmp_path / "both.jsonl", "--to", tmp_path / "neither")
    for format in ("openai-chat", "codex"):
        command("ingest", tmp_path / "both.jsonl", "--to", tmp_path / format, "--format", format)
        (session,) = TraceStore(tmp_path / format).sessions()
        assert session.format == format and len(list(session.states())) == 6


def test_a_format_that_is_not_known_is_refused_also_for_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "logs", "codex")
    with pytest.raises(BadInput, match=r"format 'csv' isn't known: give one of openai-chat, .*atif"):
        command("ingest", tmp_path / "logs", "--to", tmp_path / "store", "--format", "csv")


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_folder_of_which_nothing_is_read_ends_in_an_error(tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "notes.json").write_text('{"result": 1}')
    with pytest.raises(BadInput, match="nothing was read: none of 1 files is a log of a known format"):
        command("ingest", tmp_path, "--to", tmp_path / "store", *option)


TOOLS = [
    {"name": name, "description": "does it", "input_schema": {"type": "object", "properties": {"command": {}}}}
    for name in ("run", "edit", "ask")
]


def test_tools_can_be_given_where_logs_lack_them_and_are_part_of_the_question(tmp_path: Path) -> None:
    path, store = put(tmp_path, "codex"), tmp_path / "store"
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "system.txt").write_text("Be careful.")
    command("ingest", path, "--to", store)
    (bare,) = TraceStore(store).sessions()
    command("ingest", path, "--to", store, "--tools", tmp_path / "tools.json", "--system", tmp_path / "system.txt")
    command("ingest", path, "--to", store)  # takes nothing away
    (session,) = TraceStore(store).sessions()
    assert session.id == bare.id and session.nodes == bare.nodes
    for before, state in zip(bare.states(), session.states(), strict=True):
        assert [tool["function"]["name"] for tool in state.tools] == ["run", "edit", "ask"] and state.has_tools
        assert state.messages == before.messages, "the log has a system message of its own"
        assert state.question != before.question


def test_a_system_message_that_is_given_stands_first_where_the_log_has_none(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be careful.")
    (tmp_path / "chat.json").write_text(
        json.dumps([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])
    )
    command("ingest", tmp_path / "chat.json", "--to", tmp_path / "store", "--system", tmp_path / "system.txt")
    (state,) = TraceStore(tmp_path / "store").states()
    assert [message["content"] for message in state.messages] == ["Be careful.", "Q"]


def test_tools_that_do_not_fit_the_session_or_are_none_are_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    path = put(tmp_path, "codex")
    (tmp_path / "few.json").write_text(json.dumps(TOOLS[:1]))
    with pytest.raises(BadInput, match="session c1 calls edit, which --tools doesn't list: add them to the file"):
        command("ingest", path, "--to", tmp_path / "store", "--tools", tmp_path / "few.json")
    assert TraceStore(tmp_path / "store").ids() == []
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(BadInput, match=r"--tools \(.*none.json\) lists no tool: give a JSON list"):
        command("ingest", path, "--to", tmp_path / "other", "--tools", tmp_path / "none.json")
    assert not (tmp_path / "other").exists()


def test_json_says_of_each_file_what_it_holds_and_what_was_left_out(tmp_path: Path) -> None:
    told = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "audio"}, {"type": "text", "text": "A"}]},
        {"role": "assistant", "content": "B"},
        {"role": "narrator", "content": "C"},
    ]
    (tmp_path / "chat.json").write_text(json.dumps(told))
    (tmp_path / "notes.json").write_text("[1]")
    shown = command("ingest", tmp_path, "--to", tmp_path / "store", "--json").stdout
    chat, notes = map(json.loads, shown.splitlines())
    expected = {"format": "openai-chat", "decision_points": 2, "usable": 1, "records": 4, "used": 3}
    assert expected.items() <= chat.items() and chat["file"] == str(tmp_path / "chat.json")
    assert chat["left_out"] == {"a part of the action isn't text": 1}
    assert chat["dropped"] == {"message of no known role": 1}
    assert notes["format"] is None and "passed over" in notes["remarks"][0]


def test_a_store_is_exported(tmp_path: Path) -> None:
    command("ingest", write(tmp_path / "logs"), "--to", tmp_path / "store")
    for kind in ("original", "atif"):
        shown = command("export", tmp_path / "store", "--to", tmp_path / kind, "--as", kind).output
        num_files = sum(path.is_file() for path in (tmp_path / kind).rglob("*"))
        assert f"wrote {num_files} files to {tmp_path / kind}" in shown and num_files
