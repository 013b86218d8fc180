"""One tiny site of a storm: real torch, the real outer loop, inner steps that are timed waits.

`python -m tests.bench.storm.site CONFIG` runs it, or a nursery forks it. Killed and started again it goes on
from its newest checkpoint; what it did stands in its book, one JSON line for each step.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_prime.errors import StoreError, StoreUnusable
from composer_prime.store import open_store
from composer_prime.sync.journal import FileJournal
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.terms import Terms
from tests.bench.storm.book import STORE_DOWN, Book, StormSiteConfig

logger = logging.getLogger(__name__)

MOVE = 1e-3
"""Standard deviation of the random movement of one inner step."""


class StormSite:
    """One process of a site, from its start to the run's end, or until it is told to leave."""

    def __init__(self, config: StormSiteConfig) -> None:
        self._config = config
        self._folder = Path(config.folder)
        self._checkpoint = self._folder / "checkpoint.pt"
        self._book = Book(self._folder)
        self._leaving = threading.Event()
        self._random = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))
        terms = Terms.model_validate(config.terms)
        self._params = make_params(config.numel, terms.fragments)
        journal = FileJournal(self._folder / "journal")
        self._outer = OuterLoop(open_store(config.uri), terms, run="storm", site=config.site, journal=journal)

    def run(self) -> None:
        """Join, train until the run ends or SIGTERM asks to leave, and say how it went."""
        self._book.write("started")
        signal.signal(signal.SIGTERM, self._leave)
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint, weights_only=True)
            with torch.no_grad():
                for name, value in saved["params"].items():
                    self._params[name].copy_(value)
            self._outer.load_state_dict(saved["outer"])
        self._outer.join(self._params.items())
        self._book.write("joined", **self._stand())
        try:
            self._train()
            self._save()
        finally:
            self._outer.close()
        self._book.write("ended", finished=self._outer.finished, **self._outer.summary())

    def _train(self) -> None:
        config, step = self._config, 0
        while not self._outer.finished and not self._leaving.is_set():
            time.sleep(config.step_s)
            self._move()
            report = self._outer.after_inner_step(config.step_tokens, 1)
            step += 1
            self._book.write("step", stall_s=round(report.stall_s, 3), **self._stand())
            if step % config.checkpoint_steps == 0:
                self._save()

    def _move(self) -> None:
        with torch.no_grad():
            for value in self._params.values():
                value += torch.randn(value.shape, generator=self._random) * MOVE

    def _stand(self) -> dict[str, Any]:
        summary = self._outer.summary()
        return {
            "versions": [master["version"] for master in summary["masters"]],
            "merged": [ledger["merged"] for ledger in summary["tokens"]],
            "cpu_s": round(time.process_time(), 2),
        }

    def _save(self) -> None:
        """Whole or not at all."""
        temporary = self._checkpoint.with_suffix(".new")
        torch.save({"params": dict(self._params), "outer": self._outer.state_dict()}, temporary)
        os.replace(temporary, self._checkpoint)

    def _leave(self, number: int, frame: object) -> None:
        self._leaving.set()
        self._outer.interrupt()


def make_params(numel: int, num_fragments: int) -> dict[str, nn.Parameter]:
    """As many layers as fragments; all sites start alike, which no run relies on."""
    size = numel // num_fragments
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{index}.weight": nn.Parameter(torch.randn(size, generator=generator)) for index in range(num_fragments)
    }


def run_site(config_path: Path) -> int:
    """One process's life. Returns its exit code."""
    config = StormSiteConfig.read(config_path)
    os.environ.update(config.environment)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    site = StormSite(config)
    try:
        site.run()
    except (StoreError, StoreUnusable) as error:
        logger.error("store_down error=%s", error)
        return STORE_DOWN
    return 0


if __name__ == "__main__":
    sys.exit(run_site(Path(sys.argv[1])))
