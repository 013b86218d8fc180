"""What was read and found sound is had again without a request; nothing else is, and the rest passes through."""

import pytest

from composer_prime.errors import KeyMissing
from composer_prime.store import open_store
from composer_prime.store.metered import MeteredStore
from composer_prime.store.remembering import RememberingStore


@pytest.fixture
def inner(request):
    store = MeteredStore(open_store(f"memory://{request.node.name}"))
    for key in ("a", "b"):
        store.put(key, key.encode() * 10)
    return store


def reads(inner: MeteredStore) -> int:
    return inner.traffic().bytes_down


def test_what_was_kept_is_served_without_a_request_and_only_to_who_recalls(inner):
    store = RememberingStore(inner, 100)
    assert store.get_range("a", 2, 3) == b"aaa"
    store.keep()
    before = reads(inner)
    assert store.recalled().get_range("a", 2, 3) == b"aaa"
    assert reads(inner) == before
    assert store.get_range("a", 2, 3) == b"aaa"
    assert reads(inner) == before + 3
    assert store.recalled().get_range("a", 2, 4) == b"aaaa"
    assert reads(inner) == before + 7


def test_what_was_read_and_not_found_sound_is_read_again(inner):
    store = RememberingStore(inner, 100)
    inner.put("a", b"damaged")
    assert store.get_range("a", 0, 100) == b"damaged"
    inner.put("a", b"sound")
    assert store.recalled().get_range("a", 0, 100) == b"sound"
    assert store.get_range("a", 0, 100) == b"sound"
    store.keep()
    inner.put("a", b"damaged")
    assert store.recalled().get_range("a", 0, 100) == b"sound"


def test_a_key_that_is_missing_is_asked_for_again(inner):
    store = RememberingStore(inner, 100)
    with pytest.raises(KeyMissing):
        store.get_range("c", 0, 1)
    store.keep()
    inner.put("c", b"c")
    assert store.recalled().get_range("c", 0, 1) == b"c"


def test_no_more_is_kept_than_it_may_and_nothing_once_it_forgets(inner):
    store = RememberingStore(inner, 12)
    for key in ("a", "b"):
        store.get_range(key, 0, 10)
        store.keep()
    before = reads(inner)
    recalled = store.recalled()
    assert recalled.get_range("a", 0, 10) == b"a" * 10
    assert reads(inner) == before
    assert recalled.get_range("b", 0, 10) == b"b" * 10
    assert reads(inner) == before + 10
    store.forget()
    assert store.recalled().get_range("a", 0, 10) == b"a" * 10
    assert reads(inner) == before + 20
