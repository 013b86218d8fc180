"""Lessons as datasets that others train on: TRL's SFT and DPO trainers, OpenAI's fine-tuning, or plain messages.

Tools, and a call's arguments, are JSON text wherever a row's shape must not depend on its values: Arrow, which holds
Hugging Face's datasets, would give every row the keys of all.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.lessons import Lesson
from composer_prime.traces.states import Message, calls_of

Row = dict[str, Any]


def _prompted(lesson: Lesson) -> Row:
    row: Row = {"prompt": list(lesson.state.messages), "weight": lesson.weight}
    return row | ({"tools": json.dumps(list(lesson.state.tools))} if lesson.state.tools else {})


def trl_sft(lesson: Lesson) -> Row:
    """A row of TRL's prompt-completion type."""
    return {**_prompted(lesson), "completion": [lesson.chosen]}


def trl_dpo(lesson: Lesson) -> Row | None:
    """A row of TRL's preference type; None where the author did what is agreed on."""
    if lesson.rejected is None:
        return None
    return {**_prompted(lesson), "chosen": [lesson.chosen], "rejected": [lesson.rejected]}


def messages(lesson: Lesson) -> Row:
    """The conversation up to the agreed action, with the tools as an API takes them."""
    row: Row = {"messages": [*lesson.state.messages, lesson.chosen], "weight": lesson.weight}
    return row | ({"tools": list(lesson.state.tools)} if lesson.state.tools else {})


def openai_finetune(lesson: Lesson) -> Row:
    """The same as OpenAI's fine-tuning takes it: of the assistant's messages only the agreed one is learned."""
    row = messages(lesson)
    del row["weight"]
    before = [{**one, "weight": 0} if one["role"] == "assistant" else dict(one) for one in row["messages"][:-1]]
    row["messages"] = [*map(_without_empty, before), _without_empty(lesson.chosen)]
    return row | ({"parallel_tool_calls": True} if lesson.state.tools else {})


def _without_empty(message: Message) -> Row:
    """OpenAI takes no empty text beside calls."""
    return {name: value for name, value in message.items() if name != "content" or value or not calls_of(message)}


KINDS: Mapping[str, Callable[[Lesson], Row | None]] = {
    "trl-sft": trl_sft,
    "trl-dpo": trl_dpo,
    "messages": messages,
    "openai-finetune": openai_finetune,
}


def write_dataset(lessons: Iterable[Lesson], folder: Path, kind: str) -> int:
    """Write a new folder with train.jsonl and a card; how many rows.

    Raises BadInput where the folder holds something, or there is no row.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} holds something already: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    num_rows, weight = 0, 0.0
    with (folder / "train.jsonl").open("w", encoding="ascii") as file:
        for lesson in lessons:
            if (row := KINDS[kind](lesson)) is not None:
                file.write(json.dumps(row) + "\n")
                num_rows, weight = num_rows + 1, weight + lesson.weight
    if not num_rows:
        raise BadInput(f"no lesson makes a row of {kind}: the author did everywhere what teachers agree on")
    (folder / "README.md").write_text(_card(kind, num_rows, weight / num_rows), encoding="utf-8")
    return num_rows


def _card(kind: str, num_rows: int, weight: float) -> str:
    """The dataset's card, as Hugging Face's hub reads it."""
    return f"""---
configs:
- config_name: default
  data_files: train.jsonl
tags:
- agent-traces
- {kind}
---
# Actions that teachers agree on

{num_rows:,} decision points of stored agent sessions, one a row, made by composer-prime (`replay export --as {kind}`).
At each, several models said what they would have done. The action in the row is the one that they agree on, by
{weight:.0%} of their votes in the mean. What came before it is what the session's own agent saw; results that its log
lacks are marked `[no result was logged]`. Known forms of secrets are cut out; names and other personal data are not.
"""
