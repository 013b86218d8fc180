"""Sort a few letters: `Sort: dbca` is answered by `abcd`.

The harder sister of reverse_letters: where a letter goes depends on all the others, not on its place alone.
Words are drawn from a seed, all distinct; each site takes its own stretch of the draw, so no two sites share a word.
"""

import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["SortLettersTaskset"]


class SortLettersConfig(vf.TasksetConfig):
    """Which words a run trains on. All sites of a run share everything but `shard`."""

    seed: int = 0
    """Draws the words of the whole run; shards are cut from one draw, so it is the same at every site."""
    num_examples: int = Field(256, ge=1)
    """Words in a shard, the same at every site. `num_shards * num_examples` distinct words must exist."""
    num_shards: int = Field(1, ge=1)
    """How many shards the run has. A site that joins later may count more: the shards before its own stay."""
    shard: int = Field(0, ge=0)
    """Which shard is ours, from 0 to `num_shards - 1`."""
    length: int = Field(4, ge=1, le=10)
    """Letters in a word."""
    alphabet: str = Field("abcdef", min_length=2, max_length=64)
    """The letters words are made of, each once."""
    credit: Literal["all", "letters"] = "all"
    """What is rewarded: the whole answer, or each letter in its place."""


class SortLettersData(vf.TaskData):
    """One word with its prompt; `answer` is what the policy must say, `credit` as in the config."""

    answer: str
    credit: Literal["all", "letters"] = "all"


class SortLettersTask(vf.Task[SortLettersData]):
    """Says how much of the reply is the answer, to the letter."""

    @vf.reward
    async def right_letters(self, trace: vf.Trace) -> float:
        """1.0 when the last reply, white space around it stripped, is the answer; else 0.0, or with credit
        "letters", for a reply as long as the answer, the share of letters that stand in their place."""
        reply, answer = trace.last_reply, self.data.answer
        if self.data.credit == "all" or len(reply) != len(answer):
            return float(reply == answer)
        return sum(ours == theirs for ours, theirs in zip(reply, answer, strict=True)) / len(answer)


class SortLettersTaskset(vf.Taskset[SortLettersTask, SortLettersConfig]):
    """The words of one shard as tasks."""

    def load(self) -> Iterator[SortLettersTask]:
        """Yield `num_examples` tasks; the same config always yields the same ones. Raises ValueError on a config
        that asks for more words than its letters can spell, or for a shard that isn't there."""
        for idx, word in enumerate(draw_words(self.config)):
            answer, credit = "".join(sorted(word)), self.config.credit
            data = SortLettersData.model_validate(
                {"idx": idx, "prompt": f"Sort: {word}", "answer": answer, "credit": credit}
            )
            yield SortLettersTask(data, self.config.task)


def draw_words(config: SortLettersConfig) -> list[str]:
    """The `num_examples` words of shard `shard`: a stretch of one endless seeded draw without repeats."""
    num_words, wanted = len(config.alphabet) ** config.length, config.num_shards * config.num_examples
    if len(set(config.alphabet)) != len(config.alphabet):
        raise ValueError(f"alphabet ({config.alphabet!r}) repeats a letter: give every letter once")
    if config.shard >= config.num_shards:
        raise ValueError(
            f"shard ({config.shard}) must be smaller than num_shards ({config.num_shards}): shards count from 0"
        )
    if wanted > num_words:
        raise ValueError(
            f"num_shards x num_examples ({config.num_shards} x {config.num_examples} = {wanted}) must not exceed the "
            f"{num_words} words of {config.length} letters out of {config.alphabet!r}: "
            "lower num_examples, or make words longer"
        )
    start = config.shard * config.num_examples
    random_source, drawn = random.Random(config.seed), dict[int, None]()
    while len(drawn) < start + config.num_examples:
        drawn[random_source.randrange(num_words)] = None
    return [spell(number, config.alphabet, config.length) for number in list(drawn)[start:]]


def spell(number: int, alphabet: str, length: int) -> str:
    """The word whose letters are the digits of `number` in base `len(alphabet)`."""
    letters = []
    for _ in range(length):
        number, digit = divmod(number, len(alphabet))
        letters.append(alphabet[digit])
    return "".join(reversed(letters))
