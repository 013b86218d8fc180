"""Servers that score token sequences with a model in this process, and pairs to be scored."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_prime.traces.pairs.file import Pair, Record, StepScore, TeacherVote, write_pairs
from tests.servers.fake_teacher import FakeTeacher, serving_teacher


def token_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Of every token but the first, with a graph, as PRIME-RL's trainer computes them."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


@dataclass
class ScoringTeacher(FakeTeacher):
    """Says what a model says."""

    scorer: Any = field(default=None, kw_only=True)

    def entries(self, token_ids: Sequence[int], body: dict[str, Any]) -> list[Any]:
        with torch.no_grad():
            told = token_logprobs(self.scorer, list(token_ids)).tolist()
        return [None, *({str(token): {"logprob": one}} for token, one in zip(token_ids[1:], told, strict=True))]


def serve(stack: ExitStack, model: Any) -> str:
    """The base URL of a server of a model; it is there until the stack is left."""
    return stack.enter_context(serving_teacher(ScoringTeacher(model="policy", scorer=model)))


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def pairs(count: int) -> list[Pair]:
    """Pairs at different states: a call over another one, or over a text, or a text over a call, which a random policy
    prefers, since it is short."""
    vote = TeacherVote(model="m", weight=1.0, chose="chosen")
    texts = [{"role": "assistant", "content": "h" * (number + 1)} for number in range(count)]
    better, worse = [call("unlock", box="ab" * number) for number in range(count)], call("open", box="b")
    return [
        Pair(
            state=f"{number:016x}",
            messages=[{"role": "user", "content": f"Code in box {'ab' * number}"}],
            tools=[],
            chosen=texts[number] if number % 3 == 2 else better[number],
            rejected=texts[number] if number % 3 == 1 else worse,
            weight=0.5 + 0.4 / (1 + number),
            teachers={"t": vote},
        )
        for number in range(count)
    ]


def write(path: Path, records: Sequence[Pair]) -> Path:
    """A file as `replay pairs` writes it: scores stand between the pairs."""
    score = StepScore(session="s", turn=0, state="0", score=0.5, supported=0.5)
    mixed: list[Record] = [record for pair in records for record in (score, pair)]
    write_pairs(path, mixed or [score])
    return path
