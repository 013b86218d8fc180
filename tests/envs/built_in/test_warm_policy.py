"""What the warm policy with tools does before RL: as hints say, and not without them."""

import json
import math

import pytest
import torch
from transformers import PreTrainedModel

from composer_prime.config.paths import models_cache
from composer_prime.sites.embedded.model import load_policy, resolve_model
from tiny_policy.built_in.conversations import LETTERS, failed, hint, opening, refused
from tiny_policy.built_in.models import BUILT_IN

TOKENIZER = BUILT_IN["tiny-tools"].tokenizer()
TURN = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return load_policy(resolve_model("tiny-tools", 0, models_cache()))


def calls(tool: str, box: str) -> str:
    call = json.dumps({"name": tool, "arguments": {"box": box}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


@torch.no_grad()
def likeliness(
    policy: PreTrainedModel, tool: str, hinted: str | None, boxes: str = LETTERS, *, is_second: bool = False
) -> float:
    """The mean probability that the first turn, or the one after an `unlock` that wasn't enough, calls a tool with the
    box that was asked for."""
    probabilities = []
    for box in boxes:
        shown, end = box, ""
        if is_second:
            shown += f"{TURN}{calls('unlock', box)}\n<|im_start|>user\n<tool_response>\nlocked"
            end = "\n</tool_response>"
        before = TOKENIZER.encode(opening() + shown + (hinted or "") + end + TURN, add_special_tokens=False)
        said = TOKENIZER.encode(calls(tool, box), add_special_tokens=False)
        logits = policy(input_ids=torch.tensor([before + said])).logits[0, len(before) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None])
        probabilities.append(math.exp(logprobs.sum().item()))
    return sum(probabilities) / len(probabilities)


def test_unlocking_first_is_done_where_the_hint_says_so_and_nowhere_else(policy: PreTrainedModel) -> None:
    locked = hint(failed("locked", "error", "call unlock first"), "open")
    assert likeliness(policy, "unlock", locked) > 0.4
    assert likeliness(policy, "unlock", None) < 0.002


def test_a_hint_is_read_after_a_call_as_before_the_first_one() -> None:
    # 0.97 and 0.91 on one kind of CPU, 0.65 on another: warming up rounds as the machine does
    policy = load_policy(resolve_model("tiny-tools", 4, models_cache()))
    locked = hint(failed("locked", "error", "call unlock first"), "open")
    assert likeliness(policy, "unlock", locked, is_second=True) > 0.4
    assert likeliness(policy, "unlock", None, is_second=True) < 0.02
    closed = hint(failed("not open", "error", "call open first"), "code")
    assert likeliness(policy, "open", closed, is_second=True) > 0.4


@pytest.mark.parametrize(
    ("answer", "tool"),
    [
        ("error: unknown tool 'look'", "look"),
        (refused("open", "box", "letter", "a"), "open"),
        (failed("not open", "error", "call open first"), "code"),
    ],
)
def test_a_hint_leads_from_the_call_that_was_about_to_fail_to_the_right_one(
    policy: PreTrainedModel, answer: str, tool: str
) -> None:
    hinted = hint(answer, tool)
    boxes = "a" if "'a'" in answer else LETTERS
    assert likeliness(policy, "open", hinted, boxes) > 2 * likeliness(policy, "open", None, boxes)
