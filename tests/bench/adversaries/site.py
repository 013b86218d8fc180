"""One adversary: an admitted site that never trains, follows the log, and puts a hostile offer into every round.

`HostileSite` is driven pass by pass; `python -m tests.bench.adversaries.site PLAN.json` drives it by the clock
beside a real run until that ends. What it did goes into its book, a JSON line an offer.
"""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from composer_prime.errors import ComposerPrimeError, KeyMissing
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.entering import SiteIdentity, enter
from composer_prime.sync.learning import Present
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat, Commit, Offer, SiteState, Taken
from composer_prime.sync.run import load_run
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from tests.bench.adversaries.kinds import KINDS, Hostile, Scene, craft

BEATS_PER_LIVENESS = 5
POLL_S = 0.05
OVERWRITE_S = 2.0
"""Seconds after which the second offer of an equivocation is put over the first: others have read that by then."""
WAIT_FOR_RUN_S = 300.0
FAR_FUTURE = 10**9


@dataclass(frozen=True)
class Deed:
    """A line of the book: which hostile offer was made; `by` is who made it, `site` under which name it stands."""

    by: str
    kind: str
    variant: str
    site: str
    fragment: int
    version: int


class HostileSite:
    """A process that holds an admitted key and means harm. Nothing of it is ever committed by itself."""

    def __init__(
        self,
        store: Store,
        site: str,
        key: SigningKey | None,
        *,
        honest: Collection[str],
        runtime: Runtime,
        first_kind: int,
        seed: int = 0,
        kinds: Sequence[str] = tuple(KINDS),
        overwrite_s: float = OVERWRITE_S,
    ) -> None:
        """Enter the run at `store`.

        honest       the sites to harm
        first_kind   index of the kind it plays first; the others follow in turn
        kinds        what it plays
        overwrite_s  seconds after which a second offer is put over the first
        """
        self._overwrite_s = overwrite_s
        self._honest = frozenset(honest)
        self._store, self.site, self._runtime = store, site, runtime
        self._run = load_run(store)
        entered = enter(store, self._run, SiteIdentity(site, key), runtime)
        self._roster, self._incarnation = entered.roster, entered.incarnation
        self._courier = Present(store, entered, runtime=runtime).read()
        names = list(kinds)
        self._queue = deque(names[first_kind % len(names) :] + names[: first_kind % len(names)])
        self._turns = dict.fromkeys(names, 0)
        self._played: set[tuple[int, int]] = set()
        self._overwrites: list[tuple[float, str, bytes]] = []
        self._random = torch.Generator().manual_seed(seed)
        self._outsider = SigningKey.generate()
        self._before = [self._courier.master(index).weights for index in range(len(self._run.fragments))]
        self._moved: dict[int, Tensor] = {}
        self._skewed = False
        self._counter = 0
        self.book: list[Deed] = []
        self.beat("live")

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end."""
        return self._courier.is_over()

    def beat(self, state: SiteState) -> None:
        """A sign of life; one from the far future, or from before the last one, where time is skewed."""
        self._counter += 1
        versions = self._courier.versions()
        record = Beat(
            site=self.site,
            incarnation=self._incarnation,
            counter=FAR_FUTURE - self._counter if self._skewed else self._counter,
            state=state,
            versions=tuple(FAR_FUTURE for _ in versions) if self._skewed else versions,
            inner_step=FAR_FUTURE if self._skewed else 0,
            trained_tokens=0,
            pins=self._courier.pins(),
        )
        self._store.put(keys.beat(self.site, self._incarnation), self._roster.sign(record).to_bytes())

    def act(self) -> None:
        """One pass: follow the log, then play the next kind in every open round that has none of ours yet."""
        self._courier.follow()
        now = self._runtime.now()
        for due, key, data in [one for one in self._overwrites if one[0] <= now]:
            self._store.put(key, data)
            self._overwrites.remove((due, key, data))
        for fragment, version in enumerate(self._courier.versions()):
            if version < self._run.terms.final_version and (fragment, version) not in self._played:
                self._play(fragment, version)

    def _play(self, fragment: int, version: int) -> None:
        others = self._offers(fragment, version)
        if not others:
            return  # nobody trains on this round yet
        hostile = craft(self._queue[0], self._scene(fragment, version, others))
        if hostile is None:
            self._queue.rotate(-1)  # the round doesn't give what it needs: the next kind, in the next pass
            return
        self._skewed = hostile.kind == "time skew"
        for key, data in hostile.objects:
            self._store.put(key, data)
        self._note(hostile, version)
        self._overwrites += [(self._runtime.now() + self._overwrite_s, *one) for one in hostile.later]

    def _note(self, hostile: Hostile, version: int) -> None:
        self._turns[hostile.kind] += 1
        self._played |= {(hostile.fragment, version), (hostile.fragment, hostile.version)}
        self._queue.rotate(-1)
        self.book.append(
            Deed(self.site, hostile.kind, hostile.variant, hostile.site, hostile.fragment, hostile.version)
        )

    def _scene(self, fragment: int, version: int, others: dict[str, Offer]) -> Scene:
        master, coding = self._courier.master(fragment), self._run.codings[fragment]
        return Scene(
            roster=self._roster,
            run_sha=self._run.sha256,
            site=self.site,
            incarnation=self._incarnation,
            coding=coding,
            terms=self._run.terms,
            version=version,
            base_sha=master.sha256,
            movement=self._movement(fragment, others),
            others=others,
            past=self._past(fragment, version),
            read=self._store.get,
            outsider=self._outsider,
            turn=self._turns[self._queue[0]],
        )

    def _movement(self, fragment: int, others: dict[str, Offer]) -> Tensor:
        """Where the run last went, as long as the others' movements now, so that it can't be told by its norm.

        Before the first merge there is no such direction, and noise has to do.
        """
        weights = self._courier.master(fragment).weights
        if not torch.equal(weights, self._before[fragment]):
            self._moved[fragment] = self._before[fragment] - weights
            self._before[fragment] = weights
        direction = torch.randn(weights.numel(), generator=self._random) * 1e-2
        if fragment in self._moved:
            direction = self._moved[fragment] + direction * self._moved[fragment].norm() / direction.norm() / 10
        norms = sorted(offer.norm for offer in others.values())
        return direction * (norms[len(norms) // 2] / direction.norm())

    def _offers(self, fragment: int, version: int) -> dict[str, Offer]:
        """What honest sites have offered in this round, with something to merge."""
        found: dict[str, Offer] = {}
        for key in self._store.list(keys.offers_prefix(fragment, version)):
            record = find_record(self._store, Offer, key) if keys.is_offer(key) else None
            if record is not None and record.site in self._honest and record.payload is not None and record.norm > 0:
                found[record.site] = record
        return found

    def _past(self, fragment: int, version: int) -> list[Taken]:
        versions = range(max(0, version - self._run.terms.max_stale_rounds), version)
        commits = [find_record(self._store, Commit, keys.commit(fragment, number)) for number in versions]
        return [taken for commit in commits if commit is not None for taken in commit.taken]


@dataclass(frozen=True)
class HostilePlan:
    """What one adversary's process is told.

    store       root of the run in the bucket
    key_file    of its admitted key
    honest      the sites to harm
    first_kind  index of the kind it plays first
    book        where the book goes, a file
    kinds       what it plays, in turn
    """

    store: str
    site: str
    key_file: str
    honest: list[str]
    first_kind: int
    seed: int
    book: str
    kinds: Sequence[str] = tuple(KINDS)

    def save(self, path: Path) -> Path:
        """Write the plan as JSON; the path is returned."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_book(path: Path) -> list[Deed]:
    """The deeds that an adversary's process wrote down."""
    return [Deed(**json.loads(line)) for line in path.read_text().splitlines()]


