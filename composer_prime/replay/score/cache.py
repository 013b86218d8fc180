"""Scores on disk under what was asked: the teacher, k and the tokens. A stored trace is scored once by each teacher.

A second teacher on the same traces costs its scoring and no rollouts; the same teacher again costs a read.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from composer_prime.errors import CorruptObject
from composer_prime.replay.score.candidates import Candidates
from composer_prime.replay.score.coding import decode, encode

logger = logging.getLogger(__name__)


def key_of(fingerprint: str, k: int, token_ids: Sequence[int]) -> str:
    """blake2b in hex, 40 characters, of the teacher's fingerprint, k, and the tokens as little-endian int32."""
    teacher = fingerprint.encode()
    digest = hashlib.blake2b(digest_size=20)
    digest.update(len(teacher).to_bytes(4, "little") + teacher + k.to_bytes(4, "little"))
    digest.update(np.array(token_ids, dtype="<i4").tobytes())
    return digest.hexdigest()


class ScoreCache:
    """A folder of scores. Several processes may share it: an entry is written whole, and equal keys hold equal scores.

    fingerprint  what tells a teacher from all others, weights and tokenizer included
    k            slots of each distribution
    token_ids    the sequence; its candidates have one row a token
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def score(
        self, fingerprint: str, k: int, token_ids: Sequence[int], ask: Callable[[], Awaitable[Candidates]]
    ) -> Candidates:
        """The stored scores, or else those that `ask` gives, stored.

        A first answer is returned as a later hit returns it, with coding's rounding. What `ask` raises goes through.
        Raises ValueError if the answer isn't (len(token_ids), k).
        """
        stored = self.get(fingerprint, k, token_ids)
        if stored is not None:
            return stored
        return self.put(fingerprint, k, token_ids, await ask())

    def get(self, fingerprint: str, k: int, token_ids: Sequence[int]) -> Candidates | None:
        """The stored scores; None if there are none, or, with a warning, if they are damaged."""
        path = self.path(fingerprint, k, token_ids)
        try:
            scores = decode(path.read_bytes())
            _check(scores, k, len(token_ids))
        except FileNotFoundError:
            return None
        except (CorruptObject, ValueError) as error:
            logger.warning("cache=scores path=%s damaged, the teacher is asked again: %s", path, error)
            return None
        return scores

    def put(self, fingerprint: str, k: int, token_ids: Sequence[int], scores: Candidates) -> Candidates:
        """Store scores, in place of those that are there; returns what `get` gives from now on.

        Raises ValueError if they aren't (len(token_ids), k).
        """
        _check(scores, k, len(token_ids))
        path = self.path(fingerprint, k, token_ids)
        block = encode(scores)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="part-", delete=False) as file:
            try:
                file.write(block)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return decode(block)

    def path(self, fingerprint: str, k: int, token_ids: Sequence[int]) -> Path:
        """Where an entry lies: 256 folders share them."""
        key = key_of(fingerprint, k, token_ids)
        return self._folder / key[:2] / key[2:]


def _check(scores: Candidates, k: int, num_tokens: int) -> None:
    if scores.ids.shape != (num_tokens, k):
        raise ValueError(f"scores of shape {scores.ids.shape}, not {(num_tokens, k)}: score this sequence with this k")
