"""A run of site a, which has guests alice and bob, behind a gateway on a loopback port."""

import base64
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.gateway import operations, rules, wire
from composer_prime.gateway.client import Place
from composer_prime.gateway.limits import Rate, Rates
from composer_prime.gateway.serving import Served, bound, gateway_app, serve_run, server_of
from composer_prime.gateway.store import GatewayStore
from composer_prime.outer.payloads import Coded, code
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import Signed, sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Beat, Claim, Offer
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.servers.in_thread import running_server
from tests.sync.harness import HandSite, make_terms

RUN = "run"
OWNER = SigningKey.from_bytes(b"o" * 32)
KEYS = {name: SigningKey.from_bytes(name.encode().ljust(32, b".")) for name in ("a", "alice", "bob", "mallory")}
GUESTS = ("alice", "bob")
SAFE = {"aggregate": "clipped", "weighting": "equal"}
"""Terms of a run into which strangers may be let."""
FAST = Rates(site=Rate(10_000, 10_000), gateway=Rate(10_000, 10_000))
MAX_OBJECT_BYTES = 64 * 2**20
PATIENCE_S = 600
"""Longest that a test waits for one answer, on however busy a machine."""


def founding() -> Founding:
    return Founding(OWNER.public, {"a": KEYS["a"].public})


def admit_guests(store: Store, *names: str) -> None:
    """Let sites into a run that its owner has just made."""
    for name in names:
        Owner(store, OWNER).admit(name, KEYS[name].public, guest=True)


def make_run(store: Store, **terms: Any) -> HandSite:
    """Site a, which has created the run in `store`; its guests are admitted."""
    site = HandSite(store, make_terms(**SAFE | terms), "a", [0.0], key=KEYS["a"], founding=founding())
    admit_guests(store, *GUESTS)
    return site


@dataclass(frozen=True)
class Guarded:
    """A gateway that answers."""

    port: int
    served: Served
    noted: list[str]

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def store(self, name: str, **options: Any) -> GatewayStore:
        """The run as a site sees it through the gateway."""
        return GatewayStore(Place(self.root, RUN), KEYS[name], **options)

    def ask(self, name: str, method: str, target: str, body: bytes = b"", **changes: Any) -> httpx.Response:
        """A raw request, signed as it should be but for `changes`: of what is signed (run, time_s, nonce, signed_as,
        signed_body, signed_method) and of the headers sent."""
        headers = wire.signed_headers(
            KEYS[name],
            changes.get("signed_method", method),
            changes.get("run", RUN),
            changes.get("signed_as", target),
            changes.get("signed_body", body),
            time_s=changes.get("time_s"),
            nonce=changes.get("nonce", ""),
        )
        url = f"{self.root}/{changes.get('sent_run', changes.get('run', RUN))}/{target}"
        headers |= changes.get("headers", {})
        return httpx.request(method, url, headers=headers, content=body or None, trust_env=False, timeout=PATIENCE_S)

    def lines(self) -> list[dict[str, Any]]:
        """What it noted of each request."""
        return [json.loads(line) for line in self.noted]


@contextmanager
def guarding(store: Store, *, rates: Rates = FAST, run: Store | None = None) -> Iterator[Guarded]:
    """A gateway for `store`. run: the store that holds the run, where that is another one."""
    found = serve_run(run or store, MAX_OBJECT_BYTES)
    served, noted = Served(store, found.facts, found.roster), list[str]()
    server = server_of(gateway_app(served, rates, noted.append))
    with closing(bound("127.0.0.1", 0)) as listener, running_server(server, [listener]):
        yield Guarded(listener.getsockname()[1], served, noted)


def allow_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members do everything, at any key: for the stores' contract, and for nothing else."""
    monkeypatch.setattr(operations, "read_refusal", lambda key: None)
    monkeypatch.setattr(rules, "write_refusal", lambda *asked: None)
    monkeypatch.setattr(operations, "is_bulk", lambda key: True)
    monkeypatch.setattr(operations, "is_written_once", lambda key: False)


# --- what a sound site writes ----------------------------------------------------------------------------------------


def signed(run: Served, name: str, record: Any) -> bytes:
    """A record's bytes with the signature of `name`."""
    assert isinstance(record, Signed)
    signature = KEYS[name].sign(record.message(run.roster._run_sha))
    return record.model_copy(update={"signature": signature}).to_bytes()


def coded(run: HandSite, fragment: int = 0, value: float = 1.0) -> Coded:
    """A movement of one fragment, as the run codes it."""
    coding = run.run.codings[fragment]
    return code(coding.codec, torch.full((coding.fragment.numel,), value), coding.plan)


def offer_of(run: HandSite, name: str, work: Coded, *, fragment: int = 0, version: int = 0, **changes: Any) -> Offer:
    """The offer that names a payload."""
    values = {
        "site": name,
        "incarnation": 0,
        "fragment": fragment,
        "version": version,
        "base_sha": run.courier.master(fragment).sha256,
        "tokens": 10,
        "steps": 1,
        "trained_tokens": 10,
        "codec": run.run.terms.codec,
        "payload": keys.payload(fragment, version, name, work.sha256),
        "sha256": work.sha256,
        "slices": base64.b64encode(b"".join(work.digests)).decode(),
        "nbytes": work.nbytes,
        "norms": work.norms,
    }
    return Offer(**(values | changes))


def claim_of(name: str, incarnation: int = 0) -> Claim:
    return Claim(site=name, incarnation=incarnation, nonce="ab", host="host", pid=1)


def beat_of(name: str, incarnation: int = 0, counter: int = 1, **changes: Any) -> Beat:
    values = {
        "site": name,
        "incarnation": incarnation,
        "counter": counter,
        "state": "live",
        "versions": (0, 0),
        "inner_step": 0,
        "trained_tokens": 0,
        "pins": (0, 0),
    }
    return Beat(**(values | changes))


def tape_of(name: str) -> bytes:
    return json.dumps({"event": "join", "site": name, "incarnation": 0}).encode() + b"\n"


def tape_key(site: str, data: bytes) -> str:
    """Where the first piece of a site's tape stands that holds `data`."""
    return keys.tape(site, 0, sha256_hex(data))


def refusal(act: Any) -> str:
    """The words with which something is refused; '' when it isn't."""
    try:
        act()
    except StoreError as error:
        return str(error)
    return ""
