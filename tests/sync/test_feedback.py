"""Error feedback: what coding took from a merged offer comes with the next one, also over a crash (rules 9 and 12)."""

import copy
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.store import keys
from composer_prime.store.obstore import MemoryStore
from composer_prime.sync.journal import FileJournal, Journal
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import Terms
from tests.patience import PATIENCE_S
from tests.store.power_cut import Disk
from tests.sync.harness import HandSite, SpoilingStore, ThreadSite, closing, commit_of, make_net, make_terms

LOSSY = ["int8", "int4", "topk", "bf16"]


class Walker:
    """A site that moves every parameter by seeded noise at each step, and remembers the whole of its movement."""

    def __init__(
        self, store, terms: Terms, *, journal: Journal | None = None, checkpoint: dict[str, Any] | None = None
    ) -> None:
        self.net = make_net()
        self.outer = OuterLoop(store, terms, run="run", site="a", journal=journal)
        self.steps = 0
        if checkpoint is not None:
            self.net.load_state_dict(checkpoint["net"])
            self.outer.load_state_dict(checkpoint["outer"])
            self.steps = checkpoint["steps"]
        self.outer.join(self.net.named_parameters())

    def step(self) -> None:
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        self.outer.after_inner_step(10, 1)

    def checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy({"net": self.net.state_dict(), "outer": self.outer.state_dict(), "steps": self.steps})

    def held(self, fragment: int = 0) -> torch.Tensor:
        """Where the site stands with all that it still owes: local values less the residual."""
        stand = self.outer._stands[fragment]
        local = self.outer._params.read(self.outer._fragments[fragment])
        return local if stand.residual is None else local - stand.residual

    def die(self) -> None:
        self.outer._driver.close()


def plain(steps: int) -> Any:
    net = make_net()
    with torch.no_grad():
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(step)
            for parameter in net.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
    return net


def flat(walker: Walker, net, fragment: int = 0) -> torch.Tensor:
    named = dict(net.named_parameters())
    return torch.cat([named[name].detach().flatten() for name in walker.outer._fragments[fragment].names])


@pytest.mark.parametrize("codec", LOSSY)
def test_with_feedback_no_movement_is_ever_lost_to_coding(store, codec):
    site = Walker(store, make_terms(codec=codec, rounds=8))
    for steps in range(1, 30):
        site.step()
        for fragment in range(2):
            wanted = flat(site, plain(steps), fragment)
            torch.testing.assert_close(site.held(fragment), wanted, rtol=1e-4, atol=1e-4)
    assert site.outer._stands[0].residual is not None
    site.outer.close()


def test_without_feedback_coding_takes_its_toll(store):
    site = Walker(store, make_terms(codec="topk", rounds=8, error_feedback=False))
    for _ in range(20):
        site.step()
    assert site.outer._stands[0].residual is None
    assert float((site.held() - flat(site, plain(20))).abs().max()) > 0.1
    site.outer.close()


def test_a_codec_that_loses_nothing_leaves_nothing(store):
    site = Walker(store, make_terms(codec="fp32"))
    for _ in range(8):
        site.step()
    assert [stand.residual for stand in site.outer._stands] == [None, None]
    site.outer.close()


@pytest.mark.parametrize("killed_after", [5, 6, 7, 8, 9, 10, 12])
@pytest.mark.parametrize("checkpoint_at", [1, 3, 4, 5])
def test_a_killed_site_gets_its_residual_back_from_the_journal(store, tmp_path: Path, checkpoint_at, killed_after):
    terms, journal = make_terms(codec="int4", rounds=8), FileJournal(tmp_path)
    first, saved = Walker(store, terms, journal=journal), {}
    for step in range(1, killed_after + 1):
        first.step()
        if step == checkpoint_at:
            saved = first.checkpoint()
    first.die()
    back = Walker(store, terms, journal=journal, checkpoint=saved)
    for fragment in range(2):
        # It holds the movement up to its newest offer, or to the checkpoint when that is newer.
        trained = back.outer._stands[fragment].ledger.trained // 10
        assert checkpoint_at <= trained <= killed_after
        torch.testing.assert_close(back.held(fragment), flat(back, plain(trained), fragment), rtol=1e-4, atol=1e-4)
    back.outer.close()


def test_a_residual_changes_only_when_the_commit_took_the_offer(store):
    terms = make_terms(codec="int4", fragments=1, rounds=4, grace_s=60.0)
    spoiling, joined = SpoilingStore(store), threading.Event()
    other = ThreadSite(store, terms, "b")
    other.after_join = lambda: joined.wait(PATIENCE_S)
    other.start()
    site, residuals, merged = Walker(spoiling, terms), [], []
    joined.set()
    for spoils in (False, True, False):
        spoiling.spoils = spoils
        for _ in range(terms.inner_steps):
            site.step()
        residuals.append(site.outer._stands[0].residual)
        merged.append(site.outer._stands[0].ledger.merged)
    while not site.outer.finished:
        site.step()
    site.outer.close()
    other.join(PATIENCE_S)
    assert merged == [40, 40, 120], "taken, missed, taken with what was missed"
    first, missed, taken = residuals
    assert first.abs().max() > 0
    assert torch.equal(missed, first) and not torch.equal(taken, missed)


