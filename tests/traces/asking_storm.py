"""`python -m tests.traces.asking_storm --points 85000 --in-flight 32 --kills 10`: asking, killed again and again.

It makes logs of 170 calls, ingests them, serves two teachers from a process of their own, and runs `replay ask` until
it ends by itself, with SIGKILL in between. Then the ledger is compared with what the servers counted.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from composer_prime.traces.ask.folder import AnswerFolder
from composer_prime.traces.ask.prices import NANO
from tests.architecture import REPOSITORY

CALLS = 170
"""Of a session."""
PROMPT_NANO, COMPLETION_NANO = 1000, 5000
"""Dollars of a million tokens are a thousandth of nano-dollars of one."""
COMPLETION_TOKENS = 20
TIMEOUT_S = 20.0
BASH = {"type": "function", "function": {"name": "Bash", "description": "Run it.", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Outcome:
    """What a storm came to; dollars in nano-dollars.

    num_twice  questions that were asked although their answer was stored
    num_again  calls for a question that had been asked before; num_unnamed: those of them without a lost call before
    """

    num_points: int
    num_answered: int
    num_twice: int
    num_again: int
    num_unnamed: int
    ledger: int
    served: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.num_points} points, {self.num_answered} answers in {self.seconds:.0f} s "
            f"({self.num_answered / self.seconds:.0f} a second)\n"
            f"asked twice although stored: {self.num_twice}\n"
            f"asked again: {self.num_again}, of which the ledger doesn't name as lost: {self.num_unnamed}\n"
            f"ledger: ${self.ledger / NANO:.9f}, servers' count: ${self.served / NANO:.9f}"
        )


def write_logs(folder: Path, num_points: int, words: int = 8) -> None:
    """Logs of OpenAI chat with so many decision points; `words` of nine bytes or so in each result."""
    folder.mkdir()
    for number in range(-(-num_points // CALLS)):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Repair module {number}."}]
        for turn in range(min(CALLS, num_points - number * CALLS)):
            function = {"name": "Bash", "arguments": json.dumps({"command": f"sed -n {turn}p m{number}.py"})}
            call = {"id": f"c{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = " ".join(f"line{number}_{turn}_{place}" for place in range(words))
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": result})
        (folder / f"{number}.json").write_text(json.dumps({"messages": messages, "tools": [BASH]}))


def composer_prime(*words: str) -> list[str]:
    return [sys.executable, "-m", "composer_prime.cli.main", "replay", *words]


def storm(folder: Path, num_points: int, in_flight: int, num_kills: int, tells_usage: bool = True) -> Outcome:
    """Ask and be killed, then end; what it came to."""
    write_logs(folder / "logs", num_points)
    ingest = composer_prime("ingest", str(folder / "logs"), "--to", str(folder / "traces"))
    subprocess.run(ingest, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "tests.traces.asking_storm", "--serve"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            return _ask(folder, url, num_points, in_flight, num_kills, tells_usage)
        finally:
            server.kill()


def _ask(folder: Path, url: str, num_points: int, in_flight: int, num_kills: int, tells_usage: bool) -> Outcome:
    file, answers = folder / "teachers.toml", AnswerFolder(folder / "answers")
    file.write_text("".join(_table(url, name, in_flight // 2, tells_usage) for name in ("one", "two")))
    ask = ["ask", str(folder / "traces"), "--teachers", str(file), "--to", str(answers.root), "--ceiling-usd", "100000"]
    start = time.monotonic()
    for kill in range(num_kills):
        with subprocess.Popen(composer_prime(*ask), cwd=REPOSITORY, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and _count(url)["answers"] < 2 * num_points * (kill + 1) // (num_kills + 1):
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
    quiet = {"cwd": REPOSITORY, "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run(composer_prime(*ask), check=True, **quiet)  # pyright: ignore[reportCallIssue, reportArgumentType]
    seconds = time.monotonic() - start
    while tells_usage and _num_lost(answers):  # those that never came there are settled once TIMEOUT_S is over
        subprocess.run(composer_prime(*ask), check=True, **quiet)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return _judged(answers, num_points, _count(url)["served"], seconds)


def _num_lost(answers: AnswerFolder) -> int:
    with answers.copied() as copy:
        return len(copy.ledger.lost())


def _judged(answers: AnswerFolder, num_points: int, served: int, seconds: float) -> Outcome:
    is_answered, num_lost = set(), Counter()
    num_twice = num_again = num_unnamed = num_answered = 0
    seen: set[str] = set()
    for record in answers.ledger():  # in the order in which they were sent
        num_twice += record.key in is_answered
        num_again += record.key in seen
        num_unnamed += record.key in seen and not num_lost[record.key]
        seen.add(record.key)
        num_lost[record.key] += record.outcome == "lost"
        if record.outcome in ("answered", "unusable"):
            is_answered.add(record.key)
            num_answered += 1
    with answers.copied() as copy:
        ledger = copy.ledger.committed
    return Outcome(num_points, num_answered, num_twice, num_again, num_unnamed, ledger, served, seconds)


def _table(url: str, name: str, in_flight: int, tells_usage: bool) -> str:
    settings = {
        "name": name,
        "base_url": url,
        "model": name,
        "usd_per_million_prompt_tokens": PROMPT_NANO / 1000,
        "usd_per_million_completion_tokens": COMPLETION_NANO / 1000,
        "max_in_flight": in_flight,
        "timeout_s": TIMEOUT_S,
        "max_tokens": 100,
    } | ({"usage_url": f"{url}/usage"} if tells_usage else {})
    return "[[teachers]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def _count(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/count", timeout=60) as answer:
        return json.load(answer)


class Server(asyncio.Protocol):
    """One connection to the teachers: counts what it charges, and tells what each call cost."""

    costs: ClassVar[Counter[str]] = Counter()
    num_answers = 0

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            start, *lines = self._data[:end].decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            size = int(headers.get("content-length", 0))
            if len(self._data) < end + 4 + size:
                return
            self._data = self._data[end + 4 + size :]
            path = start.split()[1]
            if path == "/count":
                self._send({"answers": Server.num_answers, "served": sum(Server.costs.values())})
            elif path.startswith("/usage?key="):
                cost = Server.costs.get(path.partition("=")[2])
                self._send({"cost": None if cost is None else cost / NANO})
            else:
                self._answer(headers["x-request-id"], size // 4)

    def _answer(self, call: str, prompt: int) -> None:
        Server.costs[call] += prompt * PROMPT_NANO + COMPLETION_TOKENS * COMPLETION_NANO
        Server.num_answers += 1
        function = {"name": "Bash", "arguments": '{"command": "make"}'}
        message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
        usage = {"prompt_tokens": prompt, "completion_tokens": COMPLETION_TOKENS}
        self._send({"model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage})

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=85000)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--no-usage", action="store_true", help="The servers don't tell what lost calls cost.")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return asyncio.run(_serve())
    with tempfile.TemporaryDirectory() as folder:
        print(storm(Path(folder), given.points, given.in_flight, given.kills, not given.no_usage))


if __name__ == "__main__":
    main()