def harass(plan: HostilePlan, wait: Callable[[float], object] = time.sleep) -> int:
    """Take part in the run of the plan from its creation to its end; the number of hostile offers made.

    Raises BadInput when no run appears, ConfigError when the key isn't admitted.
    """
    store, runtime = open_store(plan.store), ThreadRuntime()
    try:
        _wait_for_run(store, runtime, wait)
        key = SigningKey.load(Path(plan.key_file))
        site = HostileSite(
            store,
            plan.site,
            key,
            honest=plan.honest,
            runtime=runtime,
            first_kind=plan.first_kind,
            seed=plan.seed,
            kinds=plan.kinds,
        )
        beat_every_s = load_run(store).terms.liveness_s / BEATS_PER_LIVENESS
        beaten_at, written = runtime.now(), 0
        with Path(plan.book).open("w", encoding="utf-8") as book:
            while not site.is_over:
                site.act()
                if runtime.now() - beaten_at >= beat_every_s:
                    site.beat("live")
                    beaten_at = runtime.now()
                for deed in site.book[written:]:
                    book.write(json.dumps(asdict(deed)) + "\n")
                book.flush()
                written = len(site.book)
                wait(POLL_S)
        site.beat("done")
        return written
    finally:
        runtime.close()
        store.close()


def _wait_for_run(store: Store, runtime: Runtime, wait: Callable[[float], object]) -> None:
    until = runtime.now() + WAIT_FOR_RUN_S
    while True:
        try:
            store.get_range(keys.manifest(), 0, 1)
            return
        except KeyMissing:
            if runtime.now() >= until:
                find_manifest(store)  # raises BadInput, which says what is missing
        wait(POLL_S)


def main(arguments: list[str]) -> int:
    """Run the adversary of the plan in the file given; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    (path,) = arguments
    try:
        print(f"hostile offers: {harass(HostilePlan(**json.loads(Path(path).read_text())))}")
    except ComposerPrimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
