"""Tools that give no answer: their rollout fails and says why, and no other one of the group."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import asyncio
import threading
from collections.abc import Iterator

import pytest
import verifiers.v1 as vf
from mcp.server.mcpserver import Image

from composer_prime.sites.embedded.tools import in_process
from tests.sites.tools.conftest import Play
from tests.sites.tools.toolsets import Build, answers, call, each_says, environment, own

WAITING = {"harness": {"tool_timeout": 2.0}}


class Moment:
    """When a faulty call has begun, and when the test lets go of those that block."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()
        self.blocked: list[threading.Thread] = []

    def block(self) -> None:
        self.blocked.append(threading.current_thread())
        self.begun.set()
        self.over.wait()


moment = Moment()


@pytest.fixture(autouse=True)
def a_moment_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that a test blocks end with it."""
    monkeypatch.setattr(in_process, "CLOSE_TIMEOUT_S", 0.5)
    vars(moment).update(vars(Moment()))
    yield
    moment.over.set()
    for thread in moment.blocked:
        thread.join()


class Faulty(vf.Toolset[vf.ToolsetConfig]):
    """Each of its tools fails in another way, but for one, which answers once another has begun to fail."""

    TOOL_PREFIX = None

    @vf.tool
    def fine(self) -> str:
        """Answer."""
        moment.begun.wait()
        return "fine"

    @vf.tool
    def hang(self) -> str:
        """Block."""
        moment.block()
        return "late"

    @vf.tool
    async def hang_async(self) -> str:
        """Wait."""
        moment.begun.set()
        await asyncio.Event().wait()
        return "late"

    @vf.tool
    def leave(self) -> str:
        """Exit."""
        moment.begun.set()
        raise SystemExit(3)

    @vf.tool
    async def leave_async(self) -> str:
        """Exit."""
        moment.begun.set()
        raise SystemExit(3)

    @vf.tool
    def interrupt(self) -> str:
        """Raise what Ctrl-C raises."""
        moment.begun.set()
        raise KeyboardInterrupt

    @vf.tool
    async def leave_behind(self) -> str:
        """Leave a task to exit, and wait."""
        moment.begun.set()

        async def leave() -> None:
            raise SystemExit(3)

        await asyncio.create_task(leave())
        return "late"

    @vf.tool
    async def cancel(self) -> str:
        """Be cancelled from within."""
        moment.begun.set()
        raise asyncio.CancelledError

    @vf.tool
    def image(self) -> Image:
        """Answer with a picture."""
        moment.begun.set()
        return Image(data=b"\x89PNG", format="png")

    @vf.tool
    def surrogates(self) -> str:
        """Answer with what is no text."""
        moment.begun.set()
        return "name \udcff"

    @vf.tool
    def surrogates_raised(self) -> str:
        """Raise an error with what is no text, as for a file of such a name."""
        moment.begun.set()
        raise FileNotFoundError("no file name \udcff")


FAULTS = {
    "hang": "ToolTimeout: tool hang gave no answer within harness.tool_timeout (2 s)",
    "hang_async": "ToolTimeout: tool hang_async gave no answer within harness.tool_timeout (2 s)",
    "leave": "ToolDied: tool leave ended with SystemExit(3)",
    "leave_async": "ToolDied: tool leave_async ended with SystemExit(3)",
    "interrupt": "ToolDied: tool interrupt ended with KeyboardInterrupt()",
    "cancel": "ToolDied: tool cancel",
    "image": "ToolGarbage: tool image answered with image: the policy reads text alone",
    "surrogates": "ToolGarbage: tool surrogates answered with characters that are none (surrogates not allowed)",
    "surrogates_raised": "ToolGarbage: tool surrogates_raised answered with characters that are none",
}
SCOPES: dict[str, dict[str, Build]] = {"own": {"tools": own(Faulty)}, "shared": {"shared": own(Faulty)}}
OTHERS = [call("fine")] * 3


def check(play: Play, scope: str, fault: str, reason: str) -> None:
    """One rollout of a group calls a faulty tool, the others a fine one, and all at the same time."""
    group = play(environment(**SCOPES[scope]), each_says([call(fault), *OTHERS]), size=4, agent=WAITING)
    (failure,) = group.failures
    assert failure.startswith(reason)
    assert [answers(rollout) for rollout in group.rollouts] == [["fine"]] * 3
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tool_that_gives_no_answer_fails_its_rollout_and_no_other(play: Play, scope: str, fault: str) -> None:
    check(play, scope, fault, FAULTS[fault])


def test_a_toolset_whose_loop_a_task_of_its_own_has_ended_fails_its_rollout_and_no_other(play: Play) -> None:
    check(play, "own", "leave_behind", "ToolDied: tool leave_behind")
