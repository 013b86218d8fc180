"""Conversations with tools: what is said, what is trained on, what calls answer, and what ends them."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

from typing import Any

import pytest
import verifiers.v1 as vf
from starlette.exceptions import HTTPException

from composer_prime.sites.embedded.tools.listing import read_text
from tests.servers.fake_inference import END_OF_TURN, LOGPROB
from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import Reply, answers, call, environment, own, says, turn_of
from tiny_policy.qwen3 import tiny_tokenizer
from tool_letters import ToolLettersConfig, draw_boxes

BOX, LETTER, ANSWER = draw_boxes(ToolLettersConfig(id="tool-letters", num_examples=1))[0]
LETTERS = {"num_examples": 1}
SPEAKS = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def answered(text: str) -> str:
    """A tool's answer, and the policy's next turn begun, as they are rendered after a turn."""
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n{SPEAKS}"


def listed(name: str, description: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"title": argument.title(), "type": "string"}}
    schema = {"properties": properties, "required": [argument], "title": f"{name}Arguments", "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def test_what_is_trained_on_is_what_was_sampled_and_nothing_is_rendered_twice(play: Play) -> None:
    # no renderer would write the calls like this
    sampled = (
        f'<tool_call>{{"name":"open",   "arguments": {{"box":"{BOX}"}}}}</tool_call>',
        f'well\n<tool_call>\n\n{{"arguments": {{"letter": "{LETTER}"}}, "name": "code"}}\n</tool_call>',
        ANSWER,
    )
    group = play("tool-letters", says(*sampled), size=3, taskset=LETTERS)
    tokenizer = tiny_tokenizer()
    tools = [
        listed("code", "Code of a letter.", "letter"),
        listed("open", "Letter in a box.", "box"),
        listed("unlock", "Unlock a box.", "box"),
    ]
    asked: Any = [{"role": "user", "content": f"Code in box {BOX}"}]
    opening = tokenizer.apply_chat_template(
        asked, tools=tools, add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    token_ids: list[int] = []
    mask: list[bool] = []
    for rendered, text in zip((opening, answered(LETTER), answered(ANSWER)), sampled, strict=True):
        before, said = tokenizer.encode(rendered), [*tokenizer.encode(text), END_OF_TURN]
        token_ids += before + said
        mask += [False] * len(before) + [True] * len(said)
    assert group.failures == ()
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert (branch.token_ids, branch.mask) == (token_ids, mask)
        assert branch.logprobs == [LOGPROB if is_sampled else 0.0 for is_sampled in mask]
        assert rollout.reward == 1.0


def test_a_conversation_can_be_read_with_its_calls_and_answers(play: Play) -> None:
    calls = call("open", {"box": BOX}), call("code", {"letter": LETTER})
    (rollout,) = play("tool-letters", says(*calls, ANSWER), taskset=LETTERS).rollouts
    assert [(message.role, message.text, message.calls) for message in rollout.messages] == [
        ("user", f"Code in box {BOX}", ()),
        ("assistant", "", (f'open({{"box": "{BOX}"}})',)),
        ("tool", LETTER, ()),
        ("assistant", "", (f'code({{"letter": "{LETTER}"}})',)),
        ("tool", ANSWER, ()),
        ("assistant", ANSWER, ()),
    ]
    assert rollout.turns == 3
    assert rollout.streams["tools/calls"] == 2.0
    assert "tools/errors" not in rollout.streams


class Shelf(vf.Toolset[vf.ToolsetConfig]):
    """Things put upon each other."""

    async def setup(self) -> None:
        self.things: list[str] = []

    @vf.tool
    def put(self, thing: str) -> str:
        """Put a thing on the shelf."""
        self.things.append(thing)
        return " ".join(self.things)


def test_calls_of_one_turn_are_answered_in_order_each_under_its_id(play: Play) -> None:
    seen: list[Any] = []

    def reward(trace: vf.Trace) -> float:
        seen.extend(trace.branches[-1].messages)
        return 1.0

    both = call("shelf_put", {"thing": "first"}) + "\n" + call("shelf_put", {"thing": "second"})
    (rollout,) = play(environment(own(Shelf), reward=reward), says(both, "done")).rollouts
    assert answers(rollout) == ["first", "first second"]
    assert rollout.streams["tools/calls"] == 2.0
    asked = [made.id for message in seen if message.role == "assistant" for made in message.tool_calls or ()]
    assert len(set(asked)) == 2
    assert [message.tool_call_id for message in seen if message.role == "tool"] == asked


class Bookshelf(vf.Toolset[vf.ToolsetConfig]):
    """Answers as long as one likes."""

    TOOL_PREFIX = None

    @vf.tool
    def read(self, size: int) -> str:
        """Read from the first page to the last."""
        return "first" + "ö" * size + "last"


def test_of_an_answer_of_megabytes_the_policy_reads_head_and_tail_and_goes_on(play: Play) -> None:
    group = play(environment(own(Bookshelf)), says(call("read", {"size": 3_000_000}), "done"))
    assert group.failures == ()
    ((branch,),) = (rollout.branches for rollout in group.rollouts)
    conversation = tiny_tokenizer().decode(branch.token_ids)
    answer = conversation.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
    assert answer.startswith("Warning: 6000009 bytes, of which the middle is left out\n\nfirstöö")
    assert "öö\n[...]\nöö" in answer and answer.endswith("öölast")
    assert 19_900 < len(answer.encode()) < 20_200
    assert conversation.endswith("done<|im_end|>")


def test_a_long_answer_is_not_cut_within_a_word_which_may_be_a_secret() -> None:
    words = "sk_live_51WalkQ7zXcVbNm " * 2000
    head, tail = read_text(words, "dump").split("\n[...]\n")
    assert {*head.split("\n\n")[1].split(), *tail.split()} == {"sk_live_51WalkQ7zXcVbNm"}


OURS = "prompt (600 tokens) must be shorter than the context (512): shorten it"
RENDERERS = "Prompt length (600) exceeds maximum context length (512)."
VLLM = "This model's maximum context length is 512 tokens. However, your request has 600 input tokens."


def refuses(turn: int, words: str) -> Reply:
    """A policy that calls a tool until a turn, at which its server refuses the prompt in these words."""

    def reply(prompt: str) -> str:
        if turn_of(prompt) >= turn:
            raise HTTPException(400, words)
        return call("read", {"size": 1})

    return reply


@pytest.mark.parametrize("words", [OURS, RENDERERS, VLLM])
def test_a_conversation_that_tools_have_filled_ends_well_and_is_rewarded(play: Play, words: str) -> None:
    group = play(environment(own(Bookshelf)), refuses(2, words))
    assert group.failures == ()
    (rollout,) = group.rollouts
    assert (rollout.reward, rollout.turns) == (1.0, 2)
    assert answers(rollout) == ["firstölast"] * 2
    (branch,) = rollout.branches
    assert branch.mask[-1]  # the last answer never came before the policy


@pytest.mark.parametrize(("turn", "words"), [(0, OURS), (0, VLLM), (2, "max_tokens must be at least 1")])
def test_any_other_refusal_fails_the_rollout_in_the_servers_words(play: Play, turn: int, words: str) -> None:
    group = play(environment(own(Bookshelf)), refuses(turn, words))
    assert group.rollouts == ()
    (failure,) = group.failures
    assert words in failure


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_turns": 3}, {"max_total_tokens": 2000}])
def test_a_rollout_ends_at_the_recipes_limit_and_is_rewarded_as_it_stands(play: Play, limit: dict[str, int]) -> None:
    tokens_before: list[int] = []

    def reply(prompt: str) -> str:
        tokens_before.append(len(tiny_tokenizer().encode(prompt)))
        return call("shelf_put", {"thing": "x"})

    endless = environment(own(Shelf), reward=lambda trace: 10.0 + trace.num_turns)
    group = play(endless, reply, agent=limit)
    assert group.failures == ()
    (rollout,) = group.rollouts
    assert rollout.reward == 10.0 + rollout.turns == 10.0 + len(tokens_before)
    if "max_turns" in limit:
        assert rollout.turns == limit["max_turns"]
    else:
        (branch,) = rollout.branches
        assert tokens_before[-1] < 2000 <= len(branch.token_ids)
        assert rollout.turns > 1
