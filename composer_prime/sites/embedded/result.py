"""What a trainer leaves behind when its site is done: one small record, the sign for all others to end.

The trainer writes it last and whole (renamed into place); the supervisor, the orchestrator and the summary read it.
"""

import os
from pathlib import Path

from pydantic import Field

from composer_prime.config.table import Table


class MasterVersion(Table):
    """Which master of a fragment the site ended with."""

    version: int = Field(ge=0)
    """Rounds behind it."""

    sha256: str
    """Of its weights and outer momentum; equal at all sites of a run."""


class SiteResult(Table):
    """One site's run in numbers, from its first start on (checkpoints carry the counts over a resume)."""

    steps: int = Field(ge=0)
    """Training steps taken."""

    tokens: int = Field(ge=0)
    """Tokens trained on."""

    dropped_tokens: int = Field(default=0, ge=0)
    """Of these, in the mean over the fragments, those that no round took: the run was over by then, or had gone on for
    more than outer.max_stale_rounds."""

    outer_rounds: int = Field(ge=0)
    """Rounds merged, over all fragments; 0 without an outer loop."""

    master_sha256: dict[str, MasterVersion] = Field(default_factory=dict)
    """By fragment index (a JSON key is a string); empty without an outer loop."""

    bytes_up: int = Field(default=0, ge=0)
    """Bytes written to the bucket."""

    bytes_down: int = Field(default=0, ge=0)
    """Bytes read from the bucket."""

    stall_s: float = Field(default=0.0, ge=0)
    """Seconds the training thread waited for the outer loop while there was training left to do."""

    finish_s: float = Field(default=0.0, ge=0)
    """Seconds from the site's last training step to the run's final masters: the wait for slower sites."""

    train_s: float = Field(default=0.0, ge=0)
    """Seconds the trainer computed: forward, backward, optimizer."""

    def save(self, path: Path) -> None:
        """Write the record at `path`, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "SiteResult | None":
        """The record at `path`; None when the site hasn't ended (yet)."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in one step: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
