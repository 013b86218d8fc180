"""A model folder as somebody else may have made it: looked at before transformers is, and refused in one line.

Its weights are safetensors of its own: a library that follows its index or a link would unpickle, or read elsewhere.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from composer_prime.errors import BadInput, ModelError

INDEX_FILE = "model.safetensors.index.json"
READ_WHOLE, MOST_BYTES = (".json", ".jinja", ".model", ".txt"), 2**28
"""Files of these kinds have so many bytes at most; the largest tokenizers have 40 MB."""


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
