"""Two gateway processes on one bucket: one run, a volunteer at each, and one gateway that is killed in its middle.

An invitation names one address. So a volunteer at a balancer before both goes on by the other gateway, and one that
knows only the killed gateway goes on, with nothing lost, once it runs again at its address: a gateway has no state.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from composer_prime.gateway.client import Place, Unanswered
from composer_prime.gateway.store import GatewayStore
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.records import Commit
from tests.gateway.guarded import KEYS, PATIENCE_S, RUN, SAFE, founding, make_run
from tests.servers.balancer import balancer
from tests.sync.harness import ThreadSite, make_terms, start_together

pytestmark = [pytest.mark.slow, pytest.mark.s3]
NUM_ROUNDS = 8
TERMS = {"rounds": NUM_ROUNDS, "liveness_s": PATIENCE_S, "grace_s": PATIENCE_S}
HELD_AT = 12
"""Steps: three rounds of each fragment."""


@dataclass
class Gateway:
    """A gateway in a process of its own, which may be killed and started again where it was."""

    uri: str
    noted: Path
    port: int = 0
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "composer_prime.cli.main", "gateway", self.uri, "--port", str(self.port)]
        command += ["--rate", "10000", "--total-rate", "10000"]
        with self.noted.open("a") as noted:
            self.process = subprocess.Popen(command, stdout=noted, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        assert "listening at http://127.0.0.1:" in said, said
        self.port = int(said.rpartition(":")[2])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stderr is not None
            self.process.stderr.close()
            self.process = None

    def lines(self) -> list[dict[str, Any]]:
        """Of each request; of a line that the kill cut off nothing is told."""
        lines = self.noted.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Noting(GatewayStore):
    """A gateway's client that notes when nobody answered."""

    def __init__(self, name: str, port: int) -> None:
        super().__init__(Place(f"http://127.0.0.1:{port}", RUN), KEYS[name], inline_bytes=256)
        self.unanswered = threading.Event()

    def _verdict(self, error: Exception) -> Any:
        if isinstance(error, Unanswered):
            self.unanswered.set()
        return super()._verdict(error)


@contextmanager
def gateways(uri: str, folder: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Two that answer, with what each noted."""
    made = Gateway(uri, folder / "noted-1.jsonl"), Gateway(uri, folder / "noted-2.jsonl")
    try:
        for each in made:
            each.start()
        yield made
    finally:
        for each in made:
            each.kill()


class Held(ThreadSite):
    """A site that makes no step after the first rounds until it is freed."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.is_held, self.free = threading.Event(), threading.Event()

    def step(self) -> None:
        if self.steps == HELD_AT:
            self.is_held.set()
            self.free.wait(PATIENCE_S)
        super().step()


def site(store: Store, name: str, kind: type[ThreadSite] = ThreadSite) -> ThreadSite:
    """One of three."""
    terms = make_terms(**SAFE | TERMS)
    return kind(store, terms, name, data_seed=len(name), key=KEYS[name], founding=founding())


def takers(bucket: Store) -> list[list[str]]:
    """Whose work each round took, the closing ones apart, which take what is left."""
    rounds = [keys.commit(fragment, version) for fragment in (0, 1) for version in range(NUM_ROUNDS)]
    return [[entry.site for entry in Commit.from_bytes(bucket.get(key), key).taken] for key in rounds]


def wait_until(holds: Callable[[], bool], sites: list[ThreadSite]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert [each.error for each in sites] == [None] * len(sites)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_over_two_gateways_loses_nothing_when_one_is_killed(
    tmp_path: Path, store_uri: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(store_uri("seaweed"))) as bucket:
        make_run(bucket, **TERMS)
        owners = site(open_store(bucket.uri), "a", Held)
        assert isinstance(owners, Held)
        with gateways(bucket.uri, tmp_path) as (first, second), balancer([first.port, second.port]) as either:
            ways = {"alice": Noting("alice", either), "bob": Noting("bob", second.port)}
            sites = [owners, *(site(store, name) for name, store in ways.items())]
            start_together(*sites)
            wait_until(owners.is_held.is_set, sites)  # nobody else closes a round: the run goes on when bob is back
            second.kill()
            before = second.lines()
            wait_until(ways["bob"].unanswered.is_set, sites)
            assert not bucket.list(keys.commit(0, NUM_ROUNDS - 1)), "the run isn't over"
            second.start()
            owners.free.set()
            for each in sites:
                each.join(PATIENCE_S)
                assert not each.is_alive() and each.error is None, each.error
            lines = first.lines(), second.lines()
        took = takers(bucket)
        assert all("a" in each for each in took), "no round was void"
        assert {"alice", "bob"} <= set(took[0]) and {"alice", "bob"} <= {
            name for each in took[NUM_ROUNDS // 2 :] for name in each
        }
    masters = [each.summary["masters"] for each in sites]
    assert masters == masters[:1] * 3 and {each["version"] for each in masters[0]} == {NUM_ROUNDS + 1}
    # A slow site may miss the closing round, which waits as long as a round takes: that is the one loss there may be.
    assert caplog.text.count("work_dropped") == caplog.text.count("why=run ended")
    for each in sites:
        for ledger in each.summary["tokens"]:
            assert ledger["trained"] == ledger["merged"] + ledger["dropped"] and ledger["merged"] > 0
    assert {line["site"] for line in lines[0]} == {"alice"} and {line["site"] for line in before} == {"alice", "bob"}
    assert any(line["site"] == "bob" and line["method"] == "PUT" for line in lines[1][len(before) :])
    # A 5xx may be what a busy bucket, or the kill, cut off; the site asks again.
    assert not [line for log in lines for line in log if line["status"] in (401, 403, 429)]
