"""OpenAI's batch API behind the interface of one request: cheaper, and within a day.

Questions gather until none has come for a moment, and go out together: a file to /v1/files, and its name to
/v1/batches. Which calls are in it is on the disk before, so that a process that is killed meanwhile finds its batch
again: by the id that it noted, else by our own token among the batches that the server lists.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import httpx

from composer_prime.errors import TeacherError
from composer_prime.traces.ask.client import ChatClient, Reply, named
from composer_prime.traces.ask.folder import BatchBook

GATHER_S = 2.0
"""After the last question that came, a batch goes out."""

POLL_S = 30.0
"""Between two looks at a batch."""

MAX_BYTES = 10**8
"""Of a batch's file; OpenAI takes twice that."""

_ENDED = ("completed", "failed", "expired", "cancelled")

log = logging.getLogger(__name__)


class BatchClient:
    """Sends questions in batches through another client's connections. `close` it in the end.

    max_calls  requests a batch
    """

    def __init__(self, client: ChatClient, path: str, book: BatchBook, max_calls: int) -> None:
        self._client, self._path, self._book, self._max_calls = client, path, book, max_calls
        self._waiting: dict[str, bytes] = {}
        self._bodies: dict[str, bytes] = {}
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._early: dict[str, Mapping[str, Any]] = {}  # replies for which nobody has waited yet
        self._last: dict[str, Reply] = {}  # by batch that ended: for calls without a reply
        self._num_came = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Stop looking, and close the connections; batches that are out stay out."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.close()

    async def cost_of(self, call: str, usage_url: str) -> Any:
        """As `ChatClient.cost_of`."""
        return await self._client.cost_of(call, usage_url)

    async def complete(self, body: bytes, call: str) -> Reply:
        """The reply to a question, once its batch has ended; of an earlier process's call, once that batch has.

        Raises TeacherError when the server can't be asked how the batch is: it may still end well.
        """
        if (token := self._book.token_of.get(call)) in self._last and token is not None:
            early = self._early.pop(call, None)
            return self._last[token] if early is None else self._read(early, body)
        reply = self._replies[call] = asyncio.get_running_loop().create_future()
        self._bodies[call] = body
        if token is None:
            await self._gather(call, body)
        elif token not in self._tasks:
            self._tasks[token] = asyncio.create_task(self._follow(token))
        try:
            return await reply
        finally:
            del self._replies[call], self._bodies[call]

    async def _gather(self, call: str, body: bytes) -> None:
        self._waiting[call] = body
        self._num_came += 1
        came = self._num_came
        is_full = len(self._waiting) >= self._max_calls or sum(map(len, self._waiting.values())) > MAX_BYTES
        await asyncio.sleep(0 if is_full else GATHER_S)
        if self._waiting and (is_full or came == self._num_came):
            batch, self._waiting = self._waiting, {}
            token = secrets.token_hex(8)
            await self._book.note(token, calls=list(batch))
            self._tasks[token] = asyncio.create_task(self._send(token, batch))

    async def _send(self, token: str, batch: Mapping[str, bytes]) -> None:
        lines = [
            b'{"custom_id":"%s","method":"POST","url":"%s","body":%s}\n' % (call.encode(), self._path.encode(), body)
            for call, body in batch.items()
        ]
        try:
            file = {"file": ("questions.jsonl", b"".join(lines))}
            up = await self._json("POST", "/v1/files", data={"purpose": "batch"}, files=file)
            made = {
                "input_file_id": up["id"],
                "endpoint": self._path,
                "completion_window": "24h",
                "metadata": {"composer_prime": token},
            }
            await self._book.note(token, id=(await self._json("POST", "/v1/batches", json=made))["id"])
        except httpx.HTTPStatusError as error:
            self._end(token, self._client.read(error.response, next(iter(batch.values()))))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            log.warning("batch=%s event=unsure error=%s", token, named(error))
        await self._follow(token)

    async def _follow(self, token: str) -> None:
        """Look until a batch has ended, and give its replies to those who wait for them."""
        failures = 0
        while self._waits_for(token):
            try:
                if (id := self._book.batches[token]["id"]) is None:
                    if (id := await self._found(token)) is None:
                        self._end(token, Reply(why="the batch never began", is_lost=True))
                        return
                    await self._book.note(token, id=id)
                batch = await self._json("GET", f"/v1/batches/{id}")
                if batch["status"] in _ENDED:
                    await self._deal(token, batch)
                    return
                failures = 0
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                failures += 1
                if failures > 20:
                    self._end(token, TeacherError(f"its batch can't be asked for ({named(error)})"))
                    return
            await asyncio.sleep(POLL_S)

    async def _found(self, token: str) -> str | None:
        """The id of our batch, by our token in the server's newest ones; None where it never came to be."""
        listed = await self._json("GET", "/v1/batches?limit=100")
        return next((b["id"] for b in listed["data"] if (b.get("metadata") or {}).get("composer_prime") == token), None)

    async def _deal(self, token: str, batch: Mapping[str, Any]) -> None:
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                answer = (await self._client.http.get(f"/v1/files/{batch[name]}/content")).raise_for_status()
                for line in map(json.loads, answer.text.splitlines()):
                    self._give(line)
        errors = (batch.get("errors") or {}).get("data") or [{}]
        why = f"the batch {batch['status']} without it: {errors[0].get('message', 'no reason given')}"
        self._end(token, Reply(why=why, is_about_this=batch["status"] == "completed"))

    def _give(self, line: Mapping[str, Any]) -> None:
        call = line["custom_id"]
        if (reply := self._replies.get(call)) is None:
            self._early[call] = line
        elif not reply.done():
            reply.set_result(self._read(line, self._bodies[call]))

    def _read(self, line: Mapping[str, Any], body: bytes) -> Reply:
        response = line.get("response") or {}
        text = json.dumps(response.get("body") or {"error": line.get("error") or {}})
        return self._client.read(httpx.Response(response.get("status_code") or 500, text=text), body)

    def _waits_for(self, token: str) -> list[asyncio.Future[Reply]]:
        waited = [self._replies[call] for call in self._book.batches[token]["calls"] if call in self._replies]
        return [reply for reply in waited if not reply.done()]

    def _end(self, token: str, last: Reply | TeacherError) -> None:
        if isinstance(last, Reply):
            self._last[token] = last
        for reply in self._waits_for(token):
            if isinstance(last, Reply):
                reply.set_result(last)
            else:
                reply.set_exception(last)

    async def _json(self, method: str, path: str, **more: Any) -> Any:
        return (await self._client.http.request(method, path, timeout=600.0, **more)).raise_for_status().json()