def test_an_offer_made_after_a_missed_one_is_taken_with_a_residual_of_its_own(store):
    clock = [0.0]
    a, b = (HandSite(store, make_terms(codec="int4", grace_s=0.0), name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    closing(clock, a)
    generator = torch.Generator().manual_seed(0)
    b.hand_over(0, torch.randn(b.replicas[0].numel, generator=generator))
    b.tick()
    settled = b.courier.collect(0)[1]
    assert settled is not None and settled.outcome == "missed"
    b.hand_over(0, torch.randn(b.replicas[0].numel, generator=generator))
    for _ in range(4):
        b.tick()
        a.tick()
        clock[0] += 1.0
    settled = b.courier.collect(0)[1]
    assert settled is not None and settled.outcome == "taken" and settled.residual is not None


def test_the_journal_stands_before_the_offers_record(store):
    order: list[str] = []

    class Noting:
        def write(self, fragment: int, payload: str, residual: torch.Tensor) -> None:
            assert not store.list(keys.offers_prefix(0, 0))
            order.append(payload)

        def read(self, fragment: int, payload: str) -> None:
            return None

    site = HandSite(store, make_terms(codec="int8"), "a", [0.0], journal=Noting())
    site.hand_over(0, 1.0)
    site.tick()
    assert len(order) == 1 and store.list(order[0]) == order


def test_an_offer_waits_for_a_full_disk_and_is_merged_once_with_nothing_lost(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("composer_prime.sync.driver.RETRY_S", 0.02)
    sync, offered_before = os.fsync, []

    def full(file: int) -> None:
        offered_before.append(store.list(keys.offers_prefix(0, 0)))
        if len(offered_before) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr("composer_prime.sync.journal.os.fsync", full)
    site = Walker(store, make_terms(codec="int8", rounds=8), journal=FileJournal(tmp_path))
    saved = site.checkpoint()
    for _ in range(2):  # up to the first turn, whose offer is merged before the step returns
        site.step()
    site.die()
    assert offered_before == [[]] * 4, "two that failed, the entry's bytes and its name"
    assert caplog.text.count("can't be written (No space left on device): free some space on the site's disk") == 2
    commit = commit_of(store)
    assert [(entry.site, entry.tokens) for entry in commit.taken] == [("a", 20)]
    assert store.list(keys.payloads_prefix(0, 0, "a")) == [commit.taken[0].payload]
    back = Walker(store, make_terms(codec="int8", rounds=8), journal=FileJournal(tmp_path), checkpoint=saved)
    ledger = back.outer._stands[0].ledger
    assert (ledger.trained, ledger.merged, ledger.dropped) == (20, 20, 0)
    torch.testing.assert_close(back.held(), flat(back, plain(2)), rtol=1e-5, atol=1e-5)
    assert store.list(keys.offers_prefix(0, 1)) == []
    back.outer.close()


def test_the_journal_keeps_the_last_two_payloads_of_each_fragment(tmp_path: Path):
    journal = FileJournal(tmp_path / "journal")
    payloads = [keys.payload(0, version, "a", str(version) * 64) for version in range(4)]
    for number, payload in enumerate(payloads):
        journal.write(0, payload, torch.full((3,), float(number)))
    journal.write(1, keys.payload(1, 0, "a", "f" * 64), torch.zeros(3))
    assert [journal.read(0, payload) is not None for payload in payloads] == [False, False, True, True]
    kept = journal.read(0, payloads[3])
    assert kept is not None and kept.tolist() == [3.0] * 3
    (path,) = [path for path in (tmp_path / "journal").iterdir() if "3333" in path.name]
    path.write_bytes(path.read_bytes()[:-5])
    assert journal.read(0, payloads[3]) is None


def test_a_journal_entry_outlasts_a_power_cut_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(monkeypatch)
    FileJournal(tmp_path / "site" / "journal").write(0, keys.payload(0, 0, "a", "f" * 64), torch.zeros(3))
    (entry,) = (tmp_path / "site" / "journal").iterdir()
    assert disk.has(entry, below=tmp_path)


class FullDisk:
    """A journal that can't be written."""

    def write(self, fragment: int, payload: str, residual: torch.Tensor) -> None:
        raise StoreError("can't be written (No space left on device)")

    def read(self, fragment: int, payload: str) -> None:
        return None


def test_a_site_whose_journal_is_full_holds_up_no_round_and_uploads_its_payload_once(store, clock):
    puts: list[str] = []

    class Counted(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            puts.append(key)
            super().put(key, data)

    terms = make_terms(codec="int8", grace_s=2.0)
    counted = Counted(store.uri.removeprefix("memory://"))
    a = HandSite(counted, terms, "a", clock, journal=FullDisk())
    b = HandSite(store, terms, "b", clock)
    for site, value in ((a, 1.0), (b, 2.0)):
        site.hand_over(0, torch.randn(a.replicas[0].numel) * value)
    for _ in range(8):
        b.tick()
        with pytest.raises(StoreError, match="No space left"):
            a.tick()
        clock[0] += 1.0
    b.courier.follow()
    settled = b.courier.collect(0)[1]
    assert b.courier.versions() == (1, 0) and settled is not None and settled.outcome == "taken"
    assert sum(map(keys.is_payload, puts)) == 1


def test_a_journal_on_a_full_disk_leaves_no_half_entry_that_keeps_it_full(tmp_path, monkeypatch):
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = FileJournal(tmp_path)
    (tmp_path / "0000-aaaa.new").write_bytes(b"of a process that was killed")
    with monkeypatch.context() as patch:
        patch.setattr("composer_prime.sync.journal.os.fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            journal.write(0, keys.payload(0, 0, "a", "1" * 64), torch.zeros(3))
    assert list(tmp_path.iterdir()) == []
