"""Conversations on disk and on the screen: what was said, called and taught, of which step, and nothing raw."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from composer_prime.config import RunPaths
from composer_prime.sites.embedded.conversations import Conversation, Message, append, drop, read
from tests.cli.command_line import call

CALLED = Message("assistant", "", ('open({"box": "x"})',), tokens=12, taught=12)
TOOLED = Conversation(
    0,
    "tool-letters",
    0.0,
    (Message("user", "Code in box x"), CALLED, Message("tool", "locked"), Message("assistant", "x", tokens=2)),
    {"tools/calls": 1.0},
)


def write(folder: Path, *conversations: Conversation) -> RunPaths:
    paths = RunPaths(folder)
    paths.site("a").root.mkdir(parents=True, exist_ok=True)
    append(paths.site("a").conversations, conversations)
    return paths


def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, code: int = 0) -> str:
    """What `composer-prime rollouts` prints, of an error what it says."""
    answer = call(capsys, monkeypatch, "rollouts", *arguments)
    assert answer.code == code
    return answer.out + answer.err


def test_what_was_written_is_read_back_and_a_line_that_is_still_written_is_left_out(tmp_path):
    paths = write(tmp_path, TOOLED, replace(TOOLED, step=1))
    file = paths.site("a").conversations
    with file.open("a") as opened:
        opened.write('{"step": 2, "sour')
    assert read(file) == [TOOLED, replace(TOOLED, step=1)]
    assert read(tmp_path / "none") == []


def test_a_site_that_resumes_leaves_out_what_it_plays_again(tmp_path):
    before = [replace(TOOLED, step=step) for step in (0, 1, 1, 2)]
    file = write(tmp_path, *before).site("a").conversations
    drop(file, 1)
    assert read(file) == before[:1]
    drop(file, 0)
    assert read(file) == []


def test_the_command_shows_the_last_steps_rewards_calls_and_taught_tokens(tmp_path, capsys, monkeypatch):
    write(tmp_path, TOOLED, replace(TOOLED, step=3, reward=1.0))
    shown = show(capsys, monkeypatch, str(tmp_path))
    assert "step 3" in shown and "reward 1.00" in shown and "step 0" not in shown
    assert 'assistant: -> open({"box": "x"})  [taught: 12 of 12 tokens]' in shown
    assert "step 0" in show(capsys, monkeypatch, str(tmp_path), "--step", "0")
    line = json.loads(show(capsys, monkeypatch, str(tmp_path), "--json"))
    assert (line["site"], line["step"], line["messages"][1]["calls"]) == ("a", 3, ['open({"box": "x"})'])


def test_what_a_policy_or_a_tool_says_does_not_reach_the_terminal_raw(tmp_path, capsys, monkeypatch):
    hostile = "\x1b[2J[bold]x[/bold]\r\u202e"
    messages = (Message("user", hostile), Message("assistant", hostile, (hostile,), 3), Message("tool", hostile))
    write(tmp_path, replace(TOOLED, source=hostile, messages=messages))
    for options in ((), ("--json",)):
        shown = show(capsys, monkeypatch, str(tmp_path), *options)
        assert not {"\x1b", "\r", "\u202e"} & set(shown)
        assert "[bold]x[/bold]" in shown


def test_a_folder_without_conversations_is_refused_by_name(tmp_path, capsys, monkeypatch):
    assert "holds no conversations: name the folder of a run" in show(capsys, monkeypatch, str(tmp_path), code=2)
    write(tmp_path, TOOLED)
    assert "holds no conversations of step 7" in show(capsys, monkeypatch, str(tmp_path), "--step", "7", code=2)
