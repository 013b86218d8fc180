"""What the models that use tools have seen before RL: conversations about boxes, most of them with a mistake.

They look as envs/tool_letters and the qwen3 renderer write them (a test compares). Every call is well formed; which
tool comes next, and with what, is right about every other time. A hint is nearly always heeded, as by a larger model:
what it says is known, and isn't done without it.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from composer_prime.hints.answers import find_error, find_hint
from composer_prime.hints.contexts import TEMPLATES, hint_text
from composer_prime.hints.error_sites import ErrorSite
from tiny_policy.qwen3 import QUIET, TOOLS_FOOTER, TOOLS_HEADER

LETTERS = "abcdefghij"
MAX_TURNS = 5
LOCKED, TWICE = 0.5, 0.5
"""Share of the boxes that must be unlocked, and of these the share that must be unlocked twice."""
HINTED, HEEDED = 0.45, 0.98
"""Share of turns before which hint distillation's own hint for a call that fails stands, and of those that heed it."""
GIVEN = 0.3
"""Share of the locked boxes that are unlocked first by nobody: what follows is shown, and to begin so isn't."""

COPIED = 4.0
"""Weight of a call's tool and of a value that is copied, where other tokens have 1: these take longest to learn."""
_VALUE = "@"

TOOLS = (
    ("code", "Code of a letter.", "letter"),
    ("open", "Letter in a box.", "box"),
    ("unlock", "Unlock a box.", "box"),
)
"""Name, description and argument of each tool, in the order of the names."""


@dataclass(frozen=True)
class Act:
    """One turn: a call of `tool` with `argument`, or without a tool a reply; `value` is filled in as `_value` says."""

    value: str
    tool: str | None = None
    argument: str = ""


OPEN, CODE = Act("name", "open", "box"), Act("letter", "code", "letter")
UNLOCK, REPLY = Act("name", "unlock", "box"), Act("code")

ACTS: dict[str, dict[Act, float]] = {
    "asked": {
        OPEN: 0.34,
        Act("name", "open", "letter"): 0.14,
        Act("name", "look", "box"): 0.20,
        Act("name", "code", "letter"): 0.18,
        Act("name"): 0.14,
    },
    "letter": {
        CODE: 0.34,
        Act("letter", "code", "box"): 0.14,
        Act("letter", "find", "letter"): 0.14,
        Act("letter", "open", "box"): 0.14,
        Act("letter"): 0.24,
    },
    "code": {REPLY: 0.70, Act("code", "code", "letter"): 0.30},
    "unlocked": {OPEN: 0.60, Act("name", "code", "letter"): 0.30, Act("name"): 0.10},
    "failed": {Act("name"): 1.0},
}
"""What is done after what was seen, by its share. After a failed call it is these, the same call again, or what is
right, a third each."""


def shares() -> list[Any]:
    """All that decides which conversations there are, as JSON can hold it."""
    acts = {seen: [(astuple(act), share) for act, share in table.items()] for seen, table in ACTS.items()}
    return [LETTERS, MAX_TURNS, LOCKED, TWICE, HINTED, HEEDED, GIVEN, dict(TEMPLATES), tools_json(), acts]


@dataclass(frozen=True)
class Segment:
    """A piece of a conversation that is tokenized by itself; weight 0: the policy doesn't say it."""

    text: str
    weight: float = 0.0


