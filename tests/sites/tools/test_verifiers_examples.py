"""verifiers' own examples with tools run unchanged: VERIFIERS_SRC names a checkout of PrimeIntellect-ai/verifiers.

Without one, `test_a_task_whose_answer_stands_behind_a_tool_is_solved_by_asking_it` has glossary's shape.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import json
import os
import re
from pathlib import Path

import pytest
import verifiers.v1 as vf

from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import call, environment, own, says, turn_of

SOURCE = Path(os.environ.get("VERIFIERS_SRC", "/nonexistent")) / "environments"
needs_checkout = pytest.mark.skipif(not SOURCE.is_dir(), reason="VERIFIERS_SRC names no verifiers checkout")
FACTS = {"ada lovelace": "the first program", "dijkstra": "shortest paths"}


class Facts(vf.Toolset[vf.ToolsetConfig]):
    """glossary's toolset, with facts of our own."""

    TOOL_PREFIX = "facts"

    @vf.tool
    def lookup(self, name: str) -> str:
        """Look up what somebody is known for."""
        return FACTS.get(name.strip().lower(), "no entry found")


def repeats(prompt: str) -> str:
    """Looks the quoted name up, and says what came back."""
    if turn_of(prompt) == 0:
        quoted = re.search(r'look up "([^"]+)"', prompt)
        assert quoted is not None
        return call("facts_lookup", {"name": quoted[1]})
    return f"<answer>{prompt.rpartition('<tool_response>')[2].partition('</tool_response>')[0].strip()}</answer>"


def test_a_task_whose_answer_stands_behind_a_tool_is_solved_by_asking_it(play: Play) -> None:
    asked = environment(
        own(Facts),
        prompt='Use the `facts_lookup` tool to look up "Ada Lovelace", then reply with what it returns.',
        reward=lambda trace: float("the first program" in trace.last_reply),
    )
    group = play(asked, repeats, size=4)
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4
    ignorant = play(asked, says("<answer>something</answer>"), size=4)
    assert [rollout.reward for rollout in ignorant.rollouts] == [0.0] * 4


@needs_checkout
def test_glossary_is_solved_by_asking_its_tool(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCE / "glossary")
    assert json.loads((SOURCE / "glossary/glossary/servers/facts.json").read_text())
    group = play("glossary", repeats, size=8)
    assert ([rollout.reward for rollout in group.rollouts], group.failures) == ([1.0] * 8, ())


@needs_checkout
def test_a_shared_scratchpad_gives_each_rollout_its_own_word_back(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCE / "scratchpad")

    def stores(prompt: str) -> str:
        word = re.search(r'with word="(\w+)"', prompt)
        assert word is not None
        if turn_of(prompt) == 0:
            return call("scratchpad_roundtrip", {"word": word[1]})
        return prompt.rpartition("<tool_response>\n")[2].partition("\n")[0]

    async def all_at_once(player: object) -> list[float]:
        import asyncio

        groups = await asyncio.gather(*(player.play_group(0, task, 2, 7) for task in range(20)))  # type: ignore[attr-defined]
        return [rollout.reward for group in groups for rollout in group.rollouts]

    assert play("scratchpad", stores, scenario=all_at_once) == [1.0] * 40
