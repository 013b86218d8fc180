"""Starts a role with its imports undisturbed: `python -m composer_prime.sites.embedded.start MODULE SITE_DIR`.

Nothing that is imported is garbage, and looking for some among it takes a third of a role's start, a second of CPU and
more. So garbage collection waits until the role has imported what it needs, and never looks at that again.
"""

import gc
import runpy
import sys


def imported() -> None:
    """What a role calls once all is imported: from now on there may be garbage. No effect where nothing has waited."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def main() -> None:
    """Run the module as `python -m` would."""
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
