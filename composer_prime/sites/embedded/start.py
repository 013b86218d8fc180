"""Starts a role, and keeps its imports cheap: `python -m composer_prime.sites.embedded.start MODULE SITE_DIR`.

Nothing that is imported is garbage, and looking for some among it takes a third of a role's start, a second of CPU and
more. So garbage collection waits until the role has imported what it needs, and never looks at that again.
"""

import gc
import importlib
import os
import runpy
import sys


def imported() -> None:
    """What a role calls once all is imported: from now on there may be garbage. No effect where nothing has waited."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def import_tokenizers() -> None:
    """Import transformers' tokenizers with torch hidden, unless something here has use for torch or transformers.

    Loading a tokenizer imports torch where it is installed: 2 s of CPU and 190 MB that an orchestrator has no use for.
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


def main() -> None:
    """Run the module as `python -m` would."""
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
