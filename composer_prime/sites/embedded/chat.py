"""A verifiers harness that chats inside our process: the recipe's `harness.id = "chat"`.

verifiers' own harnesses start a Python process per rollout (0.7 s). `Harness.launch` allows a loop in the caller's
process as long as every model call goes through the endpoint it is given; this one does that in a few milliseconds.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import MessageNode

from composer_prime.sites.embedded.tools.stage import this_stage

__all__ = ["ChatHarness"]

HARNESS_ID = "chat"

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


_CONTEXT_FULL = ("shorter than the context", "maximum context length", "context window")
"""How servers say that a prompt is too long for the model, ours first."""


class ChatHarnessConfig(vf.HarnessConfig):
    """Nothing of its own: the task says the prompt and the tools, the run says how to sample."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Model calls and tool calls in turn until a reply calls no tool; all of it is left in the trace."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
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
        """Play one segment through `endpoint`. A refused call is an exit code other than 0, as of a program: verifiers
        then records the cause that it saw behind the endpoint. A context that tools have filled ends the segment well.

        Raises ToolFailure where a tool gives no answer that can be read.
        """
        messages = self.conversation(data)
        async with this_stage() as stage:
            tools, listed = await stage.tools(trace, mcp_urls, self.config.tool_timeout)
            body = {"model": ctx.model, "messages": messages, **({"tools": listed} if listed else {})}
            while True:
                status, text = await _complete(endpoint, secret, body)
                if status != 200:
                    _leave(trace, messages)
                    is_full = status == 400 and trace.num_turns > 0 and any(words in text for words in _CONTEXT_FULL)
                    return vf.ProgramResult(exit_code=0 if is_full else 1, stdout="", stderr=text)
                reply = json.loads(text)["choices"][0]["message"]
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in reply["tool_calls"]:
                    messages.append(await tools.answer(call))

    def conversation(self, data: vf.TaskData) -> list[dict[str, Any]]:
        """What a rollout of a task begins with."""
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]


def _leave(trace: vf.Trace, messages: list[dict[str, Any]]) -> None:
    """Put the answers to a turn's calls into the trace where no turn follows that would show them: what the last call
    did is part of the rollout, and a hint may be made of its error. They have no tokens: the policy never saw them."""
    first = max((place for place, message in enumerate(messages) if message["role"] != "tool"), default=-1) + 1
    for message in messages[first:]:
        trace.nodes.append(MessageNode.model_validate({"parent": len(trace.nodes) - 1, "message": message}))


async def _complete(endpoint: str, secret: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the text of one chat completion's answer."""
    headers = {"Authorization": f"Bearer {secret}"}
    async with _session().post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.text()


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
