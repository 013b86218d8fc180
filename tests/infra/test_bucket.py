"""The bucket's policies against what sites really do: everything a site writes is allowed to it, and not to another."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from composer_prime.gateway import invitation_keys
from composer_prime.launch import launch_keys
from composer_prime.plan.traffic import measure
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.store.probe import probe_store
from tests.gateway.guarded import make_run
from tests.gateway.test_training import TERMS, wait_for_end
from tests.gateway.test_training import site as owned_site
from tests.infra.policies import FOLDER, Request, allowed, delete, get, list_names, policy, put
from tests.sync.harness import ThreadSite, make_terms, run_sites, start_together

SHA = "0123456789abcdef" * 4
OWN: list[tuple[Callable[[str], str], bool]] = [
    (lambda site: keys.offer(1, 2, site), True),
    (lambda site: keys.payload(1, 2, site, SHA), False),
    (lambda site: keys.claim(site, 3), True),
    (lambda site: keys.beat(site, 3), False),
    (lambda site: keys.tape(site, 4, SHA), True),
]
"""Every key that holds a site's name, and whether it is create-once."""

SHARED = [
    (keys.founding(), True), (keys.manifest(), True), (keys.close(), True),
    (keys.commit(1, 2), True), (keys.merged(1, 2, 0), True), (keys.merged_payload(1, 2, 0, SHA), False),
    (keys.master(1, 2, SHA), False), (keys.probe("7-ab"), True),
]  # fmt: skip
OWNERS = [
    keys.admission(1), invitation_keys.invitation("alice", 1),
    launch_keys.launch(1), launch_keys.stop(1), launch_keys.recipe(SHA), launch_keys.intent(1, "alice", 1),
    launch_keys.job(1, "alice", 1), launch_keys.end(1, "alice", 1), launch_keys.wheel(SHA), launch_keys.order(SHA),
    launch_keys.launches_prefix() + "0001/sites/alice/x.json",
]  # fmt: skip
"""Create-once records of who owns the run and launches its sites."""


