"""`composer-prime replay`: a mistake is one line, and a file of traces is served until it is interrupted."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from composer_prime.bearer import headers, user_token
from composer_prime.sites.embedded.ports import HOST, claim_port, listen
from tests.architecture import REPOSITORY
from tests.patience import PATIENCE_S


def test_a_file_without_traces_and_a_port_in_use_are_refused_with_one_line(cli, tmp_path: Path) -> None:
    port = str(claim_port(None, set()))
    answer = cli("replay", "serve", str(tmp_path / "gone.jsonl"), "--port", port)
    assert answer.code == 2 and "gone.jsonl can't be read" in answer.err and answer.err.count("\n") == 1
    with listen(int(port)):
        answer = cli("replay", "teacher", "tiny", "--port", port)
    assert answer.code == 2 and f"--port ({port}) can't be listened on" in answer.err and answer.err.count("\n") == 1


def test_stored_traces_are_served_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, file = claim_port(None, set()), tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"token_ids": [1, 2, 3], "mask": [False, False, True]}) + "\n")
    command = [sys.executable, "-m", "composer_prime.cli.main", "replay", "serve", str(file), "--port", str(port)]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"1 turns for 1 prompts, as replay on http://{HOST}:{port}\n"
        with httpx.Client(base_url=f"http://{HOST}:{port}", headers=headers(user_token()), trust_env=False) as http:
            answer = http.post("/inference/v1/generate", json={"token_ids": [1, 2], "sampling_params": {}})
        assert answer.json()["choices"][0]["token_ids"] == [3]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
