"""What the calls of a rollout's last turn answered is in its trace, though the policy never saw it."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import answers, call, says


def test_a_rollout_that_ends_on_a_failed_call_shows_its_error(play: Play) -> None:
    policy = says(call("look", {"box": "a"}) + "\n" + call("open", {"box": "nope"}), "never said")
    (rollout,) = play("tool-letters", policy, agent={"max_turns": 1}).rollouts
    unknown, refused = answers(rollout)
    assert unknown == "error: unknown tool 'look'" and '"error": "no box nope"' in refused
    assert (rollout.turns, rollout.streams["tools/errors"]) == (1, 2.0)
    (longer,) = play("tool-letters", policy, agent={"max_turns": 2}).rollouts
    assert [message.role for message in longer.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    prompt_and_call = rollout.branches[0].token_ids
    assert longer.branches[0].token_ids[: len(prompt_and_call)] == prompt_and_call, "the answers have no tokens"


def test_answers_that_the_policy_saw_are_in_the_trace_once(play: Play) -> None:
    policy = says(call("open", {"box": "nope"}), call("open", {"box": "nope"}), "never said")
    (rollout,) = play("tool-letters", policy, agent={"max_turns": 2}).rollouts
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant", "tool"]
