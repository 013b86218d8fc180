"""What members may do, by names and sizes alone: every kind of key, every operation, every wrong name."""

from collections.abc import Callable

import pytest

from composer_prime.gateway import invitation_keys
from composer_prime.gateway.rules import INLINE_BYTES, RunFacts, is_bulk, read_refusal, write_refusal
from composer_prime.integrations import torchft_keys
from composer_prime.launch import launch_keys
from composer_prime.store import keys
from tests.sync.harness import make_terms

SHA = "0123456789abcdef" * 4
OWN: dict[str, tuple[Callable[[str], str], set[str]]] = {
    "offer": (lambda site: keys.offer(1, 2, site), {"create"}),
    "payload": (lambda site: keys.payload(1, 2, site, SHA), {"create", "put"}),
    "claim": (lambda site: keys.claim(site, 3), {"create"}),
    "beat": (lambda site: keys.beat(site, 3), {"put"}),
    "tape": (lambda site: keys.tape(site, 4, SHA), {"create"}),
}
"""Kinds that hold a site's name, and how a member writes its own."""
OTHERS = {
    "manifest": keys.manifest(),
    "founding": keys.founding(),
    "close": keys.close(),
    "admission": keys.admission(1),
    "probe": keys.probe("7-ab"),
    "invitation": invitation_keys.invitation("alice", 1),
    "launch": launch_keys.launch(1),
    "launch's stop": launch_keys.stop(1),
    "launch's recipe": launch_keys.recipe(SHA),
    "launch's wheel": launch_keys.wheel(SHA),
    "launch's order": launch_keys.order(SHA),
    "launch's intent": launch_keys.intent(1, "alice", 1),
    "launch's job": launch_keys.job(1, "alice", 1),
    "launch's end": launch_keys.end(1, "alice", 1),
    "commit": keys.commit(1, 2),
    "part": keys.merged(1, 2, 0),
    "merged payload": keys.merged_payload(1, 2, 0, SHA),
    "master": keys.master(1, 2, SHA),
    "torchft's run": torchft_keys.run(),
    "torchft's contribution": torchft_keys.contribution(1, "alice"),
    "torchft's payload": torchft_keys.payload(1, "alice", SHA),
    "torchft's decision": torchft_keys.decision(1),
}
"""Every other key that `store.keys` spells."""
STRANGE = ["offers/alice.json", "a", "rounds", "sites/alice/000000/claim.json/x", "manifest.json.bak"]
TRICKS = ["../x", "rounds/../manifest.json", "rounds//0", "/manifest.json", "a\\b", "%2e%2e/x", "tape/alice/../bob/0"]
FACTS = RunFacts("run", make_terms(), ((10, 20), (10, 20)), 1000)


def refused(site: str, operation: str, key: str, nbytes: int = 15) -> str | None:
    return write_refusal(site, operation, key, nbytes, FACTS)  # pyright: ignore[reportArgumentType]


def test_a_member_writes_each_of_its_own_kinds_in_one_way() -> None:
    for kind, (key, ways) in OWN.items():
        assert {way for way in ("create", "put", "delete") if refused("alice", way, key("alice")) is None} == ways, kind


def test_what_is_no_key_of_a_run_is_neither_written_nor_read() -> None:
    for key in STRANGE + TRICKS:
        assert read_refusal(key) and all(refused("alice", way, key) for way in ("create", "put", "delete")), key


def test_a_member_reads_the_run_and_not_what_isn_t_of_it() -> None:
    read = [*(key("bob") for key, _ in OWN.values()), *OTHERS.values()]
    hidden = {key for key in read if read_refusal(key)}
    kinds = ("probe", "invitation", "launch", "torchft")
    assert hidden == {key for kind, key in OTHERS.items() if kind.startswith(kinds)}


def test_a_payload_has_the_size_that_its_codec_gives_and_no_more_than_the_gateway_takes() -> None:
    key = keys.payload(1, 2, "alice", SHA)
    sizes = [nbytes for nbytes in range(40) if refused("alice", "put", key, nbytes) is None]
    assert sizes == list(range(10, 21))
    facts = RunFacts("run", make_terms(), ((10, 2000),), 1000)
    key = keys.payload(0, 2, "alice", SHA)
    assert write_refusal("alice", "put", key, 1000, facts) is None
    assert "at most 1000 (--max-object-mib)" in (write_refusal("alice", "put", key, 1001, facts) or "")


def test_a_fragment_that_the_run_hasn_t_is_refused() -> None:
    for key in (keys.payload(2, 0, "alice", SHA), keys.offer(2, 0, "alice")):
        assert "run run has 2" in (refused("alice", "create", key) or "")


@pytest.mark.parametrize(("kind", "most"), [("offer", INLINE_BYTES), ("claim", 2**12), ("beat", 2**16)])
def test_records_are_small(kind: str, most: int) -> None:
    key, ways = OWN[kind]
    way = min(ways)
    assert refused("alice", way, key("alice"), most) is None
    assert f"at most {most}" in (refused("alice", way, key("alice"), most + 1) or "")


def test_large_kinds_go_by_ticket_and_records_never_do() -> None:
    named = {kind: key("bob") for kind, (key, _) in OWN.items()} | OTHERS
    assert {kind for kind, key in named.items() if is_bulk(key)} == {"payload", "merged payload", "master"}
