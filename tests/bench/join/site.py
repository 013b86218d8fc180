"""One site of `bench join`, a process in a network namespace: a founder that goes on and on, or the one that joins.

    python -m tests.bench.join.site TASK.json

A founder says when it has joined, and when so many rounds have closed. The joiner says when its parameters stand on the
masters, when its first offer's record does, and when that is merged. All go on until a line on their standard input.
"""

import json
import logging
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.journal import FileJournal
from composer_prime.sync.metered import MeteredStore
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import Terms
from tests.bench.link.site import Model, Moment, inner_step, say

HURRY_S = 0.003
"""Seconds of a founder's inner step until so many rounds have closed: nothing is measured yet."""
TOKENS = (900, 1100)
"""Tokens of an inner step, drawn: offers weigh unequally, so their multipliers are no powers of two."""


@dataclass(frozen=True)
class JoinTask:
    """What a site does.

    params         parameters in all, in as many equal blocks as the terms have fragments; they come from bf16
    step_s         seconds an inner step takes: a timed wait
    after_rounds   for a founder: rounds of every fragment that it says have closed; None: it joins a run that is there
    own_weights    whether it starts with the weights that the run started from, as who has the model's files does
    launched_at    when its process was started, on this machine's monotonic clock
    """

    site: str
    store: str
    folder: str
    terms: dict[str, Any]
    params: int
    step_s: float
    after_rounds: int | None
    own_weights: bool
    launched_at: float


class FirstOffer(MeteredStore):
    """A store that remembers when the first offer's record stood."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.at: float | None = None

    def create(self, key: str, data: bytes) -> bool:
        won = super().create(key, data)
        if won and self.at is None and keys.is_offer(key):
            self.at = time.monotonic()
        return won


class Beginnings(logging.Handler):
    """Hears from which masters a process begins."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def main(path: Path) -> None:
    """Join, and tell what the bench asks for, until it says that it is enough."""
    torch.set_num_threads(1)
    task = JoinTask(**json.loads(path.read_text()))
    imported_s = time.monotonic() - task.launched_at
    beginnings = Beginnings()
    heard = logging.getLogger("composer_prime.sync.learning")
    heard.addHandler(beginnings)
    heard.setLevel(logging.INFO)
    terms = Terms(**task.terms)
    model = _model(task, terms)
    store, journal = FirstOffer(open_store(task.store)), FileJournal(Path(task.folder) / task.site)
    loop = OuterLoop(store, terms, run="join", site=task.site, journal=journal)
    try:
        started_at = time.monotonic()
        loop.join(list(model.named_parameters().items()))  # type: ignore[arg-type]
        trains_at, draw = time.monotonic(), random.Random(task.site)
        while not loop.summary()["masters"]:
            inner_step(model, task.step_s, terms.steps_per_turn)
            loop.after_inner_step(draw.randint(*TOKENS), 1)
        joined = Moment.of(loop)
        say(
            {
                "imported_s": imported_s,
                "ready_s": started_at - task.launched_at,
                "trains_s": trains_at - task.launched_at,
                "joined_s": joined.at_s - task.launched_at,
                "object_down": joined.object_down,
                "wire_down": joined.wire_down,
                "cpu_s": joined.cpu_s,
                "begins": beginnings.heard,
                "rounds": loop.summary()["outer_rounds"],
            }
        )
        train(loop, model, task, terms, store)
    finally:
        loop.close()


def _model(task: JoinTask, terms: Terms) -> Model:
    model = Model(task.params, terms.fragments, task.site)
    for values in model.named_parameters().values():
        values.data = values.data.bfloat16().float()
        if not task.own_weights:
            values.data.add_(1.0)
    return model


def train(loop: OuterLoop, model: Model, task: JoinTask, terms: Terms, store: FirstOffer) -> None:
    """Inner steps until a line on the standard input; on the way, what the bench waits to hear, once."""
    enough = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), enough.set()), daemon=True).start()
    draw, told, offered = random.Random(task.site), False, False
    while not enough.is_set():
        hurries = task.after_rounds is not None and not told
        inner_step(model, HURRY_S if hurries else task.step_s, terms.steps_per_turn)
        loop.after_inner_step(draw.randint(*TOKENS), 1)
        if task.after_rounds is not None:
            versions = [master["version"] for master in loop.summary()["masters"]]
            if not told and min(versions) >= task.after_rounds:
                told = True
                say({"versions": versions})
            continue
        if store.at is not None and not offered:
            offered = True
            say({"offered_s": store.at - task.launched_at})
        if not told and any(tokens["merged"] for tokens in loop.summary()["tokens"]):
            told = True
            say({"merged_s": time.monotonic() - task.launched_at})
    say({"masters": [(each["version"], each["sha256"]) for each in loop.summary()["masters"]]})
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
