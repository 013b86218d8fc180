"""Starting a gateway: only where TLS protects it, only for a run with keys whose payloads fit; else one clear line."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from composer_prime.errors import BadInput
from composer_prime.gateway import serving
from composer_prime.gateway.serving import bound, check_address, serve_run
from composer_prime.gateway.store import open_gateway
from composer_prime.store import keys, open_store, probe_store
from composer_prime.store.base import Store
from composer_prime.sync.start import Founding
from tests.cli.command_line import assert_refused
from tests.gateway.guarded import KEYS, PATIENCE_S, RUN, make_run
from tests.sync.harness import HandSite, make_terms


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_may_ask_without_tls(host: str) -> None:
    check_address(host, behind_tls=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "203.0.113.5", "gateway.example.org"])
def test_other_machines_may_not(host: str) -> None:
    with pytest.raises(BadInput, match=rf"--host \({host}\) is reached from outside .*reverse proxy .*--behind-tls"):
        check_address(host, behind_tls=False)
    check_address(host, behind_tls=True)


def test_the_second_half_of_an_answer_doesn_t_wait_for_an_acknowledgement_of_the_first() -> None:
    with closing(bound("127.0.0.1", 0)) as listener, closing(socket.create_connection(listener.getsockname())):
        accepted, _ = listener.accept()
        with closing(accepted):
            assert accepted.proto == socket.IPPROTO_TCP, "by which asyncio knows that TCP_NODELAY is to be set"


def test_a_run_whose_sites_can_t_be_told_apart_or_whose_payloads_don_t_fit_is_not_served(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(store: Store, words: str, at_most: int = 2**20) -> None:
        with pytest.raises(BadInput, match=words):
            serve_run(store, at_most)

    without_keys, without_owner = (open_store(f"{store.uri}-{name}") for name in ("keys", "owner"))
    HandSite(without_keys, make_terms(), "a", [0.0])
    refused(without_keys, "asks for no keys, and a gateway knows sites by their keys")
    founding = Founding(None, {"a": KEYS["a"].public})
    HandSite(without_owner, make_terms(), "a", [0.0], key=KEYS["a"], founding=founding)
    refused(without_owner, r"has no owner who could admit guests, .* create a run with outer\.owner")
    make_run(store)
    refused(store, r"payloads of run run have up to \d+ bytes, this gateway takes 16 .*more outer.frag", 16)
    monkeypatch.setattr(serving, "MAX_CREATE_BYTES", 16)
    refused(store, r"have up to \d+ bytes, and memory://.* takes 16: use an S3 bucket")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--host", "0.0.0.0"], "is reached from outside this machine"), ([], "holds no run")],
)
def test_what_a_person_can_mend_is_one_line(cli, arguments: list[str], words: str, tmp_path: Path) -> None:
    assert_refused(cli("gateway", tmp_path, "--port", "0", *arguments), words)


@pytest.mark.slow
def test_the_command_serves_a_run_until_it_is_told_to_stop(store_uri: Callable[[str], str], tmp_path: Path) -> None:
    uri = store_uri("file")
    make_run(open_store(uri))
    KEYS["alice"].save(tmp_path / "alice.key")
    command = [sys.executable, "-m", "composer_prime.cli.main", "gateway", uri, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        noted, rest = process.communicate()
    assert "Traceback" not in rest
    lines = [json.loads(line) for line in noted.splitlines()]
    assert lines and {(line["site"], line["status"]) for line in lines} == {("alice", 200)}