class Recorded(Store):
    """A store that notes what is asked of it, as S3 would be asked."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.requests: list[Request] = []

    @property
    def uri(self) -> str:
        return self._inner.uri

    def create(self, key: str, data: bytes) -> bool:
        self.requests.append(put(key, if_absent=True))
        return self._inner.create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.requests.append(put(key, if_absent=False))
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        self.requests.append(get(key))
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests.append(get(key))
        return self._inner.get_range(key, start, length)

    def list(self, prefix: str) -> list[str]:
        self.requests.append(list_names(prefix))
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self.requests.append(delete(key))
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("site", ["a", "a-b", "berlin-2"])
def test_a_site_may_write_its_own_names_and_nobody_elses(site: str) -> None:
    identity = policy("site-policy", site)
    for key, if_absent in OWN:
        assert allowed(put(key(site), if_absent=if_absent), identity), key(site)
        for other in {"a", "a-b", "b", "berlin-2", "berlin"} - {site}:
            assert not allowed(put(key(other), if_absent=if_absent), identity), key(other)


def test_a_guest_writes_its_own_names_and_nothing_that_decides_for_others() -> None:
    guest = policy("guest-policy", "a")
    for key, if_absent in OWN:
        assert allowed(put(key("a"), if_absent=if_absent), guest), key("a")
        assert not allowed(put(key("b"), if_absent=if_absent), guest) and not allowed(delete(key("a")), guest), key("b")
    trials = [(keys.probe("7-ab", other), False) for other in ("b", "a-2")]
    for key, if_absent in [*SHARED, *trials, *((key, True) for key in OWNERS)]:
        assert not allowed(put(key, if_absent=if_absent), guest) and not allowed(delete(key), guest), key
    trial = keys.probe("7-ab", "a")
    assert allowed(put(trial, if_absent=True), guest) and allowed(delete(trial), guest)
    assert allowed(get(keys.commit(1, 2)), guest) and allowed(list_names(""), guest)


def test_what_any_site_may_create_any_site_may() -> None:
    for key, if_absent in SHARED:
        assert allowed(put(key, if_absent=if_absent), policy("site-policy", "a")), key


def test_records_are_written_once_even_by_those_who_may_create_them() -> None:
    records = [key("a") for key, if_absent in OWN if if_absent] + [key for key, once in SHARED if once]
    for key in set(records) - {keys.probe("7-ab")}:
        assert not allowed(put(key, if_absent=False), policy("site-policy", "a")), key
    for key in OWNERS:
        assert not allowed(put(key, if_absent=False), policy("owner-policy")), key


def test_only_the_owner_admits_and_it_makes_no_rounds() -> None:
    for key in OWNERS:
        assert allowed(put(key, if_absent=True), policy("owner-policy"))
        assert not allowed(put(key, if_absent=True), policy("site-policy", "a"))
    for key, if_absent in OWN:
        assert not allowed(put(key("a"), if_absent=if_absent), policy("owner-policy"))
    assert not allowed(put(keys.commit(0, 0), if_absent=True), policy("owner-policy"))


def test_a_gateway_writes_what_guests_do_and_nothing_that_decides() -> None:
    gateway = policy("gateway-policy")
    for site in ("a", "berlin-2"):
        for key, if_absent in OWN:
            assert allowed(put(key(site), if_absent=if_absent), gateway), key(site)
    for key, if_absent in SHARED + [(owners, True) for owners in OWNERS]:
        assert not allowed(put(key, if_absent=if_absent), gateway), key
    assert allowed(get(keys.beat("b", 0)), gateway) and allowed(list_names(""), gateway)
    assert not any(allowed(delete(key("a")), gateway) for key, _ in OWN)


def test_a_site_reads_and_lists_its_run_and_no_other() -> None:
    identity = policy("site-policy", "a")
    assert allowed(get(keys.beat("b", 0)), identity) and allowed(list_names(""), identity)
    other = get(keys.manifest()).resource.replace("run-1", "run-10")
    assert not allowed(Request("s3:GetObject", other), identity)
    assert not allowed(list_names("", run="runs/run-10"), identity) and not allowed(list_names("", run=""), identity)


def test_a_site_deletes_nothing_but_its_probes_unless_it_collects_garbage() -> None:
    site, collector = policy("site-policy", "a"), policy("collector-policy")
    assert allowed(delete(keys.probe("7-ab")), site)
    doomed = [keys.offer(1, 2, "b"), keys.payload(1, 2, "b", SHA), keys.merged(1, 2, 0), keys.master(1, 2, SHA)]
    assert not any(allowed(delete(key), site) for key in doomed)
    assert all(allowed(delete(key), [*site, *collector]) for key in doomed)
    kept = [
        keys.manifest(),
        keys.commit(1, 2),
        keys.claim("a", 0),
        keys.beat("a", 0),
        keys.tape("a", 0, SHA),
        keys.close(),
    ]
    assert not any(allowed(delete(key), [*site, *collector]) for key in kept)


@pytest.mark.parametrize(
    "header", ["storage-class", "server-side-encryption-customer-algorithm", "server-side-encryption-aws-kms-key-id"]
)
def test_nobody_writes_what_the_others_could_not_read(header: str) -> None:
    for key, if_absent in ((keys.payload(0, 1, "a", SHA), False), (keys.commit(0, 1), True)):
        plain = put(key, if_absent=if_absent)
        hidden = replace(plain, context={**plain.context, f"s3:x-amz-{header}": "GLACIER"})
        assert allowed(plain, policy("site-policy", "a")) and not allowed(hidden, policy("site-policy", "a"))


def test_nothing_goes_without_tls() -> None:
    plain = Request("s3:GetObject", get(keys.manifest()).resource, {"aws:SecureTransport": "false"})
    assert not allowed(plain, policy("site-policy", "a"))


def test_a_whole_run_stays_within_its_sites_policies(store_uri: Callable[[str], str]) -> None:
    uri = store_uri("memory")
    terms = make_terms(quorum=2)
    recorded = {name: Recorded(open_store(uri)) for name in "ab"}
    sites = [ThreadSite(store, terms, name, seed=i, data_seed=i) for i, (name, store) in enumerate(recorded.items())]
    for store in recorded.values():
        probe_store(store)
    run_sites(*sites)
    refused: set[str] = set()
    for name, store in recorded.items():
        assert [request for request in store.requests if not allowed(request, policy("site-policy", name))] == []
        others = policy("site-policy", "b" if name == "a" else "a")
        refused |= {part for each in store.requests if not allowed(each, others) for part in each.resource.split("/")}
    assert {"offers", "payload", "sites", "tape"} <= refused


def test_a_whole_run_of_a_guest_stays_within_a_guest_s_policy(store_uri: Callable[[str], str]) -> None:
    uri = store_uri("memory")
    make_run(open_store(uri), **TERMS)
    owners = owned_site(open_store(uri), "a")
    recorded = Recorded(open_store(uri))
    probe_store(recorded, site="alice")
    measure(recorded, "alice")
    volunteer = owned_site(recorded, "alice")
    start_together(owners, volunteer)
    wait_for_end(owners, volunteer)
    guest = policy("guest-policy", "alice")
    assert [request for request in recorded.requests if not allowed(request, guest)] == []
    assert {"offers", "payload", "beat"} <= {
        part for each in recorded.requests if each.action == "s3:PutObject" for part in each.resource.split("/")
    }


def test_every_policy_file_is_used_here() -> None:
    names = {f"{who}-policy" for who in ("bucket", "collector", "gateway", "guest", "owner", "site")}
    assert {path.stem for path in FOLDER.glob("*.json")} == names
