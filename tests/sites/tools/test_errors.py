"""Calls that fail: the policy reads what verifiers' own chat harness would show it, and each is counted by its kind."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer

from tests.servers.in_thread import serving_app
from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import call, environment, own, says

DATED = "ignore:The 'initial' parameter is deprecated:DeprecationWarning"
"""verifiers' own retries."""

core = pytest.importorskip("verifiers.v1.harnesses.utils.core")


class Counter(vf.Toolset[vf.ToolsetConfig]):
    """What can go wrong in a tool."""

    @vf.tool
    def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        return first + second

    @vf.tool
    def divide(self, first: int, second: int) -> float:
        """Divide two numbers."""
        return first / second

    @vf.tool
    async def complain(self, size: int) -> str:
        """Raise an error of so many characters."""
        raise ValueError("x" * size)

    @vf.tool
    def tell(self, size: int) -> str:
        """Answer with so many characters."""
        return "begin " + "ö" * size + "end"

    @vf.tool
    def nothing(self) -> list[str]:
        """Answer with no block at all."""
        return []

    @vf.tool
    def several(self) -> list[str]:
        """Answer with several blocks."""
        return ["one", "two"]

    @vf.tool
    def table(self) -> dict[str, int]:
        """Answer with an object."""
        return {"one": 1}


CALLS: dict[str, tuple[str, str | None]] = {
    call("counter_add", {"first": 1, "second": 2}): ("3", None),
    call("counter_add", '{"first": 1, "second": 2}'): ("3", None),
    call("counter_add", '{"first": 1,'): (
        "error: invalid JSON in tool arguments (Expecting property name enclosed in double quotes: line 1 column 13 "
        "(char 12)); resend the call with valid JSON",
        "bad_arguments",
    ),
    call("counter_add", [1, 2]): (
        "error: tool arguments must be a JSON object, got list; resend as an object",
        "bad_arguments",
    ),
    call("counter_add", "null"): (
        "error: tool arguments must be a JSON object, got NoneType; resend as an object",
        "bad_arguments",
    ),
    call("add", {"first": 1, "second": 2}): ("error: unknown tool 'add'", "unknown_tool"),
    call("counter_add", {"first": 1}): (
        "Error executing tool add: 1 validation error for addArguments",
        "bad_arguments",
    ),
    call("counter_add", {"first": 1, "second": "two"}): ("Error executing tool add: 1 validation", "bad_arguments"),
    call("counter_divide", {"first": 1, "second": 0}): ("Error executing tool divide: division by zero", "error"),
    call("counter_complain", {"size": 5}): ("Error executing tool complain: xxxxx", "error"),
    call("counter_nothing"): ("[]", None),
    call("counter_several"): ("one\ntwo", None),
    call("counter_table"): ('{\n  "one": 1\n}', None),
}
"""What the policy says, how the answer begins, and the kind of error it counts as."""


class Script:
    """What verifiers' chat loop asks for the policy's turns: the given messages, then one without calls."""

    def __init__(self, *turns: Any) -> None:
        self._turns = [*turns, SimpleNamespace(tool_calls=None, model_dump=lambda **kwargs: {"role": "assistant"})]

    async def complete(self, messages: list[Any]) -> tuple[Any, list[Any]]:
        return SimpleNamespace(choices=[SimpleNamespace(message=self._turns.pop(0))]), messages

    def reached(self, *seen: Any) -> bool:
        return False


