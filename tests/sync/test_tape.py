"""A site's tape in the bucket: events in order, and no secret of the process that wrote them."""

import json

from composer_prime.redaction import HIDDEN, SECRET_NAMES_VARIABLE
from composer_prime.store import keys
from composer_prime.store.memory import MemoryStore
from composer_prime.sync.tape import Tape

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
