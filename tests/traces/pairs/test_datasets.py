"""Lessons as datasets: the rows that each trainer takes, and TRL's own trainers on them where TRL is installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.paths import models_cache
from composer_prime.errors import BadInput
from composer_prime.sites.embedded.model import resolve_model
from composer_prime.traces.pairs.datasets import KINDS, write_dataset
from composer_prime.traces.pairs.lessons import Lesson
from composer_prime.traces.states import TraceState

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("open", "code")
)


def call(name: str, id: str = "1", **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def lessons() -> list[Lesson]:
    opening = ({"role": "user", "content": "Code in box b"},)
    opened = (*opening, call("open", box="b"), {"role": "tool", "content": "d", "tool_call_id": "1"})
    states = [TraceState("s", turn, None, seen, TOOLS, call("open")) for turn, seen in enumerate((opening, opened))]
    reply = {"role": "assistant", "content": "d"}
    return [
        Lesson(states[0], call("open", box="b"), None, 1.0),
        Lesson(states[1], call("code", "2", letter="d"), reply, 0.5),
    ]


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    num_rows = write_dataset(lessons(), folder / kind, kind)
    found = [json.loads(line) for line in (folder / kind / "train.jsonl").read_text().splitlines()]
    assert len(found) == num_rows
    card = (folder / kind / "README.md").read_text()
    assert card.startswith("---\nconfigs:") and f"--as {kind}" in card and f"{num_rows} decision points" in card
    return found


def test_trl_gets_prompts_with_completions_and_pairs_where_the_author_did_otherwise(tmp_path: Path) -> None:
    first, second = rows(tmp_path, "trl-sft")
    assert first["prompt"] == [{"role": "user", "content": "Code in box b"}]
    assert second["completion"] == [call("code", "2", letter="d")] and len(second["prompt"]) == 3
    assert json.loads(first["tools"]) == list(TOOLS)
    (pair,) = rows(tmp_path, "trl-dpo")
    assert pair["chosen"] == second["completion"] and pair["rejected"] == [{"role": "assistant", "content": "d"}]


def test_messages_and_openais_end_with_the_agreed_action_which_alone_is_learned_there(tmp_path: Path) -> None:
    *_, row = rows(tmp_path, "messages")
    assert row["messages"][-1] == call("code", "2", letter="d") and row["weight"] == 0.5 and row["tools"] == list(TOOLS)
    *_, tuned = rows(tmp_path, "openai-finetune")
    assert [message.get("weight") for message in tuned["messages"]] == [None, 0, None, None]
    assert tuned.keys() == {"messages", "tools", "parallel_tool_calls"}
    assert all("content" not in message for message in tuned["messages"] if "tool_calls" in message)


def test_a_folder_that_holds_something_and_a_kind_without_a_row_are_refused(tmp_path: Path) -> None:
    rows(tmp_path, "messages")
    with pytest.raises(BadInput, match="holds something already: give a new folder"):
        write_dataset(lessons(), tmp_path / "messages", "messages")
    with pytest.raises(BadInput, match="no lesson makes a row of trl-dpo: the author did everywhere"):
        write_dataset(lessons()[:1], tmp_path / "none", "trl-dpo")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_one_object_a_line_of_ascii(kind: str, tmp_path: Path) -> None:
    assert rows(tmp_path, kind) and (tmp_path / kind / "train.jsonl").read_bytes().isascii()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trl-sft", "trl-dpo"])
def test_trls_own_trainers_take_the_dataset(kind: str, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows(tmp_path, kind)
    model = str(resolve_model("tiny-tools", 0, models_cache()))
    given = datasets.load_dataset("json", data_files=str(tmp_path / kind / "train.jsonl"), cache_dir=str(tmp_path))
    of = "SFT" if kind == "trl-sft" else "DPO"
    settings = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    config = getattr(trl, f"{of}Config")(**settings)
    trainer = getattr(trl, f"{of}Trainer")(model, args=config, train_dataset=given["train"])
    assert trainer.train().training_loss > 0
