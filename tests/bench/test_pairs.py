"""The bench of pairs: its teachers know what they are said to know; its control takes from pairs what they teach."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verifiers.v1.mcp import ToolsetConfig

from composer_prime.sites.embedded.tools.in_process import ToolsetThread
from composer_prime.traces.pairs.file import Decision
from tests.bench.pairs import TOOLS, chats, knows, opens, shuffled
from tool_letters import BoxState, BoxTools, ToolLettersData

TURNS = 6


@pytest.mark.parametrize(("says", "locks", "is_solved"), [(knows, 2, True), (opens, 2, False), (opens, 0, True)])
def test_who_knows_locks_opens_what_the_others_cant(says: Callable[..., Any], locks: int, is_solved: bool) -> None:
    async def play() -> str | None:
        fields = {"box": "a", "letter": "b", "answer": "c", "locks": locks}
        thread = ToolsetThread([BoxTools(ToolsetConfig())], ToolLettersData.model_validate(fields))  # type: ignore[arg-type]
        specs = {spec.name: spec for spec in await thread.open()}
        assert [spec.to_wire() for spec in specs.values()] == TOOLS
        messages: list[Any] = [{"role": "user", "content": "Code in box a"}]
        trace: Any = SimpleNamespace(state=BoxState())
        try:
            for _ in range(TURNS):
                messages.append(said := says({"messages": messages}))
                if "tool_calls" not in said:
                    return said["content"]
                made = said["tool_calls"][0]["function"]
                answer = await thread.call(specs[made["name"]], json.loads(made["arguments"]), 60.0, trace)
                messages.append({"role": "tool", "tool_call_id": "1", "content": answer})
        finally:
            await thread.close()
        return None

    assert (asyncio.run(play()) == "c") is is_solved


def test_a_sites_conversations_become_chats_with_their_calls(tmp_path: Path) -> None:
    shown = [("user", "Code in box a", []), ("assistant", "", ['open({"box": "a"})']), ("tool", "b", [])]
    messages = [{"role": role, "text": text, "calls": calls} for role, text, calls in shown]
    (tmp_path / "conversations.jsonl").write_text(json.dumps({"reward": 0.5, "messages": messages}) + "\n")
    (chat,) = chats(tmp_path / "conversations.jsonl")
    (made,) = chat["messages"][1]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("open", {"box": "a"})
    assert chat["messages"][2] == {"role": "tool", "tool_call_id": made["id"], "content": "b"}
    assert (chat["reward"], chat["tools"]) == (0.5, TOOLS)


def test_shuffled_decisions_agree_on_what_the_agent_did_elsewhere() -> None:
    did = {str(number): {"role": "assistant", "content": f"did {number % 10}"} for number in range(20)}
    shared: dict[str, Any] = {"session": "s", "score": 0.0, "supported": 0.0, "support": 1.0, "teachers": {}}
    told = [{"role": "assistant", "content": f"agreed {number}"} for number in range(20)]
    decisions = [Decision(turn=number, state=str(number), chosen=told[number], **shared) for number in range(20)]
    mixed = shuffled(decisions, did)
    assert [one.state for one in mixed] == [one.state for one in decisions]
    assert all(one.chosen in did.values() and one.chosen != did[one.state] for one in mixed)
    assert len({str(one.chosen) for one in mixed}) > 5
