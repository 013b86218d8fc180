"""A job's log over a connection of its own, from where it was left: a lost connection neither loses nor doubles a line.

The host sends the log's bytes from an offset; what counts as read is whole lines, so that after a reconnect the rest
of a line comes again with its beginning.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any

import asyncssh

from composer_prime.executors.ssh.connection import MARK, TRANSIENT, Host

_CHUNK_BYTES = 1 << 16


async def read_lines(host: Host, job: str, *, follow: bool) -> AsyncGenerator[list[str], None]:
    """Batches of the log's lines, without their ends, from its start; with `follow` until the job has ended.

    Raises as `Host.call`; patience begins anew with every batch, and when a connection had lasted.
    """
    reading = _Reading(host, job, follow)
    try:
        while True:
            lines, ended = await host.repeated(reading.next)
            if lines:
                yield lines
            if ended:
                return
    finally:
        await reading.close()


class _Reading:
    """One log; `next` may be called again after it failed."""

    def __init__(self, host: Host, job: str, follow: bool) -> None:
        self._host = host
        self._job = job
        self._follow = follow
        self._offset = 0
        self._partial = b""
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._connection: Any = None
        self._opened_at = 0.0

    async def next(self) -> tuple[list[str], bool]:
        """(whole lines that came, whether that was all). A last line without an end counts once that is known."""
        try:
            if self._process is None:
                self._process = await self._open()
            data = await self._process.stdout.read(_CHUNK_BYTES)
            if data:
                return self._take(data), False
            await self._finished(self._process)
        except BaseException as error:
            lasted = self._process is not None and time.monotonic() - self._opened_at >= self._host.patience.lasted_s
            await self.close()
            if lasted and isinstance(error, TRANSIENT):
                return [], False
            raise
        return [_text(self._partial)] if self._partial else [], True

    async def close(self) -> None:
        """Let go of the connection; a half line will come again."""
        connection, self._connection, self._process, self._partial = self._connection, None, None, b""
        if connection is not None:
            await connection.__aexit__(None, None, None)

    async def _open(self) -> asyncssh.SSHClientProcess[bytes]:
        self._connection = self._host.connection()
        try:
            connection = await self._connection.__aenter__()
        except BaseException:
            self._connection = None
            raise
        process = await connection.create_process(self._host.command, encoding=None)
        arguments = {"job": self._job, "offset": self._offset, "follow": self._follow}
        process.stdin.write(self._host.request("logs", arguments))
        while not (line := await process.stdout.readline()).startswith(MARK):
            if not line:
                await self._finished(process)
                raise asyncssh.ConnectionLost("the log ended before it began")
        self._host.answer(line)
        self._opened_at = time.monotonic()
        return process

    async def _finished(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        """Returns when the host says that this was all."""
        complaint = await process.stderr.read()
        await process.wait_closed()
        if process.exit_status is None:
            raise asyncssh.ConnectionLost("the connection was lost while reading a log")
        if process.exit_status:
            raise self._host.failure(process.exit_status, complaint.decode(errors="replace"))

    def _take(self, data: bytes) -> list[str]:
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._offset += sum(len(line) + 1 for line in whole)
        return [_text(line) for line in whole]


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
