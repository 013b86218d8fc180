"""Brings transformers into this process for its tokenizers alone, without the torch it would pull in.

Loading a tokenizer imports torch where it is installed: 2 s of CPU and 190 MB that an orchestrator has no use for.
"""

import importlib
import os
import sys


def import_tokenizers() -> None:
    """Import transformers' tokenizers with torch hidden, unless something here has use for torch or transformers.

    Environments are imported first: one that works with either has it loaded by then, and nothing is hidden from it.
    (transformers decides once per process whether there is torch; `import torch` itself works again afterwards.)
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that it found no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python spells "not importable"
    try:
        importlib.import_module("transformers.models.auto.tokenization_auto")
    finally:
        del sys.modules["torch"]
