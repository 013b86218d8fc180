"""What must hold after every event, whatever went wrong: checked from the outside, with books of its own.

Reads the bucket's writes as they happen, every master that a process holds, and each process's ledgers.
"""

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer_prime.outer.codecs import get_codec
from composer_prime.outer.fragments import plan_fragments
from composer_prime.outer.masters import unpack_master
from composer_prime.outer.payloads import decode
from composer_prime.store import keys
from composer_prime.sync.protocol import reducer_rank
from composer_prime.sync.records import Commit, Manifest, Offer, Part
from composer_prime.sync.run import FragmentCoding
from composer_prime.sync.snapshots import Master
from composer_prime.sync.validity import digests_of, part_shares
from tests.outer.reference import numpy_mean, numpy_with_guests
from tests.simulation.coverage import refusal
from tests.simulation.pins import Pins
from tests.simulation.runtime import Process
from tests.simulation.site import UNIT, SiteProcess

if TYPE_CHECKING:
    from tests.simulation.world import World

TOLERANCE = UNIT / 4
"""Rounding of a seed's additions stays far below it."""


@dataclass
class Book:
    """What commits took of one process's name in one fragment, up to `version`, and what the ledger may differ by."""

    version: int = 0
    tokens: int = 0
    movement: float = 0.0
    offset: float = 0.0
    merged_offset: int = 0
    missed: int = 0
    joined_at: int = 0
    foreign: bool = False
    """An offer of another process of this name was taken since the last look: it may be counted or not."""
    moved_on: bool = False
    """Movement was dropped that isn't known to the last bit."""
    coded: bool = False
    """An offer was merged, and what coding took from it is not kept."""
    base: Any = None
    base_own: float = 0.0


@dataclass(frozen=True)
class Took:
    """One entry of a commit: its tokens, and how far its payload moves its site's own coordinate."""

    tokens: int
    movement: float
    payload: str
    incarnation: int


