"""What plays the environments of these tests: verifiers' own client, our harness, the fake inference server."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from composer_prime.sites.embedded.environments import load_sources
from composer_prime.sites.embedded.rollouts import Group, RolloutPlayer
from tests.servers.fake_inference import FakePolicy, serving
from tests.sites.letters_site import letters_site
from tests.sites.tools.toolsets import Reply

SEQ_LEN, MAX_TURN_TOKENS = 2048, 1024
MODEL = "policy"
"""Not the model that the fake server names, for whose small context there are too many words about tools."""

Play = Callable[..., Any]
Scenario = Callable[[RolloutPlayer], Awaitable[Any]]


@pytest.fixture
def play(tmp_path: Path, tokenizer_dir: Path, run_async: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Play:
    """`play(environment, reply)` plays one group of its first task and returns it.

    An environment is a module, or the id of an installed one, with `taskset`'s settings. `scenario` is given
    the player, instead of one group. `agent` is the recipe's `env.agent`.
    """

    def run(
        environment: ModuleType | str,
        reply: Reply,
        *,
        size: int = 1,
        scenario: Scenario | None = None,
        agent: dict[str, Any] | None = None,
        taskset: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(environment, ModuleType):
            monkeypatch.setitem(sys.modules, environment.__name__, environment)
            environment = environment.__name__
        env = {"taskset": {"id": environment, **(taskset or {})}, "agent": agent or {}}
        train = {"source": [{"name": "tools", "env": env}], "sampling": {"max_completion_tokens": MAX_TURN_TOKENS}}

        async def group(player: RolloutPlayer) -> Group:
            return await player.play_group(0, 0, size, 7)

        async def played() -> Any:
            site = letters_site(
                tmp_path, port=port, model_dir=tokenizer_dir, orchestrator={"train": train}, seq_len=SEQ_LEN
            )
            url = f"http://127.0.0.1:{port}"
            async with RolloutPlayer(load_sources(site), site, base_url=url, model=MODEL) as player:
                return await (scenario or group)(player)

        with serving(FakePolicy(reply=reply)) as port:
            return run_async(played())

    return run
