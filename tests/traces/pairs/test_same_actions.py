"""A hundred pairs of actions, drawn from real logs and judged before the rules were written.

    python -m tests.traces.pairs.test_same_actions

prints how many of them hold, and which don't.
"""

import json
from pathlib import Path
from typing import Any

from composer_prime.traces.pairs.actions import same_action
from composer_prime.traces.states import Message
from tests.traces.pairs.building import call, calls, says

FILE = Path(__file__).parents[1] / "same_actions.jsonl"
NUM_SAME = 29
"""Of the 52. The others ask for knowledge of one program or tool (what `sed`, `find`, `git add` or `curl` take alike,
what a tool ignores, that one tool does what another does), of what two patterns match, or that words mean the same."""


def message(said: dict[str, Any]) -> Message:
    made = [call(one["name"], one["arguments"], id=str(number)) for number, one in enumerate(said["calls"])]
    return calls(*made, content=said["text"]) if made else says(said["text"])


def judged() -> list[tuple[dict[str, Any], bool]]:
    """The pairs, and whether ours are the same."""
    found = []
    for pair in map(json.loads, FILE.read_text("utf-8").splitlines()):
        tools = [{"type": "function", "function": one} for one in pair["tools"]]
        found.append((pair, same_action(message(pair["a"]), message(pair["b"]), tools, pair["cwd"])))
    return found


def test_no_two_different_actions_are_called_the_same_and_most_that_are_the_same_are_found() -> None:
    pairs = judged()
    wrong = [pair["id"] for pair, ours in pairs if ours and not pair["same"]]
    found = sum(ours for pair, ours in pairs if pair["same"])
    print(
        f"{sum(ours == pair['same'] for pair, ours in pairs)} of {len(pairs)} hold, {found} of those that are the same"
    )
    assert len(pairs) == 100 and not wrong and found >= NUM_SAME


if __name__ == "__main__":
    test_no_two_different_actions_are_called_the_same_and_most_that_are_the_same_are_found()
    for pair, ours in judged():
        if ours != pair["same"]:
            print(f"{pair['id']:>3} {pair['kind']}: {pair['why']}")
