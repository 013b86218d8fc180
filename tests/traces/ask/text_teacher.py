"""A text teacher's server on loopback, in a thread: it counts the dollars that it served, and fails as it is told.

What it answers depends on the request alone, so that two runs get the same answers.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.prices import NANO, Usage, charge
from composer_prime.traces.states import TraceState
from tests.servers.in_thread import serving_handler

Fault = Literal["ok", "lost", "dead", "busy", "broken", "gateway", "text", "foreign", "refused", "key"]
"""lost: it answers, and hangs up before. dead: it hangs up before it works. busy: 429. broken: 500. gateway: 502 over
an answer. text, foreign: a 200 that isn't JSON, or no chat completion. refused: 400."""

STATUS = {"busy": 429, "broken": 500, "gateway": 502, "refused": 400, "key": 401}
GENERATES = {"ok", "lost", "gateway", "text", "foreign"}

PROMPT_USD, COMPLETION_USD = 3.0, 15.0
"""For a million tokens."""

READ_FILE = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read it.", "parameters": {"type": "object"}},
}


def call(path: str, name: str = "read_file") -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": name, "arguments": json.dumps({"path": path})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def trace(number: int, words: str = "", action: Mapping[str, Any] | None = None) -> TraceState:
    """A decision point that differs from those of other numbers."""
    messages = (
        {"role": "system", "content": "You edit files."},
        {"role": "user", "content": f"Look at file {number}. {words}"},
    )
    return TraceState("session", number, None, messages, (READ_FILE,), action or call(f"{number}.py"), "author-model")


@dataclass(frozen=True)
class Listed:
    """A store of these decision points."""

    listed: Sequence[TraceState]

    def states(self) -> Sequence[TraceState]:
        return self.listed


def number_of(body: Mapping[str, Any]) -> int:
    """The number of the decision point that a request is about."""
    return int(body["messages"][1]["content"].split()[3].rstrip("."))


def by_content(body: Mapping[str, Any]) -> dict[str, Any]:
    """One of three calls, by the question."""
    return call("abc"[hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0] % 3])


def lacks_a_result(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call is followed by another message than its result, which OpenAI's servers refuse."""
    open_calls: set[Any] = set()
    for message in messages:
        if message.get("role") == "tool":
            open_calls.discard(message.get("tool_call_id"))
        elif open_calls:
            return True
        else:
            open_calls = {each.get("id") for each in message.get("tool_calls") or ()}
    return bool(open_calls)


@dataclass
class FakeTextTeacher:
    """What the server does, and what it saw; all may be set while it serves.

    says          the assistant's message to a request's body
    fault         what goes wrong with the nth request, from 0
    factor        it charges so many times its prices
    states_cost   whether its usage states the dollars
    is_greedy     its answers take all tokens that a request allows, at a byte a token
    hook          called with the request's number before and after the answer is made
    """

    says: Callable[[Mapping[str, Any]], dict[str, Any]] = by_content
    fault: Callable[[int], Fault] = lambda number: "ok"
    factor: int = 1
    states_cost: bool = False
    is_greedy: bool = False
    finish_reason: str = "stop"
    hook: Callable[[int, str], object] = lambda number, when: None
    retry_after: str | None = "0"
    words: str | None = None
    """Of an error; None: the fault's name."""
    usage_tells: bool = False
    """Whether GET /usage?key= tells what each call cost."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    costs: dict[str | None, int] = field(default_factory=dict)
    """Nano-dollars by X-Request-Id."""
    served_nano: int = 0
    """Nano-dollars of all that it wrote, whoever got it."""

    @property
    def served_usd(self) -> float:
        return self.served_nano / NANO

    def config(self, url: str, **settings: Any) -> TextTeacher:
        """The table that names this server."""
        defaults: dict[str, Any] = {
            "name": "teacher",
            "model": "big",
            "usd_per_million_prompt_tokens": PROMPT_USD,
            "usd_per_million_completion_tokens": COMPLETION_USD,
            "max_tokens": 200,
        }
        return TextTeacher(base_url=url, **(defaults | settings))

    def answer(self, raw: bytes, config: TextTeacher, call_id: str | None = None) -> dict[str, Any]:
        """The chat completion to a request, which is charged."""
        body = json.loads(raw)
        message = self.says(body)
        prompt = len(raw) if self.is_greedy else len(raw) // 4
        limit = body.get("max_completion_tokens") or body["max_tokens"]
        completion = limit if self.is_greedy else len(json.dumps(message)) // 4
        cost = self.factor * charge(config, Usage(prompt, 0, 0, completion))
        with self.lock:
            self.served_nano += cost
            self.costs[call_id] = self.costs.get(call_id, 0) + cost
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if self.states_cost:
            usage["cost"] = cost / NANO
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        return {"model": f"{body['model']}-2026", "choices": [choice], "usage": usage}


@contextmanager
def serving(teacher: FakeTextTeacher) -> Iterator[str]:
    """Serve it; its base URL is yielded."""
    prices = teacher.config("http://127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            cost = teacher.costs.get(self.path.partition("=")[2])
            told = {"cost": None if cost is None else cost / NANO}
            self._send(200 if teacher.usage_tells else 500, json.dumps(told))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            with teacher.lock:
                number = len(teacher.bodies)
                teacher.bodies.append(json.loads(raw))
                teacher.keys.append(self.headers["Authorization"])
                teacher.headers.append({**dict(self.headers), "path": self.path})
            fault = teacher.fault(number)
            if lacks_a_result(teacher.bodies[number]["messages"]):
                fault = "refused"
            teacher.hook(number, "before")
            call_id = self.headers["X-Request-Id"]
            answer = teacher.answer(raw, prices, call_id) if fault in GENERATES else None
            teacher.hook(number, "after")
            if fault in ("lost", "dead"):
                self.close_connection = True
            elif fault == "text":
                self._send(200, "<html>")
            elif fault == "foreign":
                self._send(200, json.dumps({"usage": (answer or {})["usage"]}))
            elif fault != "ok":
                self._send(STATUS[fault], json.dumps({"error": {"message": teacher.words or fault}}))
            else:
                self._send(200, json.dumps(answer))

        def _send(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 429 and teacher.retry_after is not None:
                self.send_header("Retry-After", teacher.retry_after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # who asked was killed
                super().handle()

    with serving_handler(Handler) as url:
        yield url
