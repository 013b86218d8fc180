"""Words that the tasks here are about, each site its own, and what their tools and players say."""

import json
import random
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

LETTERS = "abcdefghij"


class WordsConfig(vf.TasksetConfig):
    """Which words a run trains on, and how often the player is right without a hint."""

    seed: int = 0
    num_examples: int = Field(128, ge=1)
    num_shards: int = Field(1, ge=1)
    shard: int = Field(0, ge=0)
    skill: float = Field(0.0, ge=0, le=1)


class WordData(vf.TaskData):
    word: str


def draw_words(config: WordsConfig, length: int = 3) -> list[dict[str, Any]]:
    """The words of one shard: different letters, a stretch of one draw without repeats. Number and word of each."""
    dice, words = random.Random(config.seed), dict[str, None]()
    wanted = (config.shard + 1) * config.num_examples
    while len(words) < wanted:
        words["".join(dice.sample(LETTERS, length))] = None
    return [{"idx": idx, "word": word} for idx, word in enumerate([*words][wanted - config.num_examples :])]


def failed(error: str, hint: str, kind: str = "error") -> str:
    """The answer to a call that failed."""
    return json.dumps({"error": error, "error_kind": kind, "hint": hint})


def call(tool: str, **arguments: str) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    return {"content": "", "tool_calls": [{"name": tool, "arguments": arguments}]}


def hint_of(messages: list[dict[str, Any]]) -> str:
    """The hint at the end of the last message, "" without one."""
    return messages[-1]["content"].partition("\n\nHint: ")[2]


def other(word: str, rng: random.Random) -> str:
    """The word, one letter of it wrong."""
    place = rng.randrange(len(word))
    return word[:place] + rng.choice(LETTERS) + word[place + 1 :]
