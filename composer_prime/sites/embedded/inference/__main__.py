"""The inference process of a site: bind the port first, then load, then serve until SIGTERM or SIGINT.

Exit code 0 after a signal, 2 with one line when the person must change something, 1 when the engine failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ComposerPrimeError, SystemRefused, last_words
from composer_prime.sites.embedded.ports import listen
from composer_prime.sites.embedded.start import imported
from composer_prime.visible import log_handler

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve the site in the folder that is the one argument."""
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    (site_dir,) = arguments
    try:
        settings = SiteSettings.load(site_dir)
        with listen(settings.inference_port) as listener:
            # Late, because it loads torch: a port in use is known at once, and nobody waits for it.
            from composer_prime.sites.embedded.inference.serve import serve

            imported()
            serve(settings, listener)
    except ComposerPrimeError as error:
        return last_words(error)
    except Exception as error:
        if (refused := SystemRefused.of(error, Path(site_dir))) is not None:
            return last_words(refused)
        logger.exception("the inference engine failed")
        return 1
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)  # an exception here may come out of an import as another one; serving has handlers of its own


if __name__ == "__main__":
    exit_code = 0
    with contextlib.suppress(SystemExit):
        exit_code = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: a decoder step on a large model can outlast us, and threads in torch don't survive a tidy shutdown.
    os._exit(exit_code)
