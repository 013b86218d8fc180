"""A stand-in for the Hugging Face hub: takes a repository and commits of small files, and keeps what was committed."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.servers.in_thread import serving_handler


class FakeHub:
    """Repositories made (their request bodies), and files by repository and path. `status` refuses everything."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.status = 200
        self.url = ""

    def answer(self, path: str, data: bytes) -> dict[str, Any]:
        """What the hub says to a POST."""
        parts = path.strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            self.made.append(json.loads(data))
            return {"url": f"{self.url}/{self.made[-1].get('organization')}/{self.made[-1]['name']}"}
        if parts[-1] == "validate-yaml":
            return {"errors": [], "warnings": []}
        repository = "/".join(parts[2:4])
        if parts[4] == "preupload":
            asked = [one["path"] for one in json.loads(data)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in asked]}
        lines = [json.loads(line) for line in data.splitlines() if line]
        kept = self.files.setdefault(repository, {})
        for line in lines:
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """A hub on a loopback port of its own; HF_ENDPOINT must name its URL."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            refused = {"error": "the token has no write rights"}
            self._send(hub.status, refused if hub.status >= 400 else hub.answer(self.path.partition("?")[0], data))

        def do_GET(self) -> None:
            self._send(404, {"error": "nothing here"})

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving_handler(Handler) as hub.url:
        yield hub
