"""`Verifier`: says nothing against a run that sites made, and names every kind of damage."""

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence

import pytest

from composer_prime.errors import CorruptObject, ProtocolError
from composer_prime.store import Store, keys, open_store
from composer_prime.sync import archive
from composer_prime.sync.canonical import canonical, sha256_hex
from composer_prime.sync.merging import Merger
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Commit, Manifest, Part, Refused
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import Master, load_master, store_master
from composer_prime.sync.start import Founding
from composer_prime.sync.verifying import FragmentReport, Verifier
from tests.sync.harness import ThreadSite, make_terms, run_sites

GATHERED = {"momentum": 0.5, "codec": "int8"}
SLICED = {"momentum": 0.5, "codec": "fp32", "gather_sites": 2, "quorum": 6, "rounds": 2}


def make_run(store: Store, names: str, **terms) -> Store:
    """A run that ended, left by sites of one letter each."""
    width = 400 if "gather_sites" in terms else 12  # parts are cut where int8 has its blocks
    sites = [
        ThreadSite(store, make_terms(**terms), name, data_seed=place, width=width) for place, name in enumerate(names)
    ]
    run_sites(*sites)
    return store


@pytest.fixture(scope="module")
def gathered() -> Store:
    return make_run(open_store("memory://verifying-gathered"), "abc", quorum=3, **GATHERED)


@pytest.fixture(scope="module")
def sliced() -> Store:
    return make_run(open_store("memory://verifying-sliced"), "abcdef", **SLICED)


@pytest.fixture
def copied(request: pytest.FixtureRequest) -> Iterator:
    """copied(store): another store of the same bytes, to damage."""
    copies: list[Store] = []

    def copy(store: Store) -> Store:
        copies.append(open_store(f"memory://{request.node.name}-{len(copies)}"))
        for key in store.list(""):
            copies[-1].put(key, store.get(key))
        return copies[-1]

    yield copy


def verify_all(store: Store) -> list[FragmentReport]:
    verifier = Verifier(store)
    try:
        return [verifier.check(fragment) for fragment in range(len(verifier.run.fragments))]
    finally:
        verifier.close()


def flip(store: Store, key: str) -> str:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    return key


def read_commit(store: Store, fragment: int, version: int) -> Commit:
    key = keys.commit(fragment, version)
    return Commit.from_bytes(store.get(key), key)


def assert_found(store: Store, *parts: str) -> None:
    """The first fault's message begins with the first part, and holds the others in order."""
    with pytest.raises(CorruptObject) as found:
        verify_all(store)
    assert re.match(".*".join(re.escape(part) for part in parts), str(found.value)), str(found.value)


# --- sound runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_finished_gathered_run_verifies_from_its_first_master_to_its_last(store_uri, kind):
    store = make_run(open_store(store_uri(kind)), "ab", quorum=2, **GATHERED)
    before = {key: store.get(key) for key in store.list("")}
    for report in verify_all(store):
        assert (report.first, report.last, report.num_rounds, report.num_parts) == (0, 4, 4, 0)
        assert report.num_snapshots == 3
    assert {key: store.get(key) for key in store.list("")} == before


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_finished_sliced_run_verifies_and_every_part_is_recomputed(store_uri, kind):
    store = make_run(open_store(store_uri(kind)), "abcdef", **SLICED)
    for report in verify_all(store):
        num_parts = sum(read_commit(store, report.fragment, version).num_parts for version in range(report.last))
        assert report.last == 3 and report.num_parts == num_parts >= 10


def test_a_run_verifies_from_its_oldest_kept_snapshot_after_garbage_collection(request):
    store = open_store(f"memory://{request.node.name}")
    make_run(store, "ab", quorum=2, keep_log=False, rounds=12, liveness_s=1.0, max_stale_rounds=1, momentum=0.5)
    assert store.list(keys.offers_prefix(0, 0)) == []
    for report in verify_all(store):
        assert 0 < report.first < report.last == 13
        assert report.num_rounds == report.last - report.first and report.num_skipped == 0


def make_collected(monkeypatch: pytest.MonkeyPatch, name: str, sites: str, stored: Sequence[int], **terms) -> Store:
    """An ended run whose snapshots are those of the versions `stored`, and whose rounds before them are collected."""
    monkeypatch.setattr(archive, "collect_garbage", lambda *args, **more: 0)  # when it runs is chance
    store = make_run(open_store(f"memory://{name}"), sites, keep_log=False, liveness_s=1e4, **terms)
    run = load_run(store)
    roster = Roster(store, run.manifest, run.sha256)
    for fragment, sha in enumerate(run.manifest.masters):
        start = load_master(store, run, fragment, 0, sha)
        for version in stored:
            master = rebuild_master(store, run, fragment, version, runtime=ThreadRuntime(), roster=roster, start=start)
            store_master(store, master)
    for fragment in range(len(run.fragments)):
        for key in store.list(keys.masters_prefix(fragment)):
            if keys.parse_master(key)[1] not in stored:
                store.delete(key)
        collect_rounds(store, fragment, range(stored[0]))
    return store


