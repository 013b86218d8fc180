"""The inference server as a process of its own: how it starts, is spoken to over a socket, and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import generate
from renderers.configs import Qwen3RendererConfig

from composer_prime.bearer import SITE_TOKEN, headers, new_token
from composer_prime.config import SiteSettings
from composer_prime.sites.embedded.broadcasts import publish
from composer_prime.sites.embedded.model import load_policy
from composer_prime.sites.embedded.ports import claim_port
from tests.patience import PATIENCE_S
from tests.sites.letters_site import letters_site
from tests.sites.tiny_folder import save_random_tiny, score
from tiny_policy.qwen3 import tiny_tokenizer

TOKEN = new_token()
MESSAGES: list[Any] = [{"role": "user", "content": "Reverse: abcd"}]


@dataclass
class Process:
    """A server that was started, and what it printed once it has ended."""

    settings: SiteSettings
    popen: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.inference_port}"

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.popen.poll() is None, self.popen.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal it; exit code, and what it printed to stderr."""
        self.popen.send_signal(number)
        _, errors = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, errors


def start(output_dir: Path, model_dir: Path, port: int | None = None, **tables: Any) -> Process:
    port = port or claim_port(None, set())
    return serving(letters_site(output_dir, model_dir=model_dir, port=port, **tables))


def serving(settings: SiteSettings) -> Process:
    command = [sys.executable, "-m", "composer_prime.sites.embedded.inference", str(settings.paths.root)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", SITE_TOKEN: TOKEN}
    return Process(settings, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Process]:
    process = start(tmp_path_factory.mktemp("served"), model_dir)
    try:
        process.wait_healthy()
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


def test_renderers_own_client_gets_tokens_and_their_logprobs(server: Process, model_dir: Path, run_async) -> None:
    renderer = create_renderer(tiny_tokenizer(), Qwen3RendererConfig(enable_thinking=False))

    async def ask() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=TOKEN) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=MESSAGES,
                model="tiny",
                sampling_params={"temperature": 1.0, "max_tokens": 8, "seed": 1},
            )

    result = run_async(ask())
    assert result["prompt_ids"] == renderer.render_ids(MESSAGES, add_generation_prompt=True)
    assert 1 <= len(result["completion_ids"]) <= 8
    expected = score(load_policy(model_dir), result["prompt_ids"], result["completion_ids"])
    assert result["completion_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_server_that_is_started_again_has_the_newest_weights_from_its_first_answer_on(
    tmp_path: Path, model_dir: Path
) -> None:
    process = start(tmp_path, model_dir)
    process.wait_healthy()
    publish(load_policy(model_dir), process.settings.paths.broadcasts, 3)
    process.end(signal.SIGKILL)
    again = serving(process.settings)
    again.wait_healthy()
    assert httpx.get(f"{again.url}/health", headers=headers(TOKEN)).json()["policy_version"] == 3
    again.end(signal.SIGKILL)


def test_many_connections_are_answered_and_carry_the_version(server: Process, run_async) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers(TOKEN), timeout=PATIENCE_S, limits=httpx.Limits(max_connections=64)
        ) as http:
            body = {"token_ids": list(range(38)), "sampling_params": {"max_tokens": 6}}
            return await asyncio.gather(*(http.post("/inference/v1/generate", json=body) for _ in range(64)))

    answers = run_async(ask())
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["policy_version"] for answer in answers} == {0}
    assert {answer.headers["x-policy-version"] for answer in answers} == {"0"}
    assert len({json.dumps(answer.json()["choices"]) for answer in answers}) > 32, "requests share no randomness"


def test_a_second_server_on_the_port_exits_with_two_and_one_line(server: Process, tmp_path: Path, model_dir) -> None:
    port = server.settings.inference_port
    second = start(tmp_path, model_dir, port=port)
    _, errors = second.popen.communicate(timeout=PATIENCE_S)
    assert second.popen.returncode == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith(f"error: inference.server.port ({port}) can't be listened on") and "another port" in line


def test_sigterm_ends_it_in_the_middle_of_requests(tmp_path: Path, model_dir: Path) -> None:
    process = start(tmp_path, model_dir, seq_len=2048)
    process.wait_healthy()
    body = json.dumps({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2000, "temperature": 1e-6}}).encode()
    lines = (
        "POST /inference/v1/generate HTTP/1.1",
        f"Host: localhost:{process.settings.inference_port}",
        f"Authorization: Bearer {TOKEN}",
    )
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {len(body)}", "")).encode()
    with socket.create_connection(("127.0.0.1", process.settings.inference_port)) as connection:
        connection.sendall(head + body)
        httpx.get(f"{process.url}/health").raise_for_status()  # answered after the request was read
        exit_code, errors = process.end()
        answer = connection.recv(4096)
    assert exit_code == 0, errors
    assert answer.startswith(b"HTTP/1.1 503"), "it waited for 2000 tokens"
    assert "Traceback" not in errors


def test_a_client_that_hangs_up_in_the_middle_of_its_request_leaves_no_traceback(
    tmp_path: Path, model_dir: Path
) -> None:
    process = start(tmp_path, model_dir)
    process.wait_healthy()
    name, value = next(iter(headers(TOKEN).items()))
    port = process.settings.inference_port
    asked = f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{name}: {value}\r\nContent-Length: 99\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(asked.encode())
        time.sleep(0.2)
    time.sleep(0.2)
    assert httpx.get(f"{process.url}/health", timeout=PATIENCE_S).status_code == 200
    code, errors = process.end()
    assert code == 0 and "Traceback" not in errors and "ClientDisconnect" not in errors, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_quietly(tmp_path: Path, model_dir: Path, number: int) -> None:
    process = start(tmp_path, model_dir)
    while not _is_listening(process.settings.inference_port):
        assert process.popen.poll() is None, process.popen.communicate()[1]
        time.sleep(0.01)
    exit_code, errors = process.end(number)
    assert (exit_code, "Traceback" in errors) == (0, False), errors


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_model_folder_that_broke_since_exits_with_two_and_names_it(tmp_path: Path) -> None:
    folder = save_random_tiny(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"garbage")
    process = start(tmp_path / "out", folder)
    _, errors = process.popen.communicate(timeout=PATIENCE_S)
    assert process.popen.returncode == 2
    assert errors.strip().splitlines()[-1].startswith(f"error: model folder {folder} can't be loaded")
    assert "Traceback" not in errors


def test_no_web_page_and_nobody_without_the_token_stops_a_site(server: Process) -> None:
    """What a page in the user's browser can send, and a program of another user."""
    own, as_page = (
        headers(TOKEN),
        {"Content-Type": "text/plain", "Origin": "http://evil.example", "Host": "evil.example"},
    )
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert http.post("/pause", content="{}", headers=as_page).status_code == 403
        assert http.post("/pause", content="{}", headers=own | {"Origin": "http://evil.example"}).status_code == 403
        port = server.settings.inference_port
        for host in (
            "rebound.example",
            f"rebound.example:{port}",
            "127.0.0.1",
            "localhost:1",
            "[::1",
            "localhost:x",
            "",
        ):
            assert http.get("/v1/models", headers=own | {"Host": host}).status_code == 403, host
        for host in (f"localhost:{port}", f"[::1]:{port}"):
            assert http.get("/v1/models", headers=own | {"Host": host}).status_code == 200, host
        for wrong in ({}, headers("guess"), {"Authorization": TOKEN}):
            assert http.post("/pause", headers=wrong).status_code == 401
        answer = http.get("/v1/models", headers=own)
        assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        assert http.post("/inference/v1/generate", json=body, headers=own).status_code == 200, "it was not paused"
