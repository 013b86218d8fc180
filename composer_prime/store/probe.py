"""Whether an opened store can be trusted: a cheap look for whoever joins, and races of writers for whoever creates.

The outer loop rests on one atomic act, and some servers take `If-None-Match` and ignore it without a word.
"""

import os
import secrets
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from composer_prime.errors import KeyMissing, StoreError, StoreUnusable
from composer_prime.store import keys
from composer_prime.store.base import Store

RACES_AT_ONCE = 8
"""How many races run beside each other: SeaweedFS lets the losers of a key wait for a second or more (20 races of 16
take 30 s one by one, 6 s so), and more at once would only queue for the client's connections."""
START_S = 30
"""Within which all writers of a race must have a thread; a process that may have no more fails then, and waits not."""
_REMEDY = "use a store that honours If-None-Match (AWS S3, SeaweedFS, Ceph), or a folder"


def probe_store(store: Store, *, site: str | None = None) -> None:
    """Write, read and list a throw-away object, and make sure that a second writer of it loses; then remove it.

    site   who tries: where credentials are scoped to a site, nobody else's can touch its objects

    StoreUnusable, naming the store and the cause, when the store can't be reached, read or written, or when it lets
    two writers of one key win: every site would then follow its own log.

    A store behind a gateway is asked whether it lets us in: its bucket was tried by those who may write to it.
    """
    if store.is_guarded:
        store.introduce()
        return
    key = keys.probe(f"{os.getpid()}-{secrets.token_hex(8)}", site)
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    try:
        won = (store.create(key, first), store.create(key, second))
        held = store.get(key)
        listed = store.list(key)
        store.delete(key)
    except StoreError as error:
        raise StoreUnusable(f"store {store.uri} can't be used: {error}") from error
    if won != (True, False) or held != first:
        raise StoreUnusable(
            f"store {store.uri} does not keep create-if-absent (of two writers of one key, {sum(won)} won, and the "
            f"{'first' if held == first else 'second'} one's bytes stand; must be: 1, the first): {_REMEDY}"
        )
    if listed != [key]:
        raise StoreUnusable(
            f"store {store.uri} does not list what was just written (listed {listed}, must be {[key]}): "
            "use a store whose listings are consistent"
        )


def race_store(store: Store, *, writers: int = 16, races: int = 20) -> None:
    """Let `writers` threads create one key at once, `races` times on keys of their own; then remove the keys.

    Takes seconds on a server that makes losers wait: for the creation of a run, not for every joiner.

    StoreUnusable, naming the store, how many races had how many winners, and the remedy, unless every race had exactly
    one whose bytes stand; also when the store fails.
    """

    def race(number: int) -> tuple[int, bool]:
        """How many writers won the key, and whether a winner's bytes stand."""
        key, start = keys.probe(f"{os.getpid()}-{secrets.token_hex(8)}-{number}"), threading.Barrier(writers)

        def write(data: bytes) -> bool:
            start.wait(timeout=START_S)
            return store.create(key, data)

        offered = [f"writer-{writer}-{secrets.token_hex(8)}".encode() for writer in range(writers)]
        # A race's own pool always has room for all its writers, which wait for each other.
        with ThreadPoolExecutor(writers, thread_name_prefix="racer") as pool:
            won = list(pool.map(write, offered))
        try:
            held = store.get(key)
        except KeyMissing:
            held = None
        store.delete(key)
        return sum(won), held in [data for data, has_won in zip(offered, won, strict=True) if has_won]

    try:
        with ThreadPoolExecutor(min(RACES_AT_ONCE, races), thread_name_prefix="race") as pool:
            ended = list(pool.map(race, range(races)))
    except StoreError as error:
        raise StoreUnusable(f"store {store.uri} can't be used: {error}") from error
    if set(ended) != {(1, True)}:
        counts = sorted(Counter(num_winners for num_winners, _ in ended).items())
        text = ", ".join(f"{count} had {number} winner{'' if number == 1 else 's'}" for number, count in counts)
        if num_fallen := sum(not stands for _, stands in ended):
            text += f"; in {num_fallen} a loser's bytes stand"
        raise StoreUnusable(
            f"store {store.uri} does not keep create-if-absent (of {races} races of {writers} writers, {text}; each "
            f"must have 1 winner, whose bytes stand): {_REMEDY}"
        )
