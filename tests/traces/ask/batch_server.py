"""OpenAI's batch API on loopback, over a text teacher that answers each line."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from tests.servers.in_thread import serving_handler
from tests.traces.ask.text_teacher import FakeTextTeacher


@dataclass
class FakeBatches:
    """is_done: whether batches have ended. forgets: after a batch is made, its answer is lost."""

    teacher: FakeTextTeacher
    prices: TextTeacher
    is_done: bool = True
    forgets: bool = False
    ends: str = "completed"
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    polled: threading.Event = field(default_factory=threading.Event)

    def make(self, wanted: dict[str, Any]) -> dict[str, Any]:
        id = f"batch_{len(self.batches)}"
        lines = [json.loads(line) for line in self.files[wanted["input_file_id"]].splitlines()]
        out = []
        for line in lines if self.ends == "completed" else lines[:1]:
            self.teacher.bodies.append(line["body"])
            answer = self.teacher.answer(_compact(line["body"]), self.prices, line["custom_id"])
            out.append({"custom_id": line["custom_id"], "response": {"status_code": 200, "body": answer}})
        self.files[f"out_{id}"] = "\n".join(map(json.dumps, out)).encode()
        self.batches[id] = {"id": id, "metadata": wanted["metadata"], "output_file_id": f"out_{id}"}
        return self.show(id)

    def show(self, id: str) -> dict[str, Any]:
        return {**self.batches[id], "status": self.ends if self.is_done else "in_progress"}


def _compact(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@contextmanager
def serving_batches(fake: FakeBatches) -> Iterator[str]:
    """Serve it; its base URL is yielded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if found := re.fullmatch(r"/v1/files/(\w+)/content", self.path):
                return self._send(fake.files[found[1]])
            if found := re.fullmatch(r"/v1/batches/(\w+)", self.path):
                fake.polled.set()
                return self._send(json.dumps(fake.show(found[1])).encode())
            self._send(json.dumps({"data": [fake.show(id) for id in fake.batches]}).encode())

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/files":
                start = raw.index(b"\r\n\r\n", raw.index(b'name="file"')) + 4
                fake.files[f"in_{len(fake.files)}"] = raw[start : raw.rindex(b"\r\n--")]
                return self._send(json.dumps({"id": [*fake.files][-1]}).encode())
            made = fake.make(json.loads(raw))
            if fake.forgets:
                self.close_connection = True
            else:
                self._send(json.dumps(made).encode())

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with serving_handler(Handler) as url:
        yield url
