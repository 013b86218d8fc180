"""Steps: published deltas from one version of a fragment's weights to a later one, which followers chain.

A step is a create-once record and a content-addressed delta. It may be gone, late or wrong: who can't use one takes
the masters, which need nobody to publish them.
"""

from dataclasses import dataclass

from pydantic import Field

from composer_prime.errors import CorruptObject, KeyMissing
from composer_prime.export.bits import Bits, bits_sha256
from composer_prime.export.card import FragmentWeights
from composer_prime.export.delta import apply_delta
from composer_prime.export.reading import MasterReader
from composer_prime.store import keys
from composer_prime.sync.canonical import Signed, sha256_hex
from composer_prime.sync.reading import read_record


class Step(Signed):
    """One delta: how the weights at `version` follow from those at `base_version`, both in `dtype`."""

    dtype: str
    fragment: int = Field(ge=0)
    base_version: int = Field(ge=0)
    base_sha256: str
    """`bits.bits_sha256` of the weights it applies to."""
    version: int = Field(ge=1)
    sha256: str
    """The same of the weights it leads to."""
    master_sha256: str
    """The master those are, in fp32, as the log names it."""
    delta_sha256: str
    nbytes: int = Field(ge=0)
    changed: int = Field(ge=0)
    """Weights that differ in any bit."""
    publisher: str


@dataclass(frozen=True)
class Chain:
    """Steps of one fragment that follow on each other, oldest first."""

    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to download."""
        return sum(step.nbytes for step in self.steps)


def published_versions(reader: MasterReader, dtype: str) -> list[int]:
    """The versions to which every fragment has a step, oldest first."""
    by_version: dict[int, set[int]] = {}
    for key in reader.store.list(keys.exports_prefix(dtype)):
        place = keys.parse_export(key)
        if place is not None and keys.is_export_step(key):
            by_version.setdefault(place[2], set()).add(place[1])
    fragments = set(range(len(reader.run.fragments)))
    return sorted(version for version, found in by_version.items() if fragments <= found)


def find_chain(reader: MasterReader, dtype: str, fragment: int, held: FragmentWeights, version: int) -> Chain:
    """The steps from the weights that are held to `version`. Raises CorruptObject, saying what is missing or wrong."""
    steps: list[Step] = []
    at, sha = version, None
    while at > held.version:
        step = _read_step(reader, dtype, fragment, at)
        if sha not in (None, step.sha256):
            key = keys.export_step(dtype, fragment, at)
            raise CorruptObject(f"{key} leads to other weights than the step after it starts from")
        steps.append(step)
        at, sha = step.base_version, step.base_sha256
    if at != held.version or sha != held.bits_sha256:
        raise CorruptObject(f"no steps lead from version {held.version} of fragment {fragment} to version {version}")
    return Chain(tuple(reversed(steps)))


def apply_chain(reader: MasterReader, chain: Chain, bits: Bits) -> Bits:
    """The weights at the chain's end, their hash checked. Raises CorruptObject or StoreError."""
    for step in chain.steps:
        key = keys.export_delta(step.dtype, step.fragment, step.version, step.delta_sha256)
        delta = reader.store.get_range(key, 0, step.nbytes + 1)
        if sha256_hex(delta) != step.delta_sha256:
            raise CorruptObject(f"{key} isn't what its record by {step.publisher} names: it was changed or cut")
        bits = apply_delta(bits, delta)
        if bits_sha256(bits) != step.sha256:
            raise CorruptObject(f"{key} by {step.publisher} doesn't lead to the weights that its record names")
    return bits


def _read_step(reader: MasterReader, dtype: str, fragment: int, version: int) -> Step:
    key = keys.export_step(dtype, fragment, version)
    try:
        step = read_record(reader.store, Step, key)
    except KeyMissing:
        raise CorruptObject(f"{key} isn't there") from None
    if (step.dtype, step.fragment, step.version) != (dtype, fragment, version) or step.base_version >= version:
        raise CorruptObject(f"{key} is the record of another step")
    fault = reader.roster.fault(step, step.publisher)
    if fault is not None:
        raise CorruptObject(f"{key} of {step.publisher} {fault}")
    if reader.vouched(fragment, version) not in (None, step.master_sha256):
        raise CorruptObject(f"{key} of {step.publisher} names another master than the log")
    return step
