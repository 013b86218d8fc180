"""A snapshot: one version of every fragment, in a folder that transformers, PEFT and vLLM load as any other."""

import mmap
from collections.abc import Sequence
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.export.bits import bits_sha256, dtype_of, rounded_bits
from composer_prime.export.card import CARD_FILE, RECORD_FILE, FragmentWeights, SnapshotRecord, write_card
from composer_prime.export.lora import LoraAdapter, is_lora
from composer_prime.export.model import Exportable, HfModel, made_whole
from composer_prime.export.reading import MasterReader
from composer_prime.store.base import Store


def open_model(
    reader: MasterReader, base: Path, base_name: str, dtype: str, *, lora_alpha: float | None = None
) -> Exportable:
    """What the run's masters are written into, still with the base model's values.

    base       folder of the model that the run was created from
    base_name  how it was named to us
    """
    fragments, wanted = reader.run.fragments, dtype_of(dtype)
    if is_lora([name for fragment in fragments for name in fragment.names]):
        return LoraAdapter(base, wanted, fragments, base_name=base_name, alpha=lora_alpha)
    return HfModel(base, wanted, fragments)


def fill_from_masters(reader: MasterReader, model: Exportable, version: int) -> tuple[FragmentWeights, ...]:
    """Set every fragment to its master after `version` rounds, rounded; no more than one is held in fp32."""
    return tuple(_fill_fragment(reader, model, index, version) for index in range(len(reader.run.fragments)))


def _fill_fragment(reader: MasterReader, model: Exportable, index: int, version: int) -> FragmentWeights:
    master = reader.master(index, version)
    bits = rounded_bits(master.weights, model.dtype)
    model.write(index, bits)
    return FragmentWeights(version=version, master_sha256=master.sha256, bits_sha256=bits_sha256(bits))


def describe(reader: MasterReader, model: Exportable, fragments: Sequence[FragmentWeights]) -> SnapshotRecord:
    """The record of what `model` holds."""
    return SnapshotRecord(
        run=reader.run.manifest.run,
        manifest_sha256=reader.run.sha256,
        dtype=str(model.dtype).removeprefix("torch."),
        fragments=tuple(fragments),
    )


def write_folder(model: Exportable, record: SnapshotRecord, folder: Path, card: str | None = None) -> None:
    """Write the model with its record, and its card if there is one; all of it is there at the end, or nothing."""
    with made_whole(folder) as making:
        model.save(making)
        if card is not None:
            (making / CARD_FILE).write_text(card, encoding="utf-8")
        (making / RECORD_FILE).write_bytes(record.to_bytes())


def card_of(reader: MasterReader, model: Exportable, record: SnapshotRecord, base_name: str) -> str:
    """The model card of a snapshot; reads every commit before it."""
    merged = reader.merged(record.version)
    is_adapter = isinstance(model, LoraAdapter)
    return write_card(reader.run, record, merged, base_name, adapter=is_adapter)


def check_new_folder(folder: Path) -> None:
    """Raise BadInput unless `folder` may be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"--to ({folder}) exists and isn't empty: name a new folder, or empty this one")


def check_new_place(store: Store) -> None:
    """Raise BadInput where a bucket's prefix holds something already."""
    if store.list(""):
        raise BadInput(f"--to ({store.uri}) isn't empty: name a new prefix, or empty this one")


def put_folder(folder: Path, store: Store) -> None:
    """Put a snapshot's files into a bucket under their own names; its record last, so who sees that sees all."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == RECORD_FILE):
        with file.open("rb") as opened:
            if file.stat().st_size == 0:
                store.put(file.name, b"")
                continue
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                store.put(file.name, data)
