"""A site's tape in the bucket: events in order, and no secret of the process that wrote them."""

import json
import threading

import pytest

from composer_prime.errors import StoreError
from composer_prime.redaction import HIDDEN, SECRET_NAMES_VARIABLE
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.tape import Tape
from tests.patience import PATIENCE_S

KEY = 'AKIA"/+key'
SECRET = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG", "MINE": KEY, SECRET_NAMES_VARIABLE: "MINE,NOT_SET"}


def written(store: MemoryStore) -> list[dict]:
    text = b"".join(store.get(key) for key in store.list(keys.tape_prefix("a"))).decode()
    assert all(value not in text for value in (*SECRET.values(), json.dumps(KEY)[1:-1]) if "," not in value)
    return [json.loads(line) for line in text.splitlines()]


def test_no_event_in_the_bucket_holds_a_secret_and_all_else_stays(request) -> None:
    tape = Tape(MemoryStore(request.node.name), "a", 0, SECRET)
    why = f"403 for https://u:{SECRET['AWS_SECRET_ACCESS_KEY']}@host of {KEY}"
    tape.write("dropped", why=why, tokens=123456, reasons=[{"b": why}, "none"], fine=None)
    tape.flush()
    shown = f"403 for https://u:{HIDDEN}@host of {HIDDEN}"
    assert written(MemoryStore(request.node.name)) == [
        {
            "event": "dropped",
            "site": "a",
            "incarnation": 0,
            "why": shown,
            "tokens": 123456,
            "reasons": [{"b": shown}, "none"],
            "fine": None,
        }
    ]


def test_a_secret_that_is_a_number_or_a_fields_name_leaves_an_event_as_json_that_reads_the_same(request) -> None:
    tape = Tape(MemoryStore(request.node.name), "a", 0, {"HF_TOKEN": "123456", "WANDB_API_KEY": "tokens"})
    tape.write("dropped", tokens=123456)
    tape.flush()
    assert [event["tokens"] for event in written(MemoryStore(request.node.name))] == [123456]


def test_a_tape_of_a_process_takes_its_own_environment(request, monkeypatch) -> None:
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    tape = Tape(MemoryStore(request.node.name), "a", 0)
    tape.write("dropped", why=KEY)
    tape.flush()
    assert [event["why"] for event in written(MemoryStore(request.node.name))] == [HIDDEN]


def test_events_whose_answer_was_lost_stand_once_and_later_ones_in_the_next_object(request, monkeypatch) -> None:
    store = MemoryStore(request.node.name)
    tape, create = Tape(store, "a", 0), store.create

    def answer_lost(key: str, data: bytes) -> bool:
        create(key, data)
        raise StoreError("no answer")

    tape.write("offer", tokens=1)
    monkeypatch.setattr(store, "create", answer_lost)
    with pytest.raises(StoreError):
        tape.flush()
    tape.write("merged", tokens=2)
    with pytest.raises(StoreError):
        tape.flush()
    monkeypatch.setattr(store, "create", create)
    tape.flush()
    assert [event["tokens"] for event in written(store)] == [1, 2] and len(store.list(keys.tape_prefix("a"))) == 2


@pytest.mark.parametrize("lets_two_win", [False, True])
def test_two_processes_of_one_name_never_write_over_each_other(request, monkeypatch, lets_two_win) -> None:
    store = MemoryStore(request.node.name)
    if lets_two_win:
        monkeypatch.setattr(store, "create", lambda key, data: store.put(key, data) or True)
    tapes = [Tape(store, "a", incarnation) for incarnation in range(2)]
    for number in range(2):
        for tape in tapes:
            tape.write("offer", tokens=number)
            tape.flush()
    assert [event["tokens"] for event in written(store)] == [0, 0, 1, 1]
    assert sorted(event["incarnation"] for event in written(store)) == [0, 0, 1, 1]


def test_a_flush_that_ends_long_after_another_one_takes_no_event_from_it(request, monkeypatch) -> None:
    """As a courier's does for which nobody waits any more."""
    store = MemoryStore(request.node.name)
    tape, create = Tape(store, "a", 0), store.create
    is_in, may_end = threading.Event(), threading.Event()
    late = threading.Thread(target=tape.flush)

    def slow(key: str, data: bytes) -> bool:
        if threading.current_thread() is late:
            is_in.set()
            may_end.wait(PATIENCE_S)
        elif b"merged" in data and not may_end.is_set():
            may_end.set()
            late.join(PATIENCE_S)
            raise StoreError("not sent")
        return create(key, data)

    monkeypatch.setattr(store, "create", slow)
    tape.write("offer", tokens=1)
    late.start()
    assert is_in.wait(PATIENCE_S)
    tape.flush()
    tape.write("merged", tokens=2)
    with pytest.raises(StoreError):
        tape.flush()
    tape.flush()
    assert [event["tokens"] for event in written(store)] == [1, 2] and len(store.list(keys.tape_prefix("a"))) == 2
