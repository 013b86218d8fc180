"""A snapshot: one version of every fragment, in a folder that transformers, PEFT and vLLM load as any other;
and the places where one is put: a new folder, a bucket, a model repository of the Hugging Face hub.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

from composer_prime.errors import INSTALL, BadInput, ConfigError, StoreError
from composer_prime.export.bits import DTYPES, bits_sha256, rounded_bits
from composer_prime.export.card import CARD_FILE, RECORD_FILE, FragmentWeights, SnapshotRecord, write_card
from composer_prime.export.lora import LoraAdapter, is_lora
from composer_prime.export.model import Exportable, HfModel, made_whole
from composer_prime.export.reading import MasterReader
from composer_prime.store.base import Store

SCHEME = "hf://"


def open_model(
    reader: MasterReader, base: Path, base_name: str, dtype: str, *, lora_alpha: float | None = None
) -> Exportable:
    """What the run's masters are written into, still with the base model's values.

    base       folder of the model that the run was created from
    base_name  how it was named to us
    """
    fragments, wanted = reader.run.fragments, DTYPES[dtype]
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


def parse_repository(uri: str) -> str:
    """namespace/name out of hf://namespace/name. Raises BadInput for anything else."""
    name = uri.removeprefix(SCHEME).strip("/")
    if not uri.startswith(SCHEME) or name.count("/") != 1 or name.startswith("buckets/"):
        raise BadInput(f"--to ({uri}) must be hf://namespace/name for a model repository, or a folder: correct it")
    return name


def check_installed() -> None:
    """Raise ConfigError when huggingface_hub is missing, before anything is made that could not be uploaded."""
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--to hf:// needs a package that isn't installed ({error.name}): {INSTALL.format('hf')}"
        ) from error


def upload(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload the folder as one commit on the repository's main branch, and return where it can be looked at.

    repository   made when it isn't there; `private` counts only then

    Endpoint and token are the hub's own (HF_ENDPOINT, HF_TOKEN or `hf auth login`). Raises StoreError when it fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True, private=private)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StoreError(
            f"hf://{repository} didn't take the upload ({cause.rstrip('.')}): check its name, HF_TOKEN and its rights"
        ) from error
