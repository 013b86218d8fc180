"""Small real runs in a folder, made by our own sites on a hand-driven clock, and what our own verifier says of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_prime.errors import CorruptObject
from composer_prime.store import open_store
from composer_prime.sync.records import Commit
from composer_prime.sync.replica import Replica, Round
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import HandSite, make_terms

OWNER = SigningKey.from_bytes(bytes(32))
KEYS = {name: SigningKey.from_bytes(name.encode() * 32) for name in "abcdefg"}


class Play:
    """A run of two fragments, by default of 7,700 and 4,907 values: whole blocks of any codec and a short last one."""

    def __init__(
        self, folder: Path, names: str, *, signed: bool = False, sizes: tuple[int, ...] = (10, 700, 7), **terms: Any
    ) -> None:
        """names: of sites of one letter each, admitted from the start where `signed`; sizes: of the model's layers"""
        self.store = open_store(f"file://{folder}")
        self.folder, self.clock, self._sizes = folder, [0.0], sizes
        self.scale = 0.01
        """Of the first site's movement."""
        self._terms = make_terms(**{"rounds": 9, "snapshot_rounds": 100, "liveness_s": 1e6, "slices": 8, **terms})
        self._founding = Founding(OWNER.public, {name: KEYS[name].public for name in names}) if signed else None
        self.sites: list[HandSite] = []
        for name in names:
            self.join(name)

    def join(self, name: str) -> HandSite:
        """One more site; in a run with keys it must be admitted."""
        torch.manual_seed(0)
        layers = [nn.Linear(*pair) for pair in zip(self._sizes, self._sizes[1:], strict=False)]
        founding = self._founding or Founding()
        key = KEYS[name] if self._founding else None
        site = HandSite(
            self.store, self._terms, name, self.clock, net=nn.Sequential(*layers), key=key, founding=founding
        )
        self.sites.append(site)
        return site

    def rounds(self, count: int, fragments: int = 2, spoil: Callable[[Path, int], object] | None = None) -> "Play":
        """Rounds in which every site offers a random movement, of as many tokens and as long as none other's.

        spoil   called with the folder and the round when the offers stand and nobody has read them
        """
        for _ in range(count):
            for fragment in range(fragments):
                self._round(fragment, spoil or (lambda folder, version: None))
        return self

    def _round(self, fragment: int, spoil: Callable[[Path, int], object]) -> None:
        before = max(site.replicas[fragment].version for site in self.sites)
        for place, site in enumerate(self.sites):
            generator = torch.Generator().manual_seed(1000 * before + 10 * fragment + place)
            movement = torch.randn(site.replicas[fragment].numel, generator=generator) * self.scale * 3**place
            site.hand_over(fragment, movement, tokens=3 + 7 * place)
            site.runtime.run_tasks()
        spoil(self.folder, before)
        for _ in range(20):
            for site in self.sites:
                site.beat()
                site.courier._look_at_members(self.clock[0])
                site.tick()
            if all(site.replicas[fragment].version > before for site in self.sites):
                break
            self.clock[0] += 1.0
        for site in self.sites:
            assert site.replicas[fragment].version > before, f"round {before} of fragment {fragment} stays open"
            site.courier.collect(fragment)


@dataclass
class Verdict:
    """What `composer_prime verify` makes of a run."""

    masters: dict[tuple[int, int], str] = field(default_factory=dict)
    voids: dict[tuple[int, int], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """The first fault of each fragment."""
    is_closed: bool = False


def verify(folder: Path) -> Verdict:
    """Ask our own verifier, and listen to it."""
    verdict = Verdict()
    verifier = _Overheard(folder, verdict)
    try:
        for fragment in range(len(verifier.run.fragments)):
            try:
                verifier.check(fragment)
            except CorruptObject as error:
                verdict.wrong.append(str(error))
        verdict.is_closed = verifier.is_closed
    finally:
        verifier.close()
    return verdict


class _Overheard(Verifier):
    """A verifier that writes down every master it rebuilds and every round it finds void."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        super().__init__(open_store(f"file://{folder}"))
        self._verdict = verdict

    def _compare(self, replica: Replica, snapshots: Any) -> int:
        self._verdict.masters[replica.fragment, replica.version] = replica.master.sha256
        return super()._compare(replica, snapshots)

    def _check_void(self, replica: Any, closed: Round, previous: str, data: bytes, snapshots: Any) -> None:
        self._verdict.voids[closed.fragment, closed.version] = closed.fault or ""
        super()._check_void(replica, closed, previous, data, snapshots)


def commit_at(folder: Path, version: int, fragment: int = 0) -> Path:
    """The file of a commit."""
    return folder / f"rounds/{fragment:04}/{version:08}/commit.json"


def read_commit(folder: Path, version: int) -> Commit:
    """A commit of fragment 0."""
    return Commit.from_bytes(commit_at(folder, version).read_bytes(), "commit")
