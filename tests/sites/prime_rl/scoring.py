"""Servers that score token sequences with a model in this process, and lessons to be scored."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.file import Decision, write_decisions
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


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("open", "unlock")
]


@dataclass(frozen=True)
class Told:
    """What a lesson holds."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    weight: float


def pairs(count: int) -> list[Told]:
    """Lessons at different states: a call over another one or a text, or a text over a call, which a random policy
    prefers, since it is short."""
    texts = [{"role": "assistant", "content": "h" * (number + 1)} for number in range(count)]
    better, worse = [call("unlock", box="ab" * number) for number in range(count)], call("open", box="b")
    return [
        Told(
            messages=[{"role": "user", "content": f"Code in box {'ab' * number}"}],
            tools=TOOLS,
            chosen=texts[number] if number % 3 == 2 else better[number],
            rejected=texts[number] if number % 3 == 1 else worse,
            weight=0.5 + 0.4 / (1 + number),
        )
        for number in range(count)
    ]


def write(folder: Path, told: Sequence[Told]) -> dict[str, str]:
    """A store of sessions of one turn, and what `replay pairs` would write of them: `env.taskset`'s files."""
    folder.mkdir(parents=True, exist_ok=True)
    log, store, file = folder / "log.jsonl", TraceStore(folder / "store", is_new=True), folder / "pairs.jsonl"
    rows = [{"messages": [*one.messages, one.rejected], "tools": one.tools} for one in told]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for session in read_file(log)[1].sessions if told else ():
        store.add(session)
    store.save_index()
    by_question = {json.dumps(one.messages): one for one in told}
    decisions = []
    for state in store.states():
        one = by_question[json.dumps(list(state.messages))]
        agreed: dict[str, Any] = {"support": one.weight, "chosen": one.chosen}
        said = {"score": 0.0, "supported": 0.0, "teachers": {}, **agreed}
        decisions.append(Decision(session=state.session, turn=state.turn, state=state.id, **said))
    nothing = {"score": 0.5, "supported": None, "support": None, "chosen": None, "teachers": {}}
    write_decisions(file, [*decisions, Decision(session="none", turn=0, state="0", **nothing)])
    return {"store": str(folder / "store"), "file": str(file)}
