"""The replay server against requests of upstream's shape: renderers' client, behind real verifiers environments."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
import zstandard
from starlette.testclient import TestClient

from composer_prime.errors import BadInput
from composer_prime.sites.embedded.environments import load_sources
from composer_prime.sites.embedded.rollouts import RolloutPlayer
from composer_prime.traces.serve import UNKNOWN_LOGPROB, Library, ReplayServer
from composer_prime.traces.turns import Turn, read_turns
from tests.servers.fake_inference import FakePolicy, serving
from tests.servers.in_thread import serving_app
from tests.sites.letters_site import letters_site

FLAT = {
    "token_ids": [1, 2, 3, 4, 5, 6],
    "mask": [False, False, True, True, False, True],
    "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
}


def write(path: Path, *records: Any) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(zstandard.compress(text) if path.suffix == ".zst" else text)
    return path


def ask(library: Library, prompt: Any, **body: Any) -> Any:
    """The server's answer to upstream's request for one prompt."""
    sampling = {"temperature": 0.7, "max_tokens": 16, "stop_token_ids": [4], "logprobs": 1, **body.pop("sampling", {})}
    request = {"model": "replay", "token_ids": prompt, "sampling_params": sampling, **body}
    return TestClient(ReplayServer(library, "replay").app()).post("/inference/v1/generate", json=request)


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.zst"])
def test_a_flat_record_is_a_turn_for_every_stretch_the_teacher_wrote(tmp_path: Path, name: str) -> None:
    without = {name: FLAT[name] for name in ("token_ids", "mask")}
    assert list(read_turns(write(tmp_path / name, FLAT, without))) == [
        Turn([1, 2], [3, 4], [-0.5, -0.25]),
        Turn([1, 2, 3, 4, 5], [6], [-1.0]),
        Turn([1, 2], [3, 4], None),
        Turn([1, 2, 3, 4, 5], [6], None),
    ]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1, 2], "TypeError"),
        ({"token_ids": [1]}, "KeyError: 'mask'"),
        ({"token_ids": [1, 2], "mask": [True]}, "token_ids has 2 entries, and mask or logprobs another number"),
        ({"token_ids": [1, -2], "mask": [False, True]}, "token_ids must be whole numbers from 0"),
        ({"nodes": [{"mask": [True]}]}, "KeyError: 'token_ids'"),
        ({"nodes": [{"mask": [True], "token_ids": [1], "parent": 7}]}, "IndexError"),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path: Path, record: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=f"traces.jsonl, line 2, isn't a stored trace .*{reason}"):
        list(read_turns(write(tmp_path / "traces.jsonl", FLAT, record)))


def test_a_file_that_is_not_there_or_not_text_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone.jsonl can't be read: .*: give a .jsonl file"):
        list(read_turns(tmp_path / "gone.jsonl"))
    (tmp_path / "odd.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(BadInput, match=r"odd.jsonl.zst can't be read"):
        list(read_turns(tmp_path / "odd.jsonl.zst"))
    (tmp_path / "odd.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"line 1, isn't a stored trace \(JSONDecodeError"):
        list(read_turns(tmp_path / "odd.jsonl"))
    silent = {"token_ids": [1], "mask": [False]}
    with pytest.raises(BadInput, match="holds no token that a teacher wrote"):
        list(read_turns(write(tmp_path / "silent.jsonl", silent)))


def test_a_stored_prompt_is_answered_with_its_tokens_in_upstreams_shape() -> None:
    library = Library([Turn([1, 2], [3, 4], [-0.5, -0.25]), Turn([9], [3], None)])
    answer = ask(library, [1, 2]).json()
    assert answer.pop("request_id").startswith("replay-")
    assert answer == {
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": [3, 4],
                "logprobs": {
                    "content": [
                        {"token": "token_id:3", "token_id": 3, "logprob": -0.5},
                        {"token": "token_id:4", "token_id": 4, "logprob": -0.25},
                    ]
                },
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    (unscored,) = ask(library, [9]).json()["choices"]
    assert unscored["logprobs"]["content"][0]["logprob"] == UNKNOWN_LOGPROB
    assert unscored["finish_reason"] == "length"  # it doesn't end with a stop token


def test_several_turns_of_one_prompt_come_in_the_files_order_and_then_again() -> None:
    library = Library([Turn([1], [3], None), Turn([2], [7], None), Turn([1], [4], None)])
    assert (library.num_prompts, library.num_turns) == (2, 3)
    answers = [ask(library, [1]).json()["choices"][0]["token_ids"] for _ in range(3)]
    assert answers == [[3], [4], [3]]


def test_a_turn_longer_than_asked_for_ends_by_length() -> None:
    (choice,) = ask(Library([Turn([1], [3, 4], None)]), [1], sampling={"max_tokens": 1}).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"], len(choice["logprobs"]["content"])) == ([3], "length", 1)


@pytest.mark.parametrize(
    ("prompt", "changes", "status", "reason"),
    [
        ([1, 2, 3], {}, 404, "no stored trace has this prompt of 3 tokens (1 prompts are stored)"),
        ([], {}, 404, "prompt of 0 tokens"),
        ("text", {}, 400, "token_ids must be a list of whole numbers from 0"),
        ([1, 2], {"model": "other"}, 400, "model (other) isn't served here: ask for replay"),
        ([1, 2], {"sampling": {"max_tokens": 0}}, 400, "max_tokens (0) must be a whole number from 1"),
        ([1, 2], {"sampling": {"prompt_logprobs": 1}}, 400, "prompt_logprobs and n above 1 aren't stored"),
    ],
)
def test_what_is_not_stored_is_answered_with_the_reason(prompt: Any, changes: Any, status: int, reason: str) -> None:
    answer = ask(Library([Turn([1, 2], [3], None)]), prompt, **changes)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]


def test_upstreams_readiness_checks_are_answered() -> None:
    client = TestClient(ReplayServer(Library([Turn([1], [3], None)]), "big-teacher").app())
    assert client.get("/health").status_code == 200
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["big-teacher"]


def test_an_environment_plays_stored_verifiers_traces_again_token_for_token(
    tmp_path: Path, tokenizer_dir: Path, run_async: Callable[..., Any]
) -> None:
    async def play(port: int, order: list[int]) -> dict[int, vf.Episode]:
        site = letters_site(tmp_path, port=port, model_dir=tokenizer_dir)
        (source,) = load_sources(site)
        async with RolloutPlayer([source], site, base_url=f"http://127.0.0.1:{port}", model="fake") as player:
            slots = [source.env.slots(source.tasks[task])[0] for task in order]
            episodes = await asyncio.gather(*(source.env.run_slot(slot, player._context) for slot in slots))
        return dict(zip(order, episodes, strict=True))

    with ExitStack() as stack:
        port = stack.enter_context(serving(FakePolicy(accuracy=lambda word: 0.5)))
        first = run_async(play(port, list(range(6))))
    records = [trace.to_record() for episode in first.values() for trace in episode.traces]
    library = Library(read_turns(write(tmp_path / "traces.jsonl", *records)))
    assert (library.num_prompts, library.num_turns) == (6, 6)
    order = random.Random(0).sample(range(7), 7)
    with serving_app(ReplayServer(library, "fake").app()) as port:
        again = run_async(play(port, order))
    for task in range(6):
        (before,), (after,) = first[task].traces[0].branches, again[task].traces[0].branches
        for one, other in ((after.token_ids, before.token_ids), (after.sampled_mask, before.sampled_mask)):
            assert list(one) == list(other)
        assert again[task].traces[0].reward == first[task].traces[0].reward
    assert not again[6].ok and "no stored trace has this prompt" in str(again[6].traces[0].errors[-1].message)
    assert {episode.traces[0].reward for episode in first.values()} == {0.0, 1.0}