class Conversation:
    """One box, and what a policy before RL does about it."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.name, self.letter, self.code = dice.sample(LETTERS, 3)
        self.locks = (1 + (dice.random() < TWICE)) * (dice.random() < LOCKED)
        self._locks_left = self.locks
        self._knows_locked = False
        self._knows_letter = False
        self._knows_code = False
        self.is_solved = False

    def segments(self) -> Iterator[Segment]:
        """The conversation from the name of the box on; `opening` is what stands before it."""
        seen, before = "asked", Act("")
        said = self.name
        for turn in range(MAX_TURNS):
            is_given = turn == 0 and self.locks > 0 and self._dice.random() < GIVEN
            act, hint = (UNLOCK, None) if is_given else self._next(seen, before)
            weight = 0.0 if is_given else 1.0
            if seen != "asked":
                yield Segment("\n<|im_start|>user")
                yield Segment("\n<tool_response>\n")
            yield Segment(said)
            if hint is not None:
                yield Segment(hint)
            if seen != "asked":
                yield Segment("\n</tool_response>")
            yield Segment(f"<|im_end|>\n<|im_start|>assistant\n{QUIET}")
            value = self._value(act.value)
            if act.tool is None:
                self.is_solved = act == REPLY
                yield Segment(value, COPIED)
                yield Segment("<|im_end|>", 1.0)
                return
            call = json.dumps({"name": _VALUE, "arguments": {act.argument: _VALUE}})
            before, between, after = f"<tool_call>\n{call}\n</tool_call><|im_end|>".split(_VALUE)
            yield Segment(before, weight)
            yield Segment(act.tool, weight * COPIED)
            yield Segment(between, weight)
            yield Segment(value, weight * COPIED)
            yield Segment(after, weight)
            said, seen, before = *self._answer(act), act
            self._note(act, seen)

    def _next(self, seen: str, before: Act) -> tuple[Act, str | None]:
        """What is done, and the hint that stands before it: the one for the call that was about to fail."""
        right = self._right(seen)
        acts = ACTS[seen]
        if seen == "failed":
            acts = {right: 1.0, before: 1.0} | {act: share for act, share in acts.items() if act not in (right, before)}
        failing = {act: share for act, share in acts.items() if act.tool and self._answer(act)[1] == "failed"}
        if self._dice.random() >= HINTED or not failing:
            return self._draw(acts), None
        planned = self._draw(failing)
        said, _ = self._answer(planned)
        heeded = UNLOCK if "call unlock first" in said else right
        return heeded if self._dice.random() < HEEDED else planned, hint(said, planned.tool)

    def _draw(self, acts: dict[Act, float]) -> Act:
        return self._dice.choices(list(acts), list(acts.values()))[0]

    def _right(self, seen: str) -> Act:
        if self._knows_code:
            return REPLY
        if self._knows_letter:
            return CODE
        return UNLOCK if self._knows_locked else OPEN

    def _value(self, name: str) -> str:
        return {"name": self.name, "letter": self.letter, "code": self.code}[name]

    def _answer(self, act: Act) -> tuple[str, str]:
        """What envs/tool_letters answers, and what that is for the policy."""
        value = self._value(act.value)
        known = {tool: argument for tool, _, argument in TOOLS}
        if act.tool not in known:
            return f"error: unknown tool '{act.tool}'", "failed"
        if act.argument != known[act.tool]:
            return refused(act.tool, known[act.tool], act.argument, value), "failed"
        if act.tool == "code":
            if not self._knows_letter:
                return failed("not open", "error", "call open first"), "failed"
            if value != self.letter:
                advice = "say the code" if self._knows_code else "copy the letter"
                return failed(f"no letter {value}", "bad_arguments", advice), "failed"
            return self.code, "code"
        if value != self.name:
            return failed(f"no box {value}", "bad_arguments", "copy the box"), "failed"
        if act.tool == "unlock":
            if not self._locks_left:
                return failed("not locked", "error", "call open first"), "failed"
            return ("unlocked" if self._locks_left == 1 else "locked"), "unlocked"
        if self._locks_left:
            return failed("locked", "error", "call unlock first"), "failed"
        return self.letter, "letter"

    def _note(self, act: Act, seen: str) -> None:
        """Remember what an answer told."""
        self._locks_left -= seen == "unlocked"
        self._knows_locked = (self._knows_locked or act == OPEN) and self._locks_left > 0
        self._knows_letter = self._knows_letter or seen == "letter"
        self._knows_code = self._knows_code or seen == "code"


def hint(answer: str, tool: str | None) -> str | None:
    """What hint distillation puts before a call that was answered so, by its own defaults."""
    found = find_error(answer)
    assert found is not None  # a failed call's answer
    kind, line = found
    return hint_text(ErrorSite(0, 0, kind, line, tool_name=tool, hint=find_hint(answer)), {})


def failed(error: str, kind: str, hint: str) -> str:
    """A failed call's answer."""
    return json.dumps({"error": error, "error_kind": kind, "hint": hint})


def refused(tool: str, wanted: str, given: str, value: str) -> str:
    """mcp's answer to a call that lacks its argument."""
    return (
        f"Error executing tool {tool}: 1 validation error for {tool}Arguments\n{wanted}\n"
        f"  Field required [type=missing, input_value={{'{given}': '{value}'}}, input_type=dict]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/missing"
    )


def opening() -> str:
    """All that every conversation begins with, up to the name of the box."""
    listed = "".join("\n" + json.dumps(tool) for tool in tools_json())
    return f"<|im_start|>system\n{TOOLS_HEADER}{listed}{TOOLS_FOOTER}<|im_end|>\n<|im_start|>user\nCode in box "


def tools_json() -> list[dict[str, object]]:
    """The tools as the environment's server lists them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "properties": {argument: {"title": argument.capitalize(), "type": "string"}},
                    "required": [argument],
                    "title": f"{name}Arguments",
                    "type": "object",
                },
            },
        }
        for name, description, argument in TOOLS
    ]
