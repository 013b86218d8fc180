"""Publishes steps: a process beside a run that reads its masters and leaves deltas between them in the bucket.

Any number may run at once, and none must: the first record of a step stands, and what it says follows from the masters.
"""

import logging
from dataclasses import dataclass

from composer_prime.errors import ProtocolError, StoreError
from composer_prime.export.bits import Bits, bits_sha256, dtype_of, rounded_bits
from composer_prime.export.delta import encode_delta, num_changed
from composer_prime.export.reading import MasterReader
from composer_prime.export.steps import Step
from composer_prime.store import keys
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import find_record

KEEP_STEPS = 16
"""Steps of a fragment that are kept; a follower further behind takes the masters."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """One fragment's weights in the dtype, to make the next delta from."""

    version: int
    bits: Bits


class Publisher:
    """Publishes a step of every fragment for each version that all have stored, K rounds apart (`snapshot_rounds`).

    Holds the run's weights in one dtype, in memory.
    """

    def __init__(self, reader: MasterReader, dtype: str, name: str) -> None:
        """
        reader  its signing key must be admitted for `name` in a run that admits keys
        name    the publisher's, a site's name; two may share one where there are no keys

        Raises BadInput for an unknown dtype or name, or a key that isn't admitted.
        """
        self._dtype = dtype
        self._torch_dtype = dtype_of(dtype)
        self._name = keys.check_site_name(name)
        self._reader = reader
        reader.roster.check_admitted(name)
        self._held: dict[int, _Held] = {}
        self.is_final = False
        """Whether the run has ended and its last version is published."""

    def tick(self) -> list[Step]:
        """Publish what is due, if anything, and delete old steps; the steps that this call created."""
        self._reader.refresh()
        is_closed = self._reader.is_closed()
        version = self._reader.newest_version()
        made = [self._publish(fragment, version) for fragment in range(len(self._reader.run.fragments))]
        self.is_final = is_closed and version >= self._reader.run.terms.final_version
        return [step for step in made if step is not None]

    def _publish(self, fragment: int, version: int) -> Step | None:
        base = self._held.get(fragment) or self._begin(fragment, version)
        if base.version >= version:
            self._held[fragment] = base
            return None
        master = self._reader.master(fragment, version)
        bits = rounded_bits(master.weights, self._torch_dtype)
        delta = encode_delta(base.bits, bits)
        step = Step(
            dtype=self._dtype,
            fragment=fragment,
            base_version=base.version,
            base_sha256=bits_sha256(base.bits),
            version=version,
            sha256=bits_sha256(bits),
            master_sha256=master.sha256,
            delta_sha256=sha256_hex(delta),
            nbytes=len(delta),
            changed=num_changed(base.bits, bits),
            publisher=self._name,
        )
        created = self._create(step, delta)
        self._held[fragment] = _Held(version, bits)
        self._collect(fragment)
        return step if created else None

    def _create(self, step: Step, delta: bytes) -> bool:
        """Payload first, then the record; False when another publisher's record stands."""
        store, place = self._reader.store, (step.dtype, step.fragment, step.version)
        payload = keys.export_delta(*place, step.delta_sha256)
        store.put(payload, delta)
        if store.create(keys.export_step(*place), self._reader.roster.sign(step).to_bytes()):
            return True
        theirs = find_record(store, Step, keys.export_step(*place))
        if theirs is None or theirs.delta_sha256 != step.delta_sha256:
            store.delete(payload)  # nothing names it
        return False

    def _begin(self, fragment: int, version: int) -> _Held:
        """Where a chain goes on: at its newest step, or where there is none, at the snapshot before this one.

        At `version` itself, so that nothing is published yet, where that can't be made again.
        """
        published = [
            place[2]
            for key in self._reader.store.list(keys.exports_prefix(self._dtype))
            if (place := keys.parse_export(key)) is not None and place[1] == fragment and keys.is_export_step(key)
        ]
        start = max((one for one in published if one <= version), default=None)
        if start is None:
            start = self._reader.stored_before(fragment, version)
        if start is None:
            start = version
        try:
            weights = self._reader.master(fragment, start).weights
        except (StoreError, ProtocolError) as error:
            if start == version:
                raise
            logger.warning("chain_broken fragment=%d at=%d reason=%s", fragment, start, error)
            start, weights = version, self._reader.master(fragment, version).weights
        return _Held(start, rounded_bits(weights, self._torch_dtype))

    def _collect(self, fragment: int) -> None:
        """Delete all but the newest steps, record first: a reader then misses the whole step, never half of one."""
        places = {
            key: place
            for key in self._reader.store.list(keys.exports_prefix(self._dtype))
            if (place := keys.parse_export(key)) is not None and place[1] == fragment
        }
        kept = sorted(place[2] for key, place in places.items() if keys.is_export_step(key))[-KEEP_STEPS:]
        doomed = [key for key, place in places.items() if kept and place[2] < kept[0]]
        for key in sorted(doomed, key=lambda key: not keys.is_export_step(key)):
            self._reader.store.delete(key)