def collect_rounds(store: Store, fragment: int, versions: Container[int]) -> None:
    for key in store.list(keys.rounds_prefix(fragment)):
        place = keys.parse_collectable(key)
        if place is not None and place[1] in versions:
            store.delete(key)


def test_garbage_collection_that_stopped_halfway_is_no_fault_and_the_rounds_it_took_are_counted(request, monkeypatch):
    terms = {"quorum": 2, "rounds": 8, "momentum": 0.5}
    store = make_collected(monkeypatch, request.node.name, "ab", (3, 5, 7, 9), **terms)
    for fragment in range(2):
        collect_rounds(store, fragment, (3, 4))
        verifier = Verifier(store)
        report = verifier.check(fragment)
        verifier.close()
        assert (report.first, report.last, report.num_skipped) == (3, 9, 2)


def test_parts_that_were_collected_before_their_snapshot_are_no_fault(request, monkeypatch):
    store = make_collected(monkeypatch, request.node.name, "abcdef", (1, 2, 3), **SLICED)
    collect_rounds(store, 0, (1,))
    verifier = Verifier(store)
    report = verifier.check(0)
    verifier.close()
    assert (report.first, report.last, report.num_skipped) == (1, 3, 1)


def make_signed(store: Store) -> None:
    owner, pair = SigningKey.generate(), {name: SigningKey.generate() for name in "ab"}
    founding = Founding(owner.public, {name: key.public for name, key in pair.items()})
    terms = make_terms(quorum=2)
    run_sites(
        *(
            ThreadSite(store, terms, name, data_seed=place, key=key, founding=founding)
            for place, (name, key) in enumerate(pair.items())
        )
    )


def test_a_run_that_goes_on_verifies_as_far_as_it_is(request):
    store = open_store(f"memory://{request.node.name}")
    run_sites(ThreadSite(store, make_terms(rounds=9), "a", stop_after=10))
    verifier = Verifier(store)
    assert 0 < verifier.check(0).last < 10 and not verifier.is_closed
    verifier.close()


# --- damage ----------------------------------------------------------------------------------------------------------


def snapshot_of(store: Store, fragment: int, version: int) -> str:
    stored = store.list(keys.masters_prefix(fragment))
    return next(key for key in stored if keys.parse_master(key)[1] == version)


def change_commit(store: Store, fragment: int, version: int, **fields) -> str:
    key = keys.commit(fragment, version)
    store.put(key, read_commit(store, fragment, version).model_copy(update=fields).to_bytes())
    return key


def double_a_multiplier(store: Store) -> str:
    first, *others = read_commit(store, 0, 1).taken
    return change_commit(store, 0, 1, taken=(first.model_copy(update={"multiplier": first.multiplier * 2}), *others))


def change_terms(store: Store) -> str:
    data = json.loads(store.get(keys.manifest()))
    data["terms"]["lr"] = 0.5
    store.put(keys.manifest(), canonical(data))
    return keys.manifest()


def store_another_master(store: Store) -> str:
    held = load_master(store, load_run(store), 0, 2, read_commit(store, 0, 2).base_sha)
    return store_master(store, Master(0, 2, held.weights + 1, held.momentum))


def deleted(store: Store, key: str) -> str:
    store.delete(key)
    return key


def spoil(store: Store, key: str, data: bytes) -> str:
    store.put(key, data)
    return key


