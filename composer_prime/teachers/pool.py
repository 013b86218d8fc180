"""The teachers of a run: checked once before anything starts, then asked all at once about every rollout.

A teacher that is late, down, or answers nonsense drops out of that one answer; the others are neither delayed beyond
its time-out nor changed. What can't work at all, above all another tokenizer, is refused before the first rollout.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import TeacherError, TeacherRefused
from composer_prime.teachers.fingerprint import Fingerprint, Questions, own_fingerprint, served_fingerprint
from composer_prime.teachers.served import ServedModel
from composer_prime.teachers.wire import MOST_IDS, Scores

CHECK_TIMEOUT_S = 120.0
"""Seconds a teacher's tokenizer may take to be compared: some forty requests for a vocabulary of 150,000."""

TeacherTable = Literal["replay.teachers", "hints", "env.reference"]
"""A recipe's table that names a teacher's server."""

INSTEAD: dict[TeacherTable, str] = {
    "replay.teachers": "take it out of replay.teachers",
    "hints": "name another server in hints.base_url",
    "env.reference": "name another server in env.reference.base_url",
}
"""What to do without a server that can't be used."""

PROBED_TOKENS = 64
"""Tokens by whose scores a server is tried before the run."""


@dataclass(frozen=True)
class Score:
    """What one teacher said to one token sequence.

    scores   None when it gave no answer
    failure  why not, as one line
    """

    teacher: str
    weight: float
    scores: Scores | None
    failure: str | None = None


class Teacher:
    """One served model and its place in the mixture; asked for `top_k` candidates a token, of ids below `num_ids`.
    table: which names it."""

    def __init__(
        self, config: TeacherConfig, top_k: int, num_ids: int, *, table: TeacherTable = "replay.teachers"
    ) -> None:
        self.config = config
        self.top_k = top_k
        self.num_ids = num_ids
        self.served = ServedModel(config.base_url, model=config.model, headers=_headers(config, table))
        self._instead = INSTEAD[table]

    async def check(self, questions: Questions, policy: Fingerprint) -> None:
        """Raise TeacherRefused when it can't be reached, reads token ids otherwise, or gives no prompt logprobs
        that can be used."""
        who = f"teacher {self.config.name}"
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self.served.find()
                theirs = await served_fingerprint(questions, self.served.decode, self.served.encode)
                if not policy.difference(theirs):
                    k = min(self.top_k, questions.num_ids)
                    await self.served.check_scores(policy.probe[:PROBED_TOKENS], k)
        except TeacherError as error:
            raise TeacherRefused(
                f"{who} can't be used: {error}; serve it with vLLM's OpenAI server, prompt logprobs and /tokenize "
                f"allowed, or {self._instead}"
            ) from error
        except TimeoutError:
            raise TeacherRefused(
                f"{who} ({self.config.base_url}) didn't answer within {CHECK_TIMEOUT_S:g} s: start it first, or "
                f"{self._instead}"
            ) from None
        if difference := policy.difference(theirs):
            raise TeacherRefused(
                f"{who} has another tokenizer than the policy (fingerprint {theirs.sha256[:12]}, not "
                f"{policy.sha256[:12]}): {difference}; serve a model of the policy's own family"
            )

    async def score(self, token_ids: Sequence[int]) -> Score:
        """Its logprobs of a token sequence, or why there are none; never later than its time-out."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                scores = await self.served.scores(token_ids, self.top_k, self.num_ids)
            return Score(self.config.name, self.config.weight, scores)
        except TimeoutError:
            failure = f"late: no answer within {self.config.timeout_s:g} s"
        except TeacherError as error:
            failure = str(error)
        return Score(self.config.name, self.config.weight, None, failure)


class TeacherPool:
    """All teachers of a run; `close` it in the end.

    top_k    candidates a token that each is asked for
    num_ids  of the policy's vocabulary: candidates with other ids are left out
    table    the recipe's table that names them
    """

    def __init__(
        self,
        configs: Sequence[TeacherConfig],
        top_k: int = 0,
        num_ids: int = MOST_IDS,
        *,
        table: TeacherTable = "replay.teachers",
    ) -> None:
        self.teachers = tuple(Teacher(config, top_k, num_ids, table=table) for config in configs)

    async def check(self, tokenizer: Any) -> None:
        """Raise TeacherRefused, for the first in order, when a teacher can't be used with this tokenizer's token ids.

        tokenizer  the policy's, as transformers loads it.
        """
        if not self.teachers:
            return
        questions = Questions.of(tokenizer)
        policy = own_fingerprint(tokenizer, questions)
        checks = (teacher.check(questions, policy) for teacher in self.teachers)
        for refusal in await asyncio.gather(*checks, return_exceptions=True):
            if refusal is not None:
                raise refusal

    async def score(self, token_ids: Sequence[int], shares: Sequence[float] | None = None) -> list[Score]:
        """What the teachers say to one token sequence, in the order of the recipe; all are asked at once.

        shares   of each one's weight that is left, 0 to 1; who has none isn't asked. None: all of it
        """
        whole = [1.0] * len(self.teachers)
        asked = [(teacher, share) for teacher, share in zip(self.teachers, shares or whole, strict=True) if share > 0]
        scores = await asyncio.gather(*(teacher.score(token_ids) for teacher, _ in asked))
        return [replace(score, weight=score.weight * share) for score, (_, share) in zip(scores, asked, strict=True)]

    async def close(self) -> None:
        """Close the connections."""
        for teacher in self.teachers:
            await teacher.served.close()


def _headers(config: TeacherConfig, table: TeacherTable) -> dict[str, str] | None:
    if config.api_key_var is None:
        return None
    key = os.environ.get(config.api_key_var)
    if not key:
        raise TeacherRefused(
            f"{table}.api_key_var ({config.api_key_var}) names no variable that is set: set it to the key of "
            f"teacher {config.name}, or leave it out"
        )
    return {"Authorization": f"Bearer {key}"}
