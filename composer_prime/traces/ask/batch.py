"""OpenAI's batch API behind the interface of one request: cheaper, and within a day.

Questions gather until none has come for a moment, and go out together: a file to /v1/files, and its name to
/v1/batches. Which calls are in it is on the disk before, so that a process that is killed meanwhile finds its batch
again: by the id that it noted, else by our own token among the batches that the server lists.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

import httpx

from composer_prime.errors import ComposerPrimeError, TeacherError
from composer_prime.traces.ask.client import ChatClient, Reply, named
from composer_prime.traces.ask.database import Database

GATHER_S = 2.0
"""After the last question that came, a batch goes out."""

POLL_S = 30.0
"""Between two looks at a batch."""

MAX_BYTES = 10**8
"""Of a batch's file; OpenAI takes twice that."""

_ENDED = ("completed", "failed", "expired", "cancelled")
_FAULTS = (httpx.HTTPError, ValueError, KeyError, TypeError)

log = logging.getLogger(__name__)


class BatchClient:
    """Sends questions in batches through another client's connections. `close` it in the end.

    max_calls  requests a batch
    """

    def __init__(self, client: ChatClient, path: str, database: Database, max_calls: int) -> None:
        self._client, self._path, self._database, self._max_calls = client, path, database, max_calls
        query = "SELECT call, token, id FROM calls JOIN batches ON batch = token WHERE outcome = 'reserved'"
        self._out = {call: batch for call, *batch in database.rows(query)}  # of earlier processes
        self._waiting: dict[str, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._body = b""  # any: they differ in messages and tools alone

    async def close(self) -> None:
        """Stop looking, and close the connections; batches that are out stay out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def complete(self, body: bytes, call: str) -> Reply:
        """The reply to a question, once its batch has ended; of an earlier process's call, once that batch has.

        Raises TeacherError when the server can't be asked how the batch is: it may still end well.
        """
        self._body = body
        if call not in self._replies:
            batch = self._out.get(call)
            calls = [call] if batch is None else [one for one, its in self._out.items() if its == batch]
            self._replies |= {one: asyncio.get_running_loop().create_future() for one in calls}
            if batch is None:
                self._gather(call, body)
            else:
                self._begin(self._follow(*batch), calls)
        try:
            return await self._replies[call]
        finally:
            del self._replies[call]

    def _gather(self, call: str, body: bytes) -> None:
        self._waiting[call] = body
        if self._timer is not None:
            self._timer.cancel()
        if len(self._waiting) >= self._max_calls or sum(map(len, self._waiting.values())) > MAX_BYTES:
            self._go()
        else:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._go)

    def _go(self) -> None:
        batch, self._waiting = self._waiting, {}
        self._begin(self._send(batch), batch)

    def _begin(self, work: Awaitable[Reply], calls: Iterable[str]) -> None:
        async def run() -> None:
            try:
                last = await work
                for reply in self._awaited(calls):
                    reply.set_result(last)
            except ComposerPrimeError as error:
                for reply in self._awaited(calls):
                    reply.set_exception(error)

        self._tasks.add(asyncio.create_task(run()))

    def _awaited(self, calls: Iterable[str]) -> list[asyncio.Future[Reply]]:
        """Those of these calls' replies that aren't there yet."""
        replies = [self._replies[call] for call in calls if call in self._replies]
        return [reply for reply in replies if not reply.done()]

    async def _send(self, batch: Mapping[str, bytes]) -> Reply:
        """Make a batch, and follow it; the reply for calls that have no line in its files."""
        token, id = secrets.token_hex(8), None
        put = "UPDATE calls SET batch = ? WHERE call = ?"
        self._database.write(("INSERT INTO batches (token) VALUES (?)", (token,)))
        self._database.write(*((put, (token, call)) for call in batch))
        await self._database.synced()
        line = b'{"custom_id":"%s","method":"POST","url":"%s","body":%s}\n'
        lines = [line % (call.encode(), self._path.encode(), body) for call, body in batch.items()]
        try:
            file = {"file": ("questions.jsonl", b"".join(lines))}
            up = await self._json("POST", "/v1/files", data={"purpose": "batch"}, files=file)
            made = {"endpoint": self._path, "completion_window": "24h", "metadata": {"composer_prime": token}}
            made = await self._json("POST", "/v1/batches", json={**made, "input_file_id": up["id"]})
            id = await self._noted(token, made["id"])
        except httpx.HTTPStatusError as error:
            return self._client.read(error.response, self._body)
        except _FAULTS as error:
            log.warning("batch=%s event=unsure error=%s", token, named(error))
        return await self._follow(token, id)

    async def _follow(self, token: str, id: str | None) -> Reply:
        """Look until a batch has ended, and give out its lines; the reply for calls that have none."""
        failures = 0
        while True:
            try:
                if id is None:
                    listed = (await self._json("GET", "/v1/batches?limit=100"))["data"]
                    ours = [one for one in listed if (one.get("metadata") or {}).get("composer_prime") == token]
                    if not ours:
                        return Reply(why="the batch never began", is_lost=True)
                    id = await self._noted(token, ours[0]["id"])
                batch = await self._json("GET", f"/v1/batches/{id}")
                if batch["status"] in _ENDED:
                    return await self._dealt(batch)
                failures = 0
            except _FAULTS as error:
                failures += 1
                if failures > 20:
                    raise TeacherError(f"its batch can't be asked for ({named(error)})") from None
            await asyncio.sleep(POLL_S)

    async def _noted(self, token: str, id: str) -> str:
        """The server's name for a batch, once it is on the disk."""
        self._database.write(("UPDATE batches SET id = ? WHERE token = ?", (id, token)))
        await self._database.synced()
        return id

    async def _dealt(self, batch: Mapping[str, Any]) -> Reply:
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                answer = (await self._client.http.get(f"/v1/files/{batch[name]}/content")).raise_for_status()
                for line in map(json.loads, answer.text.splitlines()):
                    response = line.get("response") or {}
                    text = json.dumps(response.get("body") or {"error": line.get("error") or {}})
                    found = httpx.Response(response.get("status_code") or 500, text=text)
                    for reply in self._awaited([line["custom_id"]]):
                        reply.set_result(self._client.read(found, self._body))
        errors = (batch.get("errors") or {}).get("data") or [{}]
        why = f"the batch {batch['status']} without it: {errors[0].get('message', 'no reason given')}"
        return Reply(why=why, is_about_this=batch["status"] == "completed")

    async def _json(self, method: str, path: str, **more: Any) -> Any:
        return (await self._client.http.request(method, path, timeout=600.0, **more)).raise_for_status().json()