class Invariants:
    """One world's books. `violations` is what a seed is judged by."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.violations: list[str] = []
        self._masters: dict[tuple[int, int], str] = {}
        self.commits: dict[tuple[int, int], dict[str, Took]] = {}
        self._payloads: dict[str, tuple[int, int]] = {}
        self._codec = get_codec(world.terms.codec)
        self._codings: tuple[FragmentCoding, ...] = ()
        self._lossy = self._codec.lossy
        self._forgets = self._lossy and not world.terms.error_feedback
        self.pins = Pins(world.terms.liveness_s, world.terms.max_stale_rounds)
        self._finals: dict[tuple[int, int], str] = {}

    def violate(self, what: str) -> None:
        self._world.scheduler.is_stopped = True
        if len(self.violations) < 20:
            self.violations.append(f"t={self._world.scheduler.time:.2f} {what}")

    # --- the bucket -------------------------------------------------------------------------------------------------

    def wrote(self, key: str, data: bytes) -> None:
        """A new content stands at a key."""
        contents = self._world.bucket.history[key]
        if key in self._world.bucket.collected:
            self._world.coverage.branch("garbage: made again by a late request")
        elif len(contents) > 1:
            self.violate(f"two contents at {key}")
        if key.endswith("/commit.json"):
            self._commit(key, data)
        elif keys.is_claim(key):
            self.pins.claim(*keys.parse_claim(key))
        elif keys.is_offer(key):
            self._offer(Offer.from_bytes(data, key))
        elif "/merged/" in key and key.endswith(".json"):
            self._part(Part.from_bytes(data, key))

    def deleted(self, key: str, process: Process) -> None:
        self._world.coverage.branch("garbage: object deleted")
        fault = self.pins.fault(key, process.collects_from, self._world.scheduler.time)
        if fault is not None:
            self.violate(f"{key} was deleted, and {fault}")

    def _offer(self, offer: Offer) -> None:
        if offer.version >= self._world.terms.final_version:
            self.violate(f"{offer.site} offers into round {offer.fragment}/{offer.version}, after the run's last")

    def _part(self, part: Part) -> None:
        taken = self.commits[part.fragment, part.version]
        place = (part.fragment, part.version, part.part)
        self._by_host("part", part.reducer, 1)
        rank = reducer_rank(part.reducer, self._world.sites, taken, *place, self._world.guests)
        self._world.coverage.branch("part: taken over" if rank else "part: merged by its first choice")
        for excluded in part.excluded:
            self._world.coverage.branch("part: an offer excluded")
            if taken[excluded.site].payload not in self._world.bucket.damaged:
                self.violate(f"part {place} excludes {excluded.site}, whose payload is sound: {excluded.why}")

    def _commit(self, key: str, data: bytes) -> None:
        commit = Commit.from_bytes(data, key)
        place = (commit.fragment, commit.version)
        self._world.progress.closed()
        self._by_host("commit", commit.committer, commit.admissions)
        for payload in [payload for payload, taken_at in self._payloads.items() if taken_at == place]:
            del self._payloads[payload]
        took: dict[str, Took] = {}
        for entry in commit.taken:
            earlier = self._payloads.setdefault(entry.payload, place)
            if earlier != place:
                self.violate(f"{entry.payload} is in commits {earlier} and {place}")
            movement = self._own_movement(entry.offer)
            if not self._lossy and abs(movement - entry.tokens * UNIT) > TOLERANCE:
                self.violate(f"{entry.payload} says {entry.tokens} tokens and moves {movement / UNIT:.3f}")
            if keys.parse_payload(entry.payload)[1] < commit.version:
                self._world.coverage.branch("offer: payload of an earlier round")
            took[entry.site] = Took(entry.tokens, movement, entry.payload, entry.incarnation)
        self.commits[place] = took
        self._world.coverage.branch(
            "commit: sliced" if commit.num_parts else "commit: gathered" if took else "commit: void"
        )
        for refused in commit.refused:
            self._world.coverage.branch("refused: " + refusal(refused.why))

    def _by_host(self, what: str, site: str, admissions: int) -> None:
        """A record that honours the owner's word must not be of a guest; one made before it came may be."""
        if not self._world.guests or not admissions:
            return
        if site in self._world.guests:
            self.violate(f"a {what} of {site}, which is a guest")
        self._world.coverage.branch(f"guests: a {what} by a host")

    def _own_movement(self, offer: Offer) -> float:
        data = self._world.bucket.history[offer.payload or ""][-1]
        plan = self._coding(offer.fragment).plan
        values = decode(self._codec, data, digests_of(offer), offer.norms, plan, 0, plan.num_slices)
        return float(values[self._world.sites[offer.site].index])

    def _coding(self, fragment: int) -> FragmentCoding:
        """How a fragment is coded, from the manifest: a request may take effect when no process is left."""
        if not self._codings:
            manifest = Manifest.from_bytes(self._world.bucket.history[keys.manifest()][0], keys.manifest())
            shapes = [(parameter.name, parameter.shape) for parameter in manifest.parameters]
            fragments = plan_fragments(shapes, manifest.terms.fragments)
            self._codings = tuple(FragmentCoding.of(one, manifest.terms) for one in fragments)
        return self._codings[fragment]

    # --- masters ----------------------------------------------------------------------------------------------------

    def master(self, process: SiteProcess, master: Master) -> None:
        if master.fragment in process.flipped:
            return
        known = self._masters.setdefault((master.fragment, master.version), master.sha256)
        if known != master.sha256:
            self.violate(f"{process.site.name} has another master({master.fragment}, {master.version}) than others")

    # --- a process's life -------------------------------------------------------------------------------------------

    def present(self) -> list[int]:
        """The open round of each fragment, as the bucket has it."""
        versions = []
        for fragment in range(self._world.terms.fragments):
            version = 0
            while (fragment, version) in self.commits:
                version += 1
            versions.append(version)
        return versions

    def within_reach(self) -> list[int]:
        """The version of each fragment that a process which reads the log from now on must come to.

        That of the open round, or of the last closed one as long as a part of it is yet to be merged: by others, since
        a process merges none before it has joined. An earlier round is complete, or nobody could have closed the next.
        """
        versions, history = enumerate(self.present()), self._world.bucket.history
        return [
            version - any(key not in history for key in self._parts(fragment, version - 1))
            for fragment, version in versions
        ]

    def _parts(self, fragment: int, version: int) -> list[str]:
        """The keys of what a closed round is merged in; none for another round, or one that is gathered."""
        if (fragment, version) not in self.commits:
            return []
        key = keys.commit(fragment, version)
        num_parts = Commit.from_bytes(self._world.bucket.history[key][-1], key).num_parts
        return [keys.merged(fragment, version, part) for part in range(num_parts)]

    def joined(self, process: SiteProcess, within_reach: list[int]) -> None:
        """A process is in, where it had to come to; or before a round whose parts were collected while it slept."""
        outer = process.outer
        process.seen = [None] * self._world.terms.fragments
        self._world.progress.in_order_from_now(process.site.name)
        self._hook_tape(process)
        for fragment, (there, seen) in enumerate(zip(within_reach, outer._courier.versions(), strict=True)):
            if seen < there and self._world.bucket.collected.isdisjoint(self._parts(fragment, seen)):
                self.violate(f"{process.site.name} joined at {fragment}/{seen}, the log led to {there}")
        process.books = [Book() for _ in outer._stands]
        saved = process.checkpoint
        for index, (book, stand) in enumerate(zip(process.books, outer._stands, strict=True)):
            self._catch_up(process, index)
            self._check_learned(process, index)
            book.missed, book.joined_at, book.foreign = stand.ledger.missed_rounds, stand.version, False
            limit = process.site.most_trained.get(index, 0)
            if stand.ledger.trained > limit:
                self.violate(f"{process.site.name} came back with {stand.ledger.trained} tokens, {limit} were trained")
            if saved is None or not saved.books or outer.finished or saved.at_end:
                self._rebase(process, index)
                continue
            book.offset, book.merged_offset = saved.books[index]
            if self._lossy and self._off(process, index):
                self._rebase(process, index)  # what coding took may be lost with a crash
        if not outer.finished:
            self.stepped(process)

    def _check_learned(self, process: SiteProcess, index: int) -> None:
        """All that a learner trained is carried, by its count and in its values."""
        stand, learned = process.outer._stands[index], sum(process.learned)
        if not learned or process.outer.finished:
            return
        self._world.coverage.branch("join: a learner's movement carried")
        here = float(stand.base[process.site.index]) - float(process.arrays[index][process.site.index])
        is_off = abs(here - stand.ledger.carried * UNIT) > TOLERANCE
        if stand.ledger.carried < learned or (is_off and not self._lossy):
            self.violate(f"{process.site.name} learned {learned} tokens and carries {here / UNIT:.3f}: {stand.ledger}")

    def trains(self, process: SiteProcess, tokens: int) -> None:
        """Before an inner step is told to the outer loop."""
        most = process.site.most_trained
        for index, stand in enumerate(process.outer._stands):
            known = stand.ledger.trained if process.watched else most.get(index, 0)  # a learner may not know all of it
            most[index] = max(most.get(index, 0), known + tokens)

    def stepped(self, process: SiteProcess) -> None:
        """After every inner step: no token is lost or counted twice, by the ledger and by the values themselves."""
        site = process.site
        process.watch()
        for index, stand in enumerate(process.outer._stands):
            ledger = stand.ledger
            if process.outer.finished:
                continue
            book = process.books[index]
            if stand.version != book.version:
                self._catch_up(process, index)
            if ledger.carried < 0 or ledger.pending < 0 or ledger.captured < 0:
                self.violate(f"{site.name}/{process.number} ledger {index} is negative: {ledger}")
            overtaken = book.foreign and ledger.carried == 0  # its own part of that work was dropped, then
            if book.moved_on or (overtaken and ledger.merged + book.merged_offset != book.tokens):
                self._rebase(process, index)
            if book.coded:
                book.offset += self._off(process, index)
            book.moved_on = book.foreign = book.coded = False
            if ledger.merged + book.merged_offset != book.tokens:
                self.violate(
                    f"{site.name}/{process.number} fragment {index} says {ledger.merged} merged"
                    f"{book.merged_offset:+}, commits took {book.tokens}"
                )
                self._rebase(process, index)
            elif abs(off := self._off(process, index)) > TOLERANCE:
                self.violate(
                    f"{site.name}/{process.number} fragment {index} is off by {off / UNIT:.3f} tokens: {ledger}"
                )
                self._rebase(process, index)

    def _catch_up(self, process: SiteProcess, index: int) -> None:
        book, stand = process.books[index], process.outer._stands[index]
        while book.version < stand.version:
            entry = self.commits.get((index, book.version), {}).get(process.site.name)
            if entry is not None:
                book.tokens += entry.tokens
                book.movement += entry.movement
                book.foreign |= self._is_foreign(process, entry)
            book.version += 1

    def _off(self, process: SiteProcess, index: int) -> float:
        """Own movement that is here, merged or dropped, less all that was trained; 0 but for rounding."""
        book, stand, own = process.books[index], process.outer._stands[index], process.site.index
        if stand.base is not book.base:
            book.base, book.base_own = stand.base, float(stand.base[own])
        here = book.base_own - float(process.arrays[index][own])
        if stand.residual is not None:
            here += float(stand.residual[own])
        return here + book.movement - (stand.ledger.trained - stand.ledger.dropped) * UNIT - book.offset

    def _rebase(self, process: SiteProcess, index: int) -> None:
        book, stand = process.books[index], process.outer._stands[index]
        book.offset += self._off(process, index)
        book.merged_offset = book.tokens - stand.ledger.merged

    def _hook_tape(self, process: SiteProcess) -> None:
        tape = process.outer._entered.tape
        write = tape.write

        def watch(event: str, **fields: Any) -> None:
            write(event, **fields)
            self._taped(process, event, fields)

        tape.write = watch

    def _taped(self, process: SiteProcess, event: str, fields: dict[str, Any]) -> None:
        coverage = self._world.coverage
        if event == "round":
            if fields["fault"]:
                self.violate(f"{process.site.name} finds a commit faulty: {fields}")
            return
        book = process.books[fields["fragment"]] if "fragment" in fields else None
        if event == "carried" and book is not None:
            book.missed += self._moved_on(process, fields["fragment"], fields["version"] + 1)
        if event == "merged" and book is not None:
            book.missed, book.coded = 0, self._forgets
        if event == "dropped" and book is not None:
            why = fields["why"]
            coverage.branch(f"dropped: {why}")
            missed = book.missed + self._moved_on(process, fields["fragment"], fields["version"])
            if why == "stale" and missed <= self._world.terms.max_stale_rounds:
                self.violate(f"{process.site.name} dropped {fields['tokens']} tokens after {missed} rounds missed")
            if why.startswith("another process") and not self._was_overtaken(process, fields["fragment"]):
                self.violate(
                    f"{process.site.name} dropped {fields['tokens']} tokens, and no other process had any merged"
                )
            book.missed = 0
            book.moved_on |= self._lossy or why != "stale"
        elif event != "waits":  # it decides nothing
            coverage.branch(f"site: {event}")

    def _moved_on(self, process: SiteProcess, fragment: int, version: int) -> bool:
        """Whether any round between the master that a process stands on and the one it adopts now took something."""
        versions = range(process.outer._stands[fragment].version, version)
        return any(self.commits.get((fragment, at)) for at in versions)

    def _was_overtaken(self, process: SiteProcess, fragment: int) -> bool:
        """Whether a commit since this process joined took an offer that another process of its name made."""
        versions = range(process.books[fragment].joined_at, process.outer._courier.versions()[fragment])
        entries = [self.commits[fragment, version].get(process.site.name) for version in versions]
        return any(entry is not None and self._is_foreign(process, entry) for entry in entries)

    def _is_foreign(self, process: SiteProcess, entry: Took) -> bool:
        """Whether another process of the site's name made an entry: an earlier one, or one started at the same time."""
        if entry.incarnation != process.outer._courier._incarnation:
            return True
        return process.process not in self._world.bucket.writers.get(entry.payload, ())

    def failed(self, process: SiteProcess, error: BaseException) -> None:
        lines = "".join(traceback.format_exception(error)[-4:])
        self.violate(f"{process.site.name}/{process.number} failed: {type(error).__name__}: {error}\n{lines}")

    def finished(self, process: SiteProcess) -> None:
        outer = process.outer
        final = outer._terms.final_version
        for fragment in range(self._world.terms.fragments):
            master = outer._courier.master(fragment)
            if master.version != final:
                self.violate(f"{process.site.name} finished at version {master.version} of {fragment}")
            known = self._finals.setdefault((fragment, master.version), master.sha256)
            if known != master.sha256:
                self.violate(f"{process.site.name} finished with another master of {fragment} than others")
            if float(process.arrays[fragment][process.site.index]) != float(master.weights[process.site.index]):
                self.violate(f"{process.site.name} finished with other parameters than master {fragment}")

    # --- the whole log ----------------------------------------------------------------------------------------------

    def check_log(self) -> None:
        """Rebuild every master from what ever stood in the bucket, by arithmetic of our own, and compare hashes."""
        if self.violations or not self.commits:
            return
        for fragment in range(self._world.terms.fragments):
            self._check_fragment(fragment)

    def _check_fragment(self, fragment: int) -> None:
        world, history = self._world, self._world.bucket.history
        terms, coding = world.terms, self._coding(fragment)
        first = [key for key in history if key.startswith(keys.masters_prefix(fragment)) and "/00000000-" in key]
        manifest_sha = world.first_master_sha(fragment)
        key = next(key for key in first if keys.parse_master(key)[2] == manifest_sha[: keys.SHA_DIGITS])
        lr, mu = np.float32(terms.lr), np.float32(terms.momentum)
        stored = unpack_master(history[key][-1], coding.fragment.numel, momentum=terms.has_momentum)
        weights = stored[0].numpy()
        momentum = np.zeros(0, np.float32) if stored[1] is None else stored[1].numpy()
        version = 0
        while (place := keys.commit(fragment, version)) in history:
            commit = Commit.from_bytes(history[place][-1], place)
            if commit.taken:
                mean = self._mean(commit, coding)
                if mean is None:
                    break
                if mu:
                    momentum = momentum * mu + mean
                weights = weights - (mean + momentum * mu if mu else mean) * lr
            version += 1
            known = self._masters.get((fragment, version))
            sha = hashlib.sha256(weights.astype("<f4").tobytes() + momentum.astype("<f4").tobytes()).hexdigest()
            if known is not None and known != sha:
                self.violate(f"master({fragment}, {version}) isn't what its log makes")
                return

    def _mean(self, commit: Commit, coding: FragmentCoding) -> np.ndarray | None:
        history = self._world.bucket.history
        if commit.num_parts:
            return self._from_parts(commit, coding)
        weighted: list[tuple[float, np.ndarray]] = []
        for entry in commit.taken:
            key, offer = keys.offer(commit.fragment, commit.version, entry.site), entry.offer
            if offer not in (Offer.from_bytes(data, key) for data in history[key]):  # a late one may stand there, too,
                self.violate(f"{key} never held the offer that its commit takes")  # once the first was collected
            data = history[entry.payload][-1]
            values = decode(coding.codec, data, digests_of(offer), offer.norms, coding.plan, 0, coding.plan.num_slices)
            weighted.append((entry.multiplier, values.numpy()))
        return self._merged(commit, dict(zip((entry.site for entry in commit.taken), weighted, strict=True)))

    def _merged(self, commit: Commit, weighted: Mapping[str, tuple[float, np.ndarray]]) -> np.ndarray:
        """By the run's rule, the guests' apart: as the admission has it that the commit honours."""
        guests = self._world.guests if commit.admissions else ()
        members = [each for site, each in weighted.items() if site not in guests]
        theirs = [each for site, each in weighted.items() if site in guests]
        if not members:
            return np.zeros_like(theirs[0][1])
        terms = self._world.terms
        merged = numpy_mean(members)
        return numpy_with_guests(merged, theirs, terms.guest_share) if theirs else merged

    def _from_parts(self, commit: Commit, coding: FragmentCoding) -> np.ndarray | None:
        """Every part anew from the offers that its record leaves in it; None when one isn't there yet."""
        history = self._world.bucket.history
        whole = self._mean(commit.model_copy(update={"num_parts": 0}), coding)
        merged = np.zeros(coding.fragment.numel, np.float32)
        for index in range(commit.num_parts):
            key = keys.merged(commit.fragment, commit.version, index)
            if key not in history:
                return None
            part = Part.from_bytes(history[key][-1], key)
            if part.payload is None:
                continue
            mean = self._mean(self._without(commit, part), coding) if part.excluded else whole
            assert mean is not None
            start, stop = coding.part_bounds(index, commit.num_parts)
            data = coding.merged_codec.encode(torch.from_numpy(mean[start:stop].copy()))
            if hashlib.sha256(data).hexdigest() != part.sha256:
                self.violate(f"{key} isn't what the offers in it make")
            merged[start:stop] = coding.merged_codec.decode(data, stop - start).numpy()
        return merged

    def _without(self, commit: Commit, part: Part) -> Commit:
        """The commit as one part merges it: without the offers that it excludes, whose shares the others have."""
        shares = part_shares(commit, [entry.site for entry in part.excluded], self._world.terms, self._world.guests)
        left = [entry for entry in commit.taken if entry.site in shares]
        taken = tuple(entry.model_copy(update={"multiplier": shares[entry.site]}) for entry in left)
        return commit.model_copy(update={"num_parts": 0, "taken": taken})
