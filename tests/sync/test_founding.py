"""A run that was announced before its model was known: what is written down must be what its first site makes."""

import pytest

from composer_prime.errors import BadInput, CorruptObject, ProtocolError
from composer_prime.store import keys
from composer_prime.sync.canonical import PROTOCOL
from composer_prime.sync.founding import FoundingRecord, announce, find_founding
from tests.sync.harness import make_terms

RECORD = FoundingRecord(run="run", terms=make_terms(), keys={})


def test_what_was_announced_is_found_and_may_be_announced_again(store):
    assert find_founding(store) is None
    announce(store, RECORD)
    announce(store, RECORD)
    assert find_founding(store) == RECORD


def test_another_run_is_not_announced_where_one_was(store):
    announce(store, RECORD)
    with pytest.raises(BadInput, match=r"already to hold another run \(outer\.rounds: run 3, recipe 4\)"):
        announce(store, RECORD.model_copy(update={"terms": make_terms(rounds=4)}))
    assert find_founding(store) == RECORD


def test_what_an_older_protocol_announced_is_refused_by_both_numbers(store):
    store.create(keys.founding(), b'{"protocol":12,"run":"run"}')
    with pytest.raises(ProtocolError, match=f"json speaks protocol 12, this composer-prime speaks {PROTOCOL}"):
        announce(store, RECORD)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"{}"], ids=["empty", "garbage", "no fields"])
@pytest.mark.parametrize("act", [find_founding, lambda store: announce(store, RECORD)], ids=["found", "announced"])
def test_a_damaged_announcement_is_no_absent_one_and_says_what_to_do(store, damage, act):
    """Read as none, it would leave terms and keys to whoever writes the manifest."""
    announce(store, RECORD)
    store.put(keys.founding(), damage)
    with pytest.raises(CorruptObject, match=r"^founding\.json .*Restore it from a backup; or delete it") as raised:
        act(store)
    assert "\n" not in str(raised.value)
    store.delete(keys.founding())
    announce(store, RECORD)
    assert find_founding(store) == RECORD