DAMAGE: dict[str, tuple[str, Callable[[Store], str], str]] = {
    "a flipped byte in a payload of a sliced round": (
        "sliced", lambda store: flip(store, read_commit(store, 1, 0).taken[3].payload), "isn't what its offer states"
    ),
    "a flipped byte in a snapshot": ("gathered", lambda store: flip(store, snapshot_of(store, 1, 2)), "changed or cut"),
    "another master under a right key of its own": ("gathered", store_another_master, "is another master than the log"),
    "an edited multiplier": ("gathered", double_a_multiplier, "weighs a by"),
    "a commit that was changed and stays sound": (
        "gathered", lambda store: change_commit(store, 0, 1, refused=(Refused(site="z", why="-"),)), "the commit before"
    ),
    "a changed manifest": ("gathered", change_terms, "the commit before"),
    "a first commit that is gone": ("gathered", lambda store: deleted(store, keys.commit(1, 0)), "is gone, though"),
    "a last commit that is gone": ("gathered", lambda store: deleted(store, keys.commit(1, 3)), "is gone, though"),
    "a changed merged payload": (
        "sliced", lambda store: flip(store, str(read_part(store, 1).payload)), "has bytes of sha256"
    ),
    "a part that is gone": ("sliced", lambda store: deleted(store, keys.merged(0, 0, 1)), "is gone, though"),
    "a part's record that can't be read": (
        "sliced", lambda store: spoil(store, keys.merged(0, 0, 1), b"nonsense"), "isn't what the sites took it for"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_first_object_that_differs_is_named(request, copied, kind):
    run, damage, why = DAMAGE[kind]
    store = copied(request.getfixturevalue(run))
    assert_found(store, damage(store), why)


def read_part(store: Store, index: int) -> Part:
    key = keys.merged(0, 0, index)
    return Part.from_bytes(store.get(key), key)


def test_a_reducer_that_lies_through_a_whole_run_is_found_though_all_sites_agree(request, monkeypatch):
    honest = Merger._merge

    def lie(self, part, commit, vectors):
        if self._site == "c":
            vectors = {site: vector * 2 for site, vector in vectors.items()}
        return honest(self, part, commit, vectors)

    monkeypatch.setattr(Merger, "_merge", lie)
    store = make_run(open_store(f"memory://{request.node.name}"), "abcdef", **SLICED)
    assert_found(store, "rounds/", "/merged/", "isn't the mean of the offers that its commit takes")


# --- what can't be verified at all -----------------------------------------------------------------------------------


def test_a_machine_that_computes_differently_says_so_before_anything_is_replayed(gathered, copied):
    store = copied(gathered)
    data = json.loads(store.get(keys.manifest()))
    store.put(keys.manifest(), canonical(data | {"test_vector": "0" * 64}))
    with pytest.raises(ProtocolError, match="test vector"):
        Verifier(store)


# --- what a run says of itself: its manifest, its close record -------------------------------------------------------


@pytest.fixture
def closed(request: pytest.FixtureRequest) -> Store:
    """A run of one site that has ended at version 4."""
    return make_run(open_store(f"memory://{request.node.name}"), "a")


def change_close(store: Store, **fields: object) -> None:
    record = read_record(store, Close, keys.close())
    store.put(keys.close(), record.model_copy(update=fields).to_bytes())


def test_a_manifest_whose_fingerprint_is_not_its_parameters_is_found(closed: Store) -> None:
    manifest = read_record(closed, Manifest, keys.manifest())
    closed.put(keys.manifest(), manifest.model_copy(update={"fingerprint": "f" * 64}).to_bytes())
    assert_found(closed, f"manifest.json states the fingerprint {'f' * 16}, its parameters make ")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"voids": ((2,), ())}, "close.json names other void rounds of fragment 0 than the log"),
        ({"masters": ("0" * 64, "1" * 64)}, "close.json names another master 0"),
        ({"versions": (4,)}, "close.json doesn't say of every fragment how it ended"),
        ({"masters": ()}, "close.json doesn't say of every fragment how it ended"),
        ({"versions": (4,), "masters": ("1" * 64,), "voids": ((),)}, "close.json isn't a record of 2 fragments"),
        ({"versions": (4, 9)}, "close.json doesn't end every fragment at version 4"),
    ],
    ids=["voids", "another master", "fewer versions", "no masters", "one fragment", "a version nobody has"],
)
def test_a_close_record_that_does_not_follow_from_the_log_is_found(closed: Store, fields: dict, words: str) -> None:
    change_close(closed, **fields)
    assert_found(closed, words)


@pytest.mark.parametrize("signer", ["nobody", "an outsider"])
def test_a_close_record_that_no_admitted_site_signed_is_found(request: pytest.FixtureRequest, signer: str) -> None:
    store = open_store(f"memory://{request.node.name}")
    make_signed(store)
    record = read_record(store, Close, keys.close())
    message = record.message(sha256_hex(store.get(keys.manifest())))
    change_close(store, signature=None if signer == "nobody" else SigningKey.generate().sign(message))
    assert_found(store, "close.json ", "sign")


def test_a_run_whose_close_record_is_gone_verifies_and_is_not_called_closed(closed: Store) -> None:
    closed.delete(keys.close())
    verifier = Verifier(closed)
    assert [verifier.check(fragment).last for fragment in range(2)] == [4, 4] and not verifier.is_closed
    verifier.close()
