"""Rollouts of real verifiers environments: verifiers' own client, our in-process harness, the fake server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_prime.sites.embedded import rollouts
from composer_prime.sites.embedded.environments import load_sources
from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
from tests.servers.fake_inference import END_OF_TURN, LOGPROB, FakePolicy, serving
from tests.sites.letters_site import letters_site

Play = Callable[..., list[Group]]


@pytest.fixture
def play(tmp_path: Path, tokenizer_dir: Path, run_async: Callable[..., Any]) -> Play:
    """`play(policy)` plays the first task of every source, and of more tasks if asked, in groups of 4 at once."""

    def run(policy: FakePolicy, num_tasks: int = 1, **orchestrator: Any) -> list[Group]:
        async def groups() -> list[Group]:
            site = letters_site(tmp_path, port=port, model_dir=tokenizer_dir, orchestrator=orchestrator)
            sources, url = load_sources(site), f"http://127.0.0.1:{port}"
            chosen = [(source, task) for source in range(len(sources)) for task in range(num_tasks)]
            async with RolloutPlayer(sources, site, base_url=url, model="fake") as player:
                return await asyncio.gather(*(player.play_group(*each, 4, 7) for each in chosen))

        with serving(policy) as port:
            return run_async(groups())

    return run


def test_a_rollout_is_rewarded_for_the_answer_the_server_gave(play: Play) -> None:
    (right,) = play(FakePolicy(accuracy=lambda word: 1.0))
    (wrong,) = play(FakePolicy(accuracy=lambda word: 0.0))
    assert [rollout.reward for rollout in right.rollouts] == [1.0] * 4
    assert [rollout.reward for rollout in wrong.rollouts] == [0.0] * 4
    assert (right.source, right.policy_version, right.failures) == ("letters", 7, ())


def test_token_streams_are_aligned_and_only_the_answer_is_trained_on(play: Play) -> None:
    from tiny_policy.qwen3 import tiny_tokenizer

    policy = FakePolicy(accuracy=lambda word: 1.0)
    (group,) = play(policy)
    (branch,) = group.rollouts[0].branches
    word, answer = policy.words[0], [*tiny_tokenizer().encode(policy.words[0][::-1]), END_OF_TURN]
    prompt = tiny_tokenizer().encode(
        f"<|im_start|>user\nReverse: {word}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert branch.token_ids == prompt + answer
    assert branch.mask == [False] * len(prompt) + [True] * len(answer)
    assert branch.logprobs == [0.0] * len(prompt) + [LOGPROB] * len(answer)
    assert branch.ref_logprobs is None


def test_a_rollout_that_hangs_fails(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "ROLLOUT_TIMEOUT_S", 0.5)
    (group,) = play(FakePolicy(is_open=False))
    assert group.rollouts == ()
    assert group.failures == ("TimeoutError: not done after 0.5 s",) * 4


def test_two_environments_play_side_by_side(play: Play) -> None:
    both = [{"name": name, "env": {"taskset": {"id": name}}} for name in ("reverse-letters", "sort-letters")]
    first, second = play(FakePolicy(accuracy=lambda word: 1.0), train={"source": both})
    assert (first.source, second.source) == ("reverse-letters", "sort-letters")
    assert [rollout.reward for rollout in first.rollouts + second.rollouts] == [1.0] * 8
