"""What stands in the bucket of `bench join-command`, seen from where the bucket is: closed rounds, one site's offers.

`python -m tests.bench.join.watch STORE FRAGMENTS SITE` prints a line of JSON each time something is new.
"""

import json
import sys
import time
from collections.abc import Iterator

from composer_prime.errors import KeyMissing, StoreError
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.records import Commit

LOOK_S = 0.2


class Watch:
    """One run, watched for one site."""

    def __init__(self, store: Store, fragments: int, site: str) -> None:
        self._store = store
        self._site = site
        self._closed = [0] * fragments
        self._told: set[str] = set()

    def look(self) -> Iterator[dict[str, float]]:
        """What is new: {"closed": rounds of the fragment with the fewest}, {"offered": ...}, {"merged": ...}."""
        before = min(self._closed)
        for fragment in range(len(self._closed)):
            yield from self._look_at(fragment)
        if min(self._closed) > before:
            yield {"closed": min(self._closed)}

    def _look_at(self, fragment: int) -> Iterator[dict[str, float]]:
        """Only open rounds are listed: a run's log is long."""
        while True:
            version = self._closed[fragment]
            if keys.offer(fragment, version, self._site) in self._store.list(keys.offers_prefix(fragment, version)):
                yield from self._tell("offered")
            try:
                key = keys.commit(fragment, version)
                commit = Commit.from_bytes(self._store.get(key), key)
            except KeyMissing:
                return
            self._closed[fragment] += 1
            if any(entry.site == self._site for entry in commit.taken):
                yield from self._tell("offered")
                yield from self._tell("merged")

    def _tell(self, what: str) -> Iterator[dict[str, float]]:
        if what not in self._told:
            self._told.add(what)
            yield {what: time.time()}


def main(uri: str, fragments: int, site: str) -> None:
    """Watch until the process is ended."""
    watch = Watch(open_store(uri), fragments, site)
    while True:
        try:
            for found in watch.look():
                print(json.dumps(found), flush=True)
        except StoreError as error:
            print(json.dumps({"failed": str(error)}), file=sys.stderr, flush=True)
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
