"""What stands around a vLLM server and needs none to be tested: its folder, its start, its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.inference.engine import GenerateRequest, Sampling
from composer_prime.sites.embedded.inference.vllm_engine import VllmEngine
from composer_prime.sites.embedded.inference.vllm_folder import make_whole_folder, tied_names
from composer_prime.sites.embedded.model import load_policy
from tests.patience import PATIENCE_S
from tests.sites.tiny_folder import save_random_tiny

FAKE_VLLM = f"""#!{sys.executable}
import json, os, stat, sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

class Vllm(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def address_string(self):
        return "socket"

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if os.environ.get("VLLM_API_KEY"):
            self.send_error(401)
            return
        choice = {{"token_ids": [7], "logprobs": {{"content": [{{"logprob": -0.5}}]}}, "finish_reason": "length"}}
        self.answer(json.dumps({{"choices": [choice], "prompt_logprobs": SCORES}}).encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

assert "--port" not in sys.argv and "--host" not in sys.argv
place = Path(sys.argv[sys.argv.index("--uds") + 1])
assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
UnixStreamServer(str(place), Vllm).serve_forever()
"""
START_SERVER = """
import sys
from pathlib import Path
from composer_prime.sites.embedded.inference.vllm_server import VllmServer

python, log = map(Path, sys.argv[1:])
server = VllmServer(log.parent, python=python, log=log, seed=0, max_batch_size=1, max_model_len=16)
print(server._child.pid, flush=True)
sys.stdin.readline()
server.close()
"""


def engine(model_dir: Path, python: Path, tmp_path: Path) -> VllmEngine:
    return VllmEngine(
        model_dir,
        python=python,
        log=tmp_path / "logs" / "vllm.log",
        seed=0,
        max_batch_size=4,
        max_model_len=64,
        on_failure=lambda error: pytest.fail(f"{error}"),
    )


def start_and_close(engine: VllmEngine) -> None:
    async def run() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_whole_folder_is_the_new_policy_with_its_head_spelled_out(tmp_path: Path) -> None:
    model_dir, newer = save_random_tiny(tmp_path / "model"), save_random_tiny(tmp_path / "newer", seed=1)
    published = tmp_path / "step_1"
    published.mkdir()
    save_file(load_file(newer / "model.safetensors"), published / "model.safetensors")
    tied = tied_names(load_policy(model_dir))
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    whole = tmp_path / "whole"
    whole.mkdir()
    make_whole_folder(whole, model_dir=model_dir, weight_dir=published, tied=tied)
    policy, expected = AutoModelForCausalLM.from_pretrained(whole), load_policy(newer)
    assert policy.lm_head.weight is not policy.model.embed_tokens.weight
    tokens = torch.arange(20)[None]
    assert torch.equal(policy(input_ids=tokens).logits, expected(input_ids=tokens).logits)
    assert {file.name for file in whole.iterdir()} >= {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"] is True


def test_weights_in_several_files_are_linked_by_their_index(tmp_path: Path) -> None:
    model_dir = save_random_tiny(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, half in halves.items():
        save_file({name: weights[name] for name in half}, model_dir / file)
    save_file(weights, model_dir / "consolidated.safetensors")  # the same again, as some hub repositories have it
    index = {name: file for file, half in halves.items() for name in half}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    whole = tmp_path / "whole"
    whole.mkdir()
    make_whole_folder(whole, model_dir=model_dir, weight_dir=model_dir, tied={})
    linked = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: (whole / link).resolve().name for name, link in linked.items()} == index
    assert len(list(whole.glob("*.safetensors"))) == len(halves)


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    model_dir = save_random_tiny(tmp_path / "model")
    with pytest.raises(BadInput, match=r"inference\.python \(/no/such/python\) is no file"):
        start_and_close(engine(model_dir, Path("/no/such/python"), tmp_path))


def test_a_server_that_ends_while_it_starts_shows_its_last_words(tmp_path: Path) -> None:
    model_dir = save_random_tiny(tmp_path / "model")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named vllm'\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(
        SiteError, match=r"vLLM ended with exit code 1: the end of .*vllm\.log:\n.*No module named vllm"
    ):
        start_and_close(engine(model_dir, python, tmp_path))


def scores_of(answered: object, tmp_path: Path) -> object:
    """What the engine makes of these prompt logprobs from a vLLM server."""
    python = tmp_path / "python"
    python.write_text(FAKE_VLLM.replace("SCORES", repr(answered)))
    python.chmod(0o755)
    one = engine(save_random_tiny(tmp_path / "model"), python, tmp_path)

    async def ask() -> object:
        try:
            await one.start()
            sampling = Sampling(max_tokens=1)
            return (await one.generate(GenerateRequest("id", (5, 6, 7), sampling, prompt_logprobs=1))).prompt_logprobs
        finally:
            await one.close()

    return asyncio.run(ask())


def test_a_prompt_token_that_vllm_has_no_entry_for_has_no_scores_and_the_others_keep_theirs(tmp_path: Path) -> None:
    assert scores_of([None, None, {"7": {"logprob": -0.5}}], tmp_path) == [{}, {7: -0.5}]


def test_a_key_exported_for_the_users_own_vllm_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")  # vLLM's own variable: it would refuse us
    assert scores_of([None, None, None], tmp_path) == [{}, {}]


def test_scores_of_another_shape_than_vllms_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="vLLM's answer has another shape"):
        scores_of([None, [-0.5], {"7": {"logprob": -0.5}}], tmp_path)


@pytest.mark.parametrize("orderly", [True, False])
def test_all_that_a_server_started_ends_with_us(tmp_path: Path, orderly: bool) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {ready}\nwait\n")  # as vLLM: a child that would outlive it
    python.chmod(0o755)
    command = [sys.executable, "-c", START_SERVER, str(python), str(tmp_path / "vllm.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None and ours.stdin is not None
        server = psutil.Process(int(ours.stdout.readline()))
        worker = psutil.Process(int(ready.read_text()))
        if orderly:
            ours.stdin.write("\n")
            ours.stdin.flush()
        else:
            ours.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs([server, worker], timeout=PATIENCE_S)
        assert not alive
