"""`verify` and what a run says of itself: its manifest, its close record."""

import pytest

from composer_prime.store import Store, keys, open_store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close, Manifest
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.verifying import Verifier
from tests.sync.test_verifying import assert_found, make_run, make_signed


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
        ({"versions": (4,)}, "close.json doesn't say of every fragment how it ended"),
        ({"masters": ()}, "close.json doesn't say of every fragment how it ended"),
        (
            {"versions": (4,), "masters": ("1" * 64,), "voids": ((),)},
            "close.json isn't a record of 2 fragments",
        ),
        ({"versions": (4, 9)}, "close.json doesn't end every fragment at version 4"),
    ],
    ids=["voids", "fewer versions", "no masters", "one fragment", "a version nobody has"],
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
