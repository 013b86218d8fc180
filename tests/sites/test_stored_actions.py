"""Stored actions in the policy's tokens: what it would have sampled is trained on, and nothing else."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from renderers import Qwen3RendererConfig, create_renderer

from composer_prime import metrics
from composer_prime.config.teachers import PairsConfig
from composer_prime.errors import BadInput
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.agreement import HeldOut
from composer_prime.sites.embedded.batches import read_batch
from composer_prime.sites.embedded.inference_client import InferenceClient, WeightsWatcher
from composer_prime.sites.embedded.orchestrator import Orchestrator
from composer_prime.sites.embedded.rollouts import Branch, Group, Rollout, RolloutPlayer
from composer_prime.sites.embedded.stored import StoredSamples, encode_lessons, split_lessons
from composer_prime.traces.answers import Answer
from composer_prime.traces.ingest.intake import read_file
from composer_prime.traces.ingest.store import TraceStore
from composer_prime.traces.pairs.encoding import CUT, Encoder, cut_oldest
from composer_prime.traces.pairs.lessons import Lesson
from composer_prime.traces.pairs.making import make_pairs
from composer_prime.traces.pairs.votes import Rules
from composer_prime.traces.states import TraceState
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


def lesson(action: Any, messages: Any = ASKED, rejected: Any = None) -> Lesson:
    state = TraceState("s", 0, None, tuple(messages), tuple(TOOLS), call("open", box="b"))
    return Lesson(state, action, rejected, 0.5)


def test_lessons_that_fit_no_sample_are_left_out_and_a_file_of_such_is_refused() -> None:
    short, long = call("unlock", box="b"), {"role": "assistant", "content": "a" * 500}
    encoder, config = Encoder(RENDERER, 400), PairsConfig(store=Path("x"), file=Path("long"))
    (kept,) = encode_lessons(encoder, [lesson(short), lesson(long), lesson(short, rejected=long)], config)
    assert kept.weight == 0.5 and kept.chosen == encoder.encode(ASKED, TOOLS, short) and kept.rejected is None
    with pytest.raises(BadInput, match=r"long has no lessons that fit a sample \(1 in all\): raise seq_len"):
        encode_lessons(encoder, [lesson(long)], config)


def test_of_a_lesson_that_is_too_long_the_oldest_results_are_cut_as_far_as_it_takes() -> None:
    turns = [each for n in range(6) for each in (call("open", box="b"), {**ANSWERED[-1], "content": "ab" * 40})]
    messages, action, other = [*ASKED, *turns], call("unlock", box="b"), {"role": "assistant", "content": "h" * 30}
    whole = Encoder(RENDERER, 4096)
    lengths = []
    for count in range(7):
        encoded = whole.encode(cut_oldest(messages, count), TOOLS, other)
        assert encoded is not None
        lengths.append(len(encoded.token_ids))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[3] > lengths[6]
    for count in range(7):
        tight = Encoder(RENDERER, lengths[count])
        actions, num_cut = tight.fit_all(messages, TOOLS, [action, other], may_cut=True)
        assert num_cut == count and actions == [
            whole.encode(cut_oldest(messages, count), TOOLS, one) for one in (action, other)
        ]
    assert Encoder(RENDERER, lengths[6] - 1).fit_all(messages, TOOLS, [other], may_cut=True) == (None, 0)
    assert Encoder(RENDERER, lengths[3]).fit_all(messages, TOOLS, [other], may_cut=False) == (None, 0)
    assert CUT in cut_oldest(messages, 1)[2]["content"] and messages[2]["content"] == "ab" * 40


def test_a_run_without_an_environment_measures_at_points_that_it_does_not_learn_from(tmp_path: Path) -> None:
    store, file = TraceStore(tmp_path / "store", is_new=True), tmp_path / "pairs.jsonl"
    log = [{"messages": [{"role": "user", "content": f"Code in box {n}"}, call("open", box=str(n))]} for n in range(60)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    for session in read_file(tmp_path / "log.jsonl")[1].sessions:
        store.add(session)
    store.save_index()
    said = [Answer(one.id, name, "m", call("unlock", box="b")) for one in store.states() for name in "ab"]
    make_pairs(store, said, Rules(), to=file)
    table = {"store": str(store.folder), "file": str(file), "held_out": 0.3}
    site = letters_site(tmp_path, replay={"pairs": table})
    assert [len(part) for part in split_lessons(site)] == [60, 0]
    site = letters_site(tmp_path, replay={"pairs": table}, orchestrator={"train": {"source": []}})
    learned, held = split_lessons(site)
    assert len(learned) + len(held) == 60 and 8 <= len(held) <= 30
    assert not {one.state.id for one in learned} & {one.state.id for one in held}
    assert split_lessons(site) == (learned, held), "the same points after a restart"


def test_a_step_whose_rollouts_teach_nothing_is_drawn_once_where_pairs_teach(tmp_path: Path) -> None:
    site = letters_site(
        tmp_path, max_steps=2, replay={"pairs": {"store": "x", "file": "x", "batch_size": 3, "tau": 0.0}}
    )
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
    asyncio.run(
        Orchestrator(
            site, player, weights, cast(InferenceClient, None), stored, HeldOut([], None, "http://x", "m")
        ).make_batches()
    )
    assert len(asked) == 2 * 4  # 16 rollouts a step in groups of 4
    assert [len(read_batch(site.paths.rollouts, step) or ()) for step in range(2)] == [3, 3]
    assert [record[metrics.PAIRS_COUNT] for record in read_tape(site.paths.tape("orchestrator"))] == [3, 3]
