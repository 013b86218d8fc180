"""A verifiers harness that chats inside our process: the recipe's `harness.id = "chat"`.

verifiers' own harnesses start a Python process per rollout (0.7 s). `Harness.launch` allows a loop in the caller's
process as long as every model call goes through the endpoint it is given; this one does that in a few milliseconds.
"""

import asyncio
import sys
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness"]

HARNESS_ID = "chat"

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


class ChatHarnessConfig(vf.HarnessConfig):
    """Nothing of its own: the task says the prompt, the run says how to sample."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """One model call a turn; the reply is left in the trace. Exchanges of several turns work, tools don't."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the conversation to `endpoint` once. A refused call is an exit code other than 0, as of a program:
        verifiers then records the cause that it saw behind the endpoint."""
        body = {"model": ctx.model, "messages": self._conversation(data)}
        headers = {"Authorization": f"Bearer {secret}"}
        async with _session().post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
        return vf.ProgramResult(exit_code=0 if answer.ok else 1, stdout="", stderr="" if answer.ok else text)

    def _conversation(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]


def register() -> None:
    """Let verifiers find the harness by its id: it looks among its own `verifiers.v1.harnesses.<id>` first."""
    sys.modules[f"verifiers.v1.harnesses.{HARNESS_ID}"] = sys.modules[__name__]


async def close_connections() -> None:
    """Close the connections that rollouts on the running loop shared; later rollouts open new ones."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


def _session() -> aiohttp.ClientSession:
    """The running loop's session: verifiers makes a harness per rollout, and a session is dear to open."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        connector = aiohttp.TCPConnector(limit=0)
        _sessions[loop] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    return _sessions[loop]
