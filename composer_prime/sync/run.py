"""A run as its bucket states it: the manifest, and how each fragment is coded."""

from dataclasses import dataclass

from composer_prime.errors import CorruptObject
from composer_prime.outer.codecs import Codec, get_codec
from composer_prime.outer.fragments import Fragment, plan_fragments
from composer_prime.outer.payloads import plan_slices
from composer_prime.outer.slices import SlicePlan
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.lifetime import read_manifest
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Manifest
from composer_prime.sync.terms import Terms
from composer_prime.sync.validity import FragmentFacts

MERGED_CODEC = "int8"
"""How the merged parts of a round of many sites travel."""


@dataclass(frozen=True)
class FragmentCoding:
    """How one fragment travels: its slices, and the codecs of its payloads and of its merged parts."""

    fragment: Fragment
    codec: Codec
    merged_codec: Codec
    plan: SlicePlan
    facts: FragmentFacts

    @classmethod
    def of(cls, fragment: Fragment, terms: Terms) -> "FragmentCoding":
        """The coding that a run's terms give."""
        codec, merged = get_codec(terms.codec), get_codec(MERGED_CODEC)
        plan = plan_slices(fragment.numel, terms.slices, (codec, merged))
        if plan.num_slices == 1:
            bounds = codec.size_bounds(fragment.numel)
        else:
            total = sum(codec.nbytes(plan.size(index)) for index in range(plan.num_slices))
            bounds = (total, total)
        return cls(fragment, codec, merged, plan, FragmentFacts(fragment.index, plan.num_slices, bounds))

    def part_bounds(self, index: int, num_parts: int) -> tuple[int, int]:
        """(first, last + 1) element of a merged part within the fragment."""
        first, last = self.plan.part(index, num_parts)
        return self.plan.bounds[first], self.plan.bounds[last]


@dataclass(frozen=True)
class Run:
    """What everyone in a run knows from the start.

    manifest    as it was created
    sha256      of the manifest's bytes
    terms       the manifest's
    codings     one for each fragment
    """

    manifest: Manifest
    sha256: str
    terms: Terms
    codings: tuple[FragmentCoding, ...]

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments in order."""
        return tuple(coding.fragment for coding in self.codings)

    def master_nbytes(self, fragment: int) -> int:
        """Bytes of a fragment's masters in memory; in the bucket they are fewer (`outer.masters`)."""
        return self.terms.master_nbytes(self.codings[fragment].fragment.numel)


def load_run(store: Store) -> Run:
    """The run whose root `store` is. Raises KeyMissing when there is none, ProtocolError when it can't be read."""
    data = read_bytes(store, keys.manifest())
    manifest, sha = read_manifest(data), sha256_hex(data)
    shapes = [(parameter.name, parameter.shape) for parameter in manifest.parameters]
    fragments = plan_fragments(shapes, manifest.terms.fragments)
    if len(manifest.masters) != len(fragments):
        raise CorruptObject(f"{keys.manifest()} names {len(manifest.masters)} masters of {len(fragments)} fragments")
    terms = manifest.terms
    return Run(manifest, sha, terms, tuple(FragmentCoding.of(fragment, terms) for fragment in fragments))
