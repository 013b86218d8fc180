"""Stored actions in the policy's tokens: what it would have sampled is trained on, and nothing else."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from renderers import Qwen3RendererConfig, create_renderer

from composer_prime import metrics
from composer_prime.config.stored import PairsConfig
from composer_prime.errors import BadInput
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.batches import read_batch
from composer_prime.sites.embedded.inference_client import InferenceClient
from composer_prime.sites.embedded.orchestrator import Orchestrator
from composer_prime.sites.embedded.rollouts import Branch, Group, Rollout, RolloutPlayer
from composer_prime.sites.embedded.stored import StoredSamples, encode_pairs
from composer_prime.sites.embedded.weights import WeightsWatcher
from composer_prime.traces.pairs.encoding import Encoder
from composer_prime.traces.pairs.file import Pair, TeacherVote, write_pairs
from tests.sites.letters_site import letters_site
from tests.sites.test_stored import Served, random_pairs
from tests.sites.tiny_policy import random_policy
from tiny_policy.built_in.models import BUILT_IN

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]},
        },
    }
    for name in ("open", "unlock")
]


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


ASKED = [{"role": "user", "content": "Code in box b"}]
ANSWERED = [*ASKED, call("open", box="b"), {"role": "tool", "tool_call_id": "1", "content": "locked"}]
RENDERER = create_renderer(BUILT_IN["tiny-tools"].tokenizer(), Qwen3RendererConfig(enable_thinking=False))


@pytest.mark.parametrize("messages", [ASKED, ANSWERED], ids=["first", "after an answer"])
@pytest.mark.parametrize(
    "action", [call("unlock", box="b"), {"role": "assistant", "content": "h"}], ids=["call", "text"]
)
def test_what_is_trained_on_is_what_the_policy_says_after_its_prompt(messages: Any, action: Any) -> None:
    encoded = Encoder(RENDERER, 512).encode(messages, TOOLS, action)
    prompt = RENDERER.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    assert encoded is not None and encoded.token_ids[: len(prompt)] == prompt
    assert encoded.mask == [place >= len(prompt) for place in range(len(encoded.token_ids))]
    said = RENDERER.parse_response(encoded.token_ids[len(prompt) :], tools=TOOLS)
    assert said.content == action["content"] and encoded.token_ids[-1] in RENDERER.get_stop_token_ids()
    called = [(one.name, one.arguments) for one in said.tool_calls or []]
    assert called == [("unlock", {"box": "b"})] * len(action.get("tool_calls", ()))


def test_an_authors_thinking_is_not_taught() -> None:
    thinking = call("unlock", box="b") | {"reasoning_content": "It is locked."}
    encoder = Encoder(RENDERER, 512)
    assert encoder.encode(ASKED, TOOLS, thinking) == encoder.encode(ASKED, TOOLS, call("unlock", box="b"))


def write(path: Path, *actions: Any) -> Path:
    vote = TeacherVote(model="m", weight=1.0, chose="chosen")
    pairs = [
        Pair(
            state="0",
            messages=ASKED,
            tools=TOOLS,
            chosen=one,
            rejected=call("open", box="b"),
            weight=0.5,
            teachers={"t": vote},
        )
        for one in actions
    ]
    write_pairs(path, pairs)
    return path


def test_pairs_that_fit_no_sample_are_left_out_and_a_file_of_such_is_refused(tmp_path: Path) -> None:
    short, long = call("unlock", box="b"), {"role": "assistant", "content": "a" * 500}
    encoder = Encoder(RENDERER, 400)
    (kept,) = encode_pairs(encoder, PairsConfig(file=write(tmp_path / "pairs", short, long)))
    assert kept.weight == 0.5 and kept.chosen == encoder.encode(ASKED, TOOLS, short)
    with pytest.raises(BadInput, match=r"long has no pairs that fit a sample \(1 in all\): raise seq_len"):
        encode_pairs(encoder, PairsConfig(file=write(tmp_path / "long", long)))


def test_a_step_whose_rollouts_teach_nothing_is_drawn_once_where_pairs_teach(tmp_path: Path) -> None:
    site = letters_site(tmp_path, max_steps=2, replay={"pairs": {"file": "x", "batch_size": 3}})
    asked: list[int] = []

    async def play_group(source: int, task: int, size: int, policy_version: int) -> Group:
        asked.append(task)
        branch = Branch(token_ids=[1, 2], mask=[False, True], logprobs=[0.0, -1.0])
        return Group("letters", policy_version, tuple(Rollout(0.0, (branch,)) for _ in range(size)), ())

    async def at_least(version: int) -> None:
        pass

    source = SimpleNamespace(name="letters", env=None, tasks=[None] * 8)
    player = cast(RolloutPlayer, SimpleNamespace(sources=[source], play_group=play_group))
    weights = cast(WeightsWatcher, SimpleNamespace(version=0, at_least=at_least))
    served = [cast(Any, Served(random_policy(seed))) for seed in (0, 1)]
    stored = StoredSamples(site, random_pairs(5), (), *served)
    asyncio.run(Orchestrator(site, player, weights, cast(InferenceClient, None), stored).make_batches())
    assert len(asked) == 2 * 4  # 16 rollouts a step in groups of 4
    assert [len(read_batch(site.paths.rollouts, step) or ()) for step in range(2)] == [6, 6]
    assert [record[metrics.PAIRS_COUNT] for record in read_tape(site.paths.tape("orchestrator"))] == [3, 3]
