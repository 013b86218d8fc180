"""A model folder as somebody else may have made it: looked at before transformers is, and refused in one line.

Its weights are safetensors of its own: a library that follows its index or a link would unpickle, or read elsewhere.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_prime.errors import BadInput, ModelError

INDEX_FILE = "model.safetensors.index.json"
READ_WHOLE, MOST_BYTES = (".json", ".jinja", ".model", ".txt"), 2**28
"""Files of these kinds have so many bytes at most; the largest tokenizers have 40 MB."""
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BUFFERS = {"BOOL", "U8", "I8", "I16", "I32", "I64"}
"""dtypes of safetensors that are no weights, unless a quantizer made them."""


def weight_files(folder: Path) -> list[Path]:
    """The weights in a model folder: those that its index names where there is one, else all `*.safetensors`.

    Raises ModelError unless they are safetensors files of the folder itself, or blobs of the same model in the hub's
    cache, to which its snapshots link; and where what describes the model is too large to be read.
    """
    for file in folder.iterdir():
        if file.suffix in READ_WHOLE and file.is_file() and file.stat().st_size > MOST_BYTES:
            raise ModelError(f"{file} has {file.stat().st_size} bytes, of {MOST_BYTES} at most: it is not read")
    with loading(f"model folder {folder}", "save the model again"):
        config, index = folder / "config.json", folder / INDEX_FILE
        if config.exists() and "transformers_weights" in json.loads(config.read_bytes()):
            raise ModelError(f"{config} says transformers_weights, which names weights elsewhere: take it out")
        found = names = sorted(file.name for file in folder.glob("*.safetensors"))
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        root = folder.resolve()
        places = {root, root.parent.parent / "blobs"} if root.parent.name == "snapshots" else {root}
        for name in {*names, *found}:
            if not name.endswith(".safetensors") or "/" in name or (folder / name).resolve().parent not in places:
                raise ModelError(
                    f"model folder {folder} has {ascii(name)[:100]} for weights, which must be safetensors files of "
                    "the folder itself, no links out of it: save the model again"
                )
    return [folder / name for name in names]


def check_dtypes(folder: Path, files: Iterable[Path]) -> None:
    """Raise ModelError for weights that aren't plain floats, or of which none has the dtype that config.json says."""
    from safetensors import safe_open

    found = set[str]()
    with loading(f"model folder {folder}", "save the model again"):
        config = json.loads((folder / "config.json").read_bytes())
        for file in files:
            with safe_open(file, "np") as opened:
                found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (no mapping)
        said = config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    floats = {FLOATS[each] for each in found & set(FLOATS)}
    if said is not None and floats and said not in floats:
        raise ModelError(
            f"{folder / 'config.json'} says dtype {said}, and the weights are {', '.join(sorted(floats))}: set it "
            "to what they are"
        )
    if quantized := found - set(FLOATS) - BUFFERS:
        raise ModelError(
            f"model folder {folder} has weights of dtype {', '.join(sorted(quantized))}, which can't be trained: take "
            "the model as it was before it was quantized"
        )


def check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise ModelError where transformers made parameters of a model up, dropped some or gave some another shape.

    info  what its from_pretrained says with output_loading_info
    """
    faults = list[str]()
    if missing := sorted(info["missing_keys"]):
        tie = "set tie_word_embeddings to true in config.json, where that is so, or "
        head = any("head" in name or "embed_out" in name for name in missing)
        faults.append(f"lacks {_some(missing)}, which would be random: {tie if head else ''}add what is missing")
    if unexpected := sorted(info["unexpected_keys"]):
        faults.append(
            f"holds {_some(unexpected)}, for which the model that config.json describes has no place: correct its "
            "model_type and sizes, or save the model without them"
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, there, wanted = mismatched[0]
        faults.append(
            f"holds {name} of shape {tuple(there)}, where config.json asks for {tuple(wanted)}: correct its sizes, "
            "such as vocab_size"
        )
    if faults:
        raise ModelError(f"model folder {folder} {'; it '.join(faults)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def loading(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelError in one line, whatever reading a model's files raises: libraries foresee few strange ones."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".:")
        raise ModelError(f"{what} can't be loaded: {cause}; {remedy}") from error
