"""What a commit takes becomes one pseudo-gradient: of whole payloads where sites are few, of parts where many.

Payloads are checked before they are decoded; the parts of a sliced round (rule 10) are merged here too, by whichever
site's turn it is, and a create-once record decides.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from composer_prime.errors import CorruptObject, KeyMissing, PayloadUnsound, RoundWaits, SiteError, StoreError
from composer_prime.outer.aggregate import add_guests, weighted_mean
from composer_prime.outer.chunks import empty
from composer_prime.outer.payloads import byte_range, decode, decode_whole
from composer_prime.outer.sparse import Vector, dense
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Commit, Offer, Part, Refused, Taken
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import FragmentCoding
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import digests_of, part_fault, part_shares

logger = logging.getLogger(__name__)

NOT_CODED = "what the part's offers make can't be coded"


@dataclass
class Closing:
    """A round whose commit is there and sound, on its way to the next master.

    seen_at   when this site first saw the commit, on its own clock
    asked_at  when it last asked whether the round was collected, of which missing parts are a sign
    parts     merged parts found so far
    gone      whether the round was found to be collected as garbage while parts of it were missing here
    has_looked   whether this site has looked if the bucket still has its own payload, in a gathered round
    unsound   why the commit is void after all: it takes what can never be merged
    """

    commit: Commit
    commit_sha: str
    seen_at: float
    asked_at: float
    parts: dict[int, Part] = field(default_factory=dict)
    gone: bool = False
    has_looked: bool = False
    unsound: str | None = None

    def missing_parts(self) -> list[int]:
        """Parts that nobody has merged yet, as far as this site knows."""
        return [index for index in range(self.commit.num_parts) if index not in self.parts]


class Stated(NamedTuple):
    """All that an offer says of its payload and that the bytes are compared with: what was read for one offer vouches
    for no other that names the same object and says something else of it."""

    payload: str
    nbytes: int
    slices: str
    norms: tuple[float, ...]

    @classmethod
    def of(cls, offer: Offer) -> Self:
        """What that offer says; it has a payload."""
        assert offer.payload is not None
        return cls(offer.payload, offer.nbytes, offer.slices, offer.norms)


class Merger:
    """Reads and merges the payloads of one fragment. Used by one thread at a time, but `keep` and `release`."""

    def __init__(
        self, store: Store, runtime: Runtime, roster: Roster, coding: FragmentCoding, terms: Terms, site: str
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._roster = roster
        self._coding = coding
        self._terms = terms
        self._site = site
        self._decoded: dict[Stated, Vector] = {}
        self._merged: dict[str, Vector] = {}
        self._kept: dict[str, tuple[Stated, Vector, Callable[[], object]]] = {}
        """Who tells how the offers stood to what was made of them; None: nobody wants to know."""

    # --- payloads ---------------------------------------------------------------------------------------------------

    def keep(self, stated: Stated, decoded: Vector, put_again: Callable[[], object]) -> None:
        """This site's own payload needn't be fetched: what it decodes to is known. `put_again` stores it anew."""
        self._kept[stated.payload] = stated, decoded, put_again

    def release(self, payload: str | None) -> None:
        """The own payload is settled."""
        self._kept.pop(payload or "", None)

    def forget(self) -> None:
        """Free the others' payloads; called when a round has closed."""
        self._decoded.clear()
        self._merged.clear()

    def fetch(self, offer: Offer) -> Vector:
        """The decoded movement of an offer. Raises KeyMissing, CorruptObject on other bytes than stated."""
        stated = Stated.of(offer)
        known = self._own(stated)
        if known is None:
            known = self._decoded.get(stated)
        if known is not None:
            return known
        data = self._store.get_range(stated.payload, 0, offer.nbytes + 1)
        if len(data) != offer.nbytes:
            raise CorruptObject(f"{offer.payload} has {len(data)} bytes or more, its offer says {offer.nbytes}")
        decoded = decode_whole(self._coding.codec, data, digests_of(offer), offer.norms, self._coding.plan)
        self._decoded[stated] = decoded
        return decoded

    def _own(self, stated: Stated) -> Vector | None:
        kept = self._kept.get(stated.payload)
        return kept[1] if kept is not None and kept[0] == stated else None

    # --- the mean ---------------------------------------------------------------------------------------------------

    def pseudograd(self, closing: Closing) -> Tensor | None:
        """The merged pseudo-gradient of a round that takes something; None while parts of it are missing.

        Raises StoreError when something the commit names can't be read: try again, a round is never skipped.
        Raises PayloadUnsound when the commit takes what can never be merged.
        """
        if closing.commit.num_parts:
            return self._from_parts(closing)
        if not closing.has_looked:
            self._put_own_again(closing)
        commit = closing.commit
        vectors = dict(zip((entry.site for entry in commit.taken), self._fetch_all(commit.taken), strict=True))
        return self._aggregate(commit, {entry.site: entry.multiplier for entry in commit.taken}, vectors)

    def _put_own_again(self, closing: Closing) -> None:
        """Put this site's payload again, once, if the commit takes it and the bucket has lost it: the others need it.

        Raises StoreError when the bucket doesn't take it; this site needs it no more, so the next try goes on.
        """
        lost: list[Callable[[], object]] = []
        for entry in closing.commit.taken:
            if entry.payload not in self._kept:
                continue
            try:
                is_there = len(self._store.get_range(entry.payload, entry.offer.nbytes - 1, 2)) == 1
            except KeyMissing:
                is_there = False
            if not is_there:
                logger.warning("payload_put_again payload=%s", entry.payload)
                lost.append(self._kept[entry.payload][2])
        closing.has_looked = True
        for put_again in lost:
            put_again()

    def _aggregate(self, commit: Commit, factors: Mapping[str, float], vectors: Mapping[str, Vector]) -> Tensor:
        """What these movements, one or more, make by the run's rule."""
        guests = self._roster.guests(commit.admissions)
        weighted = {site: (factors[site], vectors[site]) for site in sorted(vectors)}
        members = [each for site, each in weighted.items() if site not in guests]
        theirs = [each for site, each in weighted.items() if site in guests]
        if not members:
            return torch.zeros(dense(theirs[0][1]).numel())
        merged = weighted_mean(members)
        if theirs:
            add_guests(merged, theirs, self._terms.guest_share)
        return merged

    def _fetch_all(self, entries: Sequence[Taken]) -> list[Vector]:
        """What a commit takes, decoded; of several faults one that is for ever is raised."""

        def fetch(entry: Taken) -> Vector | PayloadUnsound | RoundWaits:
            try:
                return self.fetch(entry.offer)
            except PayloadUnsound as error:
                return PayloadUnsound(f"takes an offer of {entry.site} it may not: {error}")
            except (CorruptObject, KeyMissing) as error:
                place = f"round {entry.offer.version} of fragment {entry.offer.fragment}"
                return RoundWaits(
                    f"{place} can't be skipped and lacks {entry.payload}, which its commit took from site {entry.site} "
                    f"({error}): that site puts it again while it holds it, else restore it from a backup of the bucket"
                )

        found = self._runtime.map(fetch, entries)
        faults = [each for each in found if isinstance(each, PayloadUnsound | RoundWaits)]
        if not faults:
            return [each for each in found if not isinstance(each, PayloadUnsound | RoundWaits)]
        raise next((each for each in faults if isinstance(each, PayloadUnsound)), faults[0])

    def _from_parts(self, closing: Closing) -> Tensor | None:
        missing = closing.missing_parts()
        found = self._runtime.map(lambda index: self._find_part(closing, index), missing)
        closing.parts.update({part.part: part for part in found if part is not None})
        if closing.missing_parts():
            return None
        merged = empty(self._coding.plan.numel)
        faults = self._runtime.map(
            lambda index: self._place_part(closing, index, merged), range(closing.commit.num_parts)
        )
        for index, fault in enumerate(faults):
            if fault is not None:
                self._restore_part(closing, index, fault)
                self._place_part(closing, index, merged)
        return merged

    def _find_part(self, closing: Closing, index: int) -> Part | None:
        """The record of one part; a faulty one counts as a part of zeros for everybody."""
        commit = closing.commit
        key = keys.merged(commit.fragment, commit.version, index)
        try:
            part = read_record(self._store, Part, key)
            fault = self._fault(part, closing, index)
        except KeyMissing:
            return None
        except CorruptObject:
            part, fault = None, "is no part's record"
        if part is not None and fault is None:
            return part
        logger.error("part_void fragment=%d version=%d part=%d fault=%s", commit.fragment, commit.version, index, fault)
        return self._zero_part(closing, index, [Refused(site=entry.site, why="part void") for entry in commit.taken])

    def _fault(self, part: Part, closing: Closing, index: int) -> str | None:
        commit = closing.commit
        start, stop = self._coding.part_bounds(index, commit.num_parts)
        fault = part_fault(
            part,
            commit=commit,
            commit_sha=closing.commit_sha,
            index=index,
            bounds=self._coding.merged_codec.size_bounds(stop - start),
            guests=self._roster.guests(commit.admissions),
        )
        return fault or self._roster.fault(part, part.reducer, commit.admissions)

    def _place_part(self, closing: Closing, index: int, merged: Tensor) -> StoreError | None:
        """Fetch and decode one merged part into its place. What is wrong, when its payload is gone or damaged."""
        part = closing.parts[index]
        start, stop = self._coding.part_bounds(index, closing.commit.num_parts)
        if part.payload is None:
            merged[start:stop] = 0.0
            return None
        known = self._merged.get(part.payload)
        if known is None:
            try:
                data = self._store.get_range(part.payload, 0, part.nbytes + 1)
                fault = None if sha256_hex(data) == part.sha256 else f"{part.payload} has another sha256 than stated"
            except KeyMissing as error:
                fault = str(error)
            if fault is not None:
                return RoundWaits(
                    f"{fault}; it is part {index} of round {part.version} of fragment {part.fragment}, and what the "
                    "offers in it make is another: restore it, or their payloads, from a backup of the bucket"
                )
            known = self._merged[part.payload] = self._decode_part(part.payload, data, stop - start)
        merged[start:stop] = dense(known)
        return None

    def _decode_part(self, payload: str, data: bytes, numel: int) -> Vector:
        try:
            return self._coding.merged_codec.decode(data, numel)
        except CorruptObject as error:  # its hash is right: so it was merged wrongly, and everybody sees that
            logger.error("part_void payload=%s error=%s", payload, error)
            return torch.zeros(numel)

    def _restore_part(self, closing: Closing, index: int, fault: StoreError) -> None:
        """Make a merged payload anew, from the offers that its record leaves in it: their mean has the record's hash.

        Who may merge puts it back, for the others. Raises `fault` where it can't be made: try again.
        """
        commit, part = closing.commit, closing.parts[index]
        assert part.payload is not None
        excluded = {entry.site for entry in part.excluded}
        entries = [entry for entry in commit.taken if entry.site not in excluded]
        read = self._runtime.map(lambda entry: self._read_slices(entry.offer, index, commit), entries)
        vectors = {entry.site: got for entry, got in zip(entries, read, strict=True) if not isinstance(got, str)}
        data = self._mean(commit, vectors, excluded) if len(vectors) == len(entries) else None
        if data is None or sha256_hex(data) != part.sha256:
            raise fault
        logger.warning("part_restored payload=%s fault=%s", part.payload, fault)
        if self._site and self._site not in self._roster.guests(commit.admissions):
            self._store.put(part.payload, data)
        start, stop = self._coding.part_bounds(index, commit.num_parts)
        self._merged[part.payload] = self._decode_part(part.payload, data, stop - start)

    # --- merging a part ---------------------------------------------------------------------------------------------

    def reduce(self, closing: Closing, index: int, is_collected: Callable[[], bool]) -> None:
        """Merge one part of a sliced round and create its record; losing the race is as good.

        Offers whose bytes in this part are missing or unsound are excluded, in the record, for everybody. But a site
        that slept while the round was collected must not merge what is left of it: then the round is `gone`.
        """
        commit = closing.commit
        if self._find_part(closing, index) is not None:
            return
        read = self._runtime.map(lambda entry: self._read_slices(entry.offer, index, commit), commit.taken)
        excluded = [
            Refused(site=entry.site, why=got)
            for entry, got in zip(commit.taken, read, strict=True)
            if isinstance(got, str)
        ]
        if excluded and is_collected():
            closing.gone = True
            return
        for entry in excluded:
            logger.warning("offer_excluded site=%s part=%d why=%s", entry.site, index, entry.why)
        vectors = {entry.site: got for entry, got in zip(commit.taken, read, strict=True) if not isinstance(got, str)}
        part = self._zero_part(closing, index, excluded)
        if vectors:
            part = self._merge(part, commit, vectors)
        key = keys.merged(commit.fragment, commit.version, index)
        self._store.create(key, self._roster.sign(part).to_bytes())

    def _merge(self, part: Part, commit: Commit, vectors: Mapping[str, Tensor]) -> Part:
        """The part's record with what these movements make; nothing, of all, where that can't be coded."""
        why = {entry.site: entry.why for entry in part.excluded}
        data = self._mean(commit, vectors, why)
        if data is None:
            logger.error("part_not_coded fragment=%d version=%d part=%d", part.fragment, part.version, part.part)
            sites = (entry.site for entry in commit.taken)
            none = tuple(Refused(site=site, why=why.get(site, NOT_CODED)) for site in sites)
            return part.model_copy(update={"excluded": none})
        sha = sha256_hex(data)
        payload = keys.merged_payload(commit.fragment, commit.version, part.part, sha)
        self._store.put(payload, data)
        return part.model_copy(update={"payload": payload, "sha256": sha, "nbytes": len(data)})

    def _mean(self, commit: Commit, vectors: Mapping[str, Tensor], excluded: Collection[str]) -> bytes | None:
        """A part's values as they are coded; None where they are none that the codec of merged parts has a code for."""
        factors = part_shares(commit, excluded, self._terms, self._roster.guests(commit.admissions))
        try:
            return self._coding.merged_codec.encode(self._aggregate(commit, factors, vectors))
        except SiteError:  # of values of 3e38 a mean is infinite: any site may send such
            return None

    def _zero_part(self, closing: Closing, index: int, excluded: Sequence[Refused]) -> Part:
        return Part(
            fragment=closing.commit.fragment,
            version=closing.commit.version,
            part=index,
            commit_sha=closing.commit_sha,
            excluded=tuple(excluded),
            payload=None,
            sha256=None,
            nbytes=0,
            reducer=self._site,
        )

    def _read_slices(self, offer: Offer, index: int, commit: Commit) -> Tensor | str:
        """One offer's values in a part, or why they can't be merged. In the last part: nothing may come after them."""
        plan, codec = self._coding.plan, self._coding.codec
        first, last = plan.part(index, commit.num_parts)
        stated = Stated.of(offer)
        own = self._own(stated)
        if own is not None:
            return dense(own)[plan.bounds[first] : plan.bounds[last]]
        try:
            start, length = byte_range(codec, plan, first, last)
            data = self._store.get_range(stated.payload, start, length + (last == plan.num_slices))
            return decode(codec, data, digests_of(offer), offer.norms, plan, first, last)
        except (KeyMissing, CorruptObject) as error:
            return str(error)
