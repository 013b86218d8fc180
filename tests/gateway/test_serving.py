"""Starting a gateway: only where TLS protects it, only for a run with keys whose payloads fit; else one clear line."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from composer_prime.errors import BadInput
from composer_prime.gateway.served import serve_run
from composer_prime.gateway.serving import Listening, check_address
from composer_prime.store import keys, open_store, probe_store
from composer_prime.store.gateway import open_gateway
from composer_prime.sync.start import Founding
from tests.cli.command_line import call
from tests.gateway.guarded import KEYS, PATIENCE_S, RUN, make_run
from tests.sync.harness import HandSite, make_terms


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_may_ask_without_tls(host: str) -> None:
    check_address(Listening(host, 80))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "203.0.113.5", "gateway.example.org"])
def test_other_machines_may_not(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"--host \({host}\) is reached from outside .*--behind-tls .*--certfile"):
        check_address(Listening(host, 80))
    check_address(Listening(host, 80, behind_tls=True))
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    check_address(Listening(host, 443, certfile=tmp_path / "cert.pem", keyfile=tmp_path / "key.pem"))


def test_certificates_that_aren_t_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no file: name the certificate"):
        check_address(Listening("0.0.0.0", 443, certfile=tmp_path / "absent.pem"))
    with pytest.raises(BadInput, match="--keyfile needs --certfile"):
        check_address(Listening("127.0.0.1", 443, keyfile=tmp_path / "key.pem"))


def test_a_run_without_keys_is_refused() -> None:
    store = open_store("memory://serving-no-keys")
    HandSite(store, make_terms(), "a", [0.0])
    with pytest.raises(BadInput, match="asks for no keys, and a gateway knows sites by their keys"):
        serve_run(store, 2**20)


def test_a_run_that_can_have_no_guests_isn_t_served() -> None:
    store = open_store("memory://serving-without-owner")
    HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"], founding=Founding(None, {"a": KEYS["a"].public}))
    with pytest.raises(BadInput, match=r"has no owner who could admit guests, .* create a run with outer\.owner"):
        serve_run(store, 2**20)


def test_payloads_that_don_t_fit_are_found_at_the_start() -> None:
    store = open_store("memory://serving-too-large")
    make_run(store)
    with pytest.raises(
        BadInput, match=r"payloads of run run have up to \d+ bytes, this gateway takes 16 .*more outer.frag"
    ):
        serve_run(store, 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "is reached from outside this machine"),
        (["--audit", "/no/such/folder/audit"], "--audit /no/such/folder/audit can't be written"),
        ([], "holds no run"),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = call(capsys, monkeypatch, "gateway", str(tmp_path), "--port", "0", *arguments)
    assert answer.code == 2 and words in answer.err and answer.err.count("\n") == 1


@pytest.mark.slow
def test_the_command_serves_a_run_until_it_is_told_to_stop(store_uri: Callable[[str], str], tmp_path: Path) -> None:
    uri, audit = store_uri("file"), tmp_path / "audit.jsonl"
    make_run(open_store(uri))
    KEYS["alice"].save(tmp_path / "alice.key")
    command = [sys.executable, "-m", "composer_prime.cli.main", "gateway", uri, "--port", "0", "--audit", str(audit)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        first, second, third = (process.stderr.readline() for _ in range(3))
        assert first.startswith("gateway for run run: listening at http://127.0.0.1:")
        root = first.split()[-1]
        assert f"gateway+https://YOUR-HOST/{RUN} (here: gateway+{root}/{RUN})" in second
        assert third.startswith(f"composer-prime invite {uri} --name NAME")
        assert third.endswith(f"--gateway gateway+https://YOUR-HOST/{RUN}\n")
        assert httpx.get(f"{root}/health", trust_env=False, timeout=PATIENCE_S).json()["run"] == RUN
        store = open_gateway("http", f"{root.removeprefix('http://')}/{RUN}", tmp_path / "alice.key")
        probe_store(store)
        assert keys.manifest() in store.list("")
        store.close()
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        rest = process.stderr.read()
        process.stderr.close()
    assert "Traceback" not in rest
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert lines and {(line["site"], line["verdict"]) for line in lines} == {("alice", "allowed")}