@pytest.fixture
def verifiers_answers(
    monkeypatch: pytest.MonkeyPatch, run_async: Callable[..., Any]
) -> Callable[[vf.Toolset, Sequence[Any]], list[str]]:
    """What verifiers' own chat loop shows the policy for calls, the toolset behind a real MCP server."""
    from verifiers.v1.harnesses.utils import compaction, mcp

    for module, name in ((mcp, "call_mcp"), (compaction, "bound_tool_message"), (compaction, "estimated_tokens")):
        monkeypatch.setattr(core, name, getattr(module, name), raising=False)  # as in the program it bundles

    async def play(toolset: vf.Toolset, calls: Sequence[Any], url: str) -> list[str]:
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:
            config = {"mcpServers": {toolset.server_name: {"url": url}}}
            _, dispatch, servers = await mcp.connect_mcp(config, stack)
            said = SimpleNamespace(tool_calls=calls, model_dump=lambda **kwargs: {"role": "assistant"})
            messages: list[Any] = []
            args = SimpleNamespace(tool_interception_url="", bash=False, edit=False, search=False)
            await core.run_chat_loop(args, Script(said), messages, dispatch, servers, None)
            return [message["content"] for message in messages if message["role"] == "tool"]

    def run(toolset: vf.Toolset, calls: Sequence[Any]) -> list[str]:
        server = MCPServer(toolset.server_name)
        toolset.register(server)
        app = server.streamable_http_app(json_response=True, stateless_http=True)
        with serving_app(app, lifespan="on") as port:
            return run_async(play(toolset, calls, f"http://127.0.0.1:{port}/mcp"))

    return run


def played(play: Play, *said: str) -> tuple[list[str], list[Any], dict[str, float]]:
    """What tools answered a policy that says so a turn, the calls it made, and what was counted."""
    made: list[Any] = []
    answered: list[str] = []

    def reward(trace: vf.Trace) -> float:
        for message in trace.branches[-1].messages:
            made.extend(getattr(message, "tool_calls", None) or ())
            answered.extend([message.content] if message.role == "tool" else [])
        return 1.0

    group = play(environment(own(Counter), reward=reward), says(*said, "done"))
    assert group.failures == ()
    (rollout,) = group.rollouts
    return answered, made, dict(rollout.streams)


def kept(answer: str) -> tuple[str, str]:
    """Head and tail of what is left of a long answer."""
    _, _, left = answer.partition("\n\n")
    head, _, rest = left.partition("\n[")
    return head, rest.partition("]\n")[2]


def wire(calls: Sequence[Any]) -> list[Any]:
    """Calls as an OpenAI client has them."""
    return [
        SimpleNamespace(id=each.id, function=SimpleNamespace(name=each.name, arguments=each.arguments))
        for each in calls
    ]


@pytest.mark.filterwarnings(DATED)
def test_every_answer_is_what_verifiers_own_chat_harness_would_show(
    play: Play, verifiers_answers: Callable[..., list[str]]
) -> None:
    found, calls, _ = played(play, *CALLS)
    for said, answer in zip(CALLS, found, strict=True):
        assert answer.startswith(CALLS[said][0]), said
    assert found == verifiers_answers(Counter(vf.ToolsetConfig()), wire(calls))


@pytest.mark.filterwarnings(DATED)
@pytest.mark.parametrize("tool", ["tell", "complain"])
@pytest.mark.parametrize("size", [20_001, 3_000_000])
def test_of_a_long_answer_is_left_what_verifiers_own_chat_harness_leaves(
    play: Play, verifiers_answers: Callable[..., list[str]], tool: str, size: int
) -> None:
    (found,), calls, _ = played(play, call(f"counter_{tool}", {"size": size}))
    (theirs,) = verifiers_answers(Counter(vf.ToolsetConfig()), wire(calls))
    assert kept(found) == kept(theirs)
    assert found.startswith("Warning: ") and len(found.encode()) < 21_000


@pytest.mark.parametrize("said", CALLS)
def test_calls_are_counted_by_the_kind_of_their_error(play: Play, said: str) -> None:
    _, _, streams = played(play, said)
    kind = CALLS[said][1]
    assert streams.pop("tools/seconds") > 0.0
    assert streams == {
        "tools/calls": 1.0,
        **({"tools/errors": 1.0, f"tools/errors/{kind}": 1.0} if kind is not None else {}),
    }
