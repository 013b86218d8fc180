"""`verify` and what a run says of itself: its manifest, its close records, the reopenings between them."""

import pytest

from composer_prime.store import Store, keys, open_store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.owner import Owner
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Manifest
from composer_prime.sync.signatures import SigningKey
from tests.sync.harness import ThreadSite, make_terms, run_sites
from tests.sync.test_verifying import assert_found, make_run, make_signed, verify_all


@pytest.fixture
def closed(request: pytest.FixtureRequest) -> Store:
    """A run of one site that has ended at version 4."""
    return make_run(open_store(f"memory://{request.node.name}"), "a")


@pytest.fixture
def reopened(closed: Store) -> Store:
    """The same, gone on to version 6."""
    Owner(closed).reopen(5)
    run_sites(ThreadSite(closed, make_terms(), "a"))
    verify_all(closed)
    return closed


def change_close(store: Store, **fields: object) -> None:
    record = read_record(store, Close, keys.close())
    store.put(keys.close(), record.model_copy(update=fields).to_bytes())


def test_a_manifest_whose_fingerprint_is_not_its_parameters_is_found(closed: Store) -> None:
    manifest = read_record(closed, Manifest, keys.manifest())
    closed.put(keys.manifest(), manifest.model_copy(update={"fingerprint": "f" * 64}).to_bytes())
    assert_found(closed, f"manifest.json of a states the fingerprint {'f' * 16}, its parameters make ")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"voids": ((2,), ())}, "fragment 0 version 4: close.json of a says that rounds (2,) were void, those were ()"),
        ({"floors": (0, 1)}, "fragment 1 version 4: close.json of a says that admission 1 was honoured, that was 0"),
        ({"versions": (4,)}, "close.json of a doesn't say of every fragment how it ended"),
        ({"masters": ()}, "close.json of a doesn't say of every fragment how it ended"),
        (
            {"versions": (4,), "masters": ("1" * 64,), "voids": ((),), "floors": (0,)},
            "close.json of a isn't a record of 2 fragments",
        ),
        ({"number": 1}, "close.json of a isn't of closing 0, in which every fragment ends at version 4"),
        ({"versions": (4, 9)}, "close.json of a isn't of closing 0, in which every fragment ends at version 4"),
    ],
    ids=["voids", "floors", "fewer versions", "no masters", "one fragment", "another number", "a version nobody has"],
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
    assert_found(store, f"close.json of {record.closed_by} ", "sign")


def test_a_closing_that_is_gone_though_the_run_went_on_is_found(reopened: Store) -> None:
    reopened.delete(keys.close(0))
    assert_found(reopened, "close.json is gone, though reopen/0001.json stands")


def test_a_reopening_that_is_gone_though_the_run_went_on_is_found(reopened: Store) -> None:
    reopened.delete(keys.reopening(1))
    assert_found(
        reopened,
        "fragment 0 version 4: manifest.json says that the run ends at version 4, though rounds/0000/0000000",
        "a record of its reopening is gone",
    )


def test_a_run_whose_last_close_record_is_gone_verifies_and_is_not_called_closed(reopened: Store) -> None:
    reopened.delete(keys.close(1))
    assert [report.last for report in verify_all(reopened)] == [6, 6]
