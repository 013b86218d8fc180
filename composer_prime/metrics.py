"""The names of what we measure, and the tape it is written to: one JSON line a record, one file a process.

Names are stable: a plot, a report or an alert reads them. Units end the name.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from composer_prime.redaction import Redactor, secret_values

TRAIN_LOSS = "train/loss"
TRAIN_TRAIN_S = "train/train_s"
"""Seconds of a training step spent computing: forward, backward, optimizer."""
TRAIN_STEP_S = "train/step_s"
"""Seconds from one training step's end to the next one's, waiting included."""
TRAIN_TOKENS = "train/tokens"
TRAIN_GRAD_NORM = "train/grad_norm"

LOSS_POLICY = "loss/policy"
LOSS_KL = "loss/kl"
LOSS_REPLAY = "loss/replay"
LOSS_NUM_TEACHER_TOKENS = "loss/num_teacher_tokens"
"""Trained tokens of a step that carry a teacher's number."""
LOSS_MISMATCH_KL = "loss/mismatch_kl"
LOSS_IS_MASKED = "loss/is_masked"


def distill(stream: str, name: str) -> str:
    """The name of a number of one stream of teachers ("hint" or "replay"): `tokens` that a step learned from it, and of
    these the means of `loss` (weighted), `teacher_entropy`, `student_entropy` (nats), `overlap`, the probability
    that both give to the same tokens, and `student_tail`, what the policy gives to tokens beside the candidates."""
    return f"distill/{stream}_{name}"


ROLLOUT_REWARD = "rollout/reward"
ROLLOUT_PER_S = "rollout/per_s"
ROLLOUT_TOKENS = "rollout/tokens"
ROLLOUT_OFF_POLICY_STEPS = "rollout/off_policy_steps"
ROLLOUT_BEGAN = "rollout/began"
"""Unix time at which generation for a step began."""
ROLLOUT_ENDED = "rollout/ended"
"""Unix time at which it ended."""
ROLLOUT_COUNT = "rollout/count"
"""Rollouts that went through, also those that were filtered."""
ROLLOUT_FAILED = "rollout/failed"
"""Rollouts that failed and were left out."""
ROLLOUT_TURNS = "rollout/turns"
"""Mean number of the policy's messages in a rollout."""
ROLLOUT_SAMPLES = "rollout/samples"
"""Samples handed to the trainer."""

SITE_WALL_S = "site/wall_s"
"""Seconds from a supervisor's start to its site's end; a site that was resumed has several."""

TOOLS_CALLS = "tools/calls"
"""Calls of tools in a step's rollouts, of tools that there aren't too."""
TOOLS_ERRORS = "tools/errors"
"""Calls whose answer says that they failed; under this name and a slash those of each kind (hints/answers.py)."""
TOOLS_CALL_S = "tools/call_s"
"""Mean seconds until a call was answered."""


def teacher_metric(name: str, what: str) -> str:
    """The name of one of a teacher's numbers: "probes" (rollouts in which it took over, to be compared with the
    policy's), "better" or "weight" (teachers/gate.py)."""
    return f"teacher/{name}/{what}"


PAIRS_COUNT = "pairs/pairs"
"""Agreed actions that a step drew and had scored."""
PAIRS_LOGPROB = "pairs/logprob"
"""Mean over them, nats a token."""
PAIRS_PREFERRED = "pairs/preferred"
"""Those that the author did otherwise and the policy can form: they have a preference term."""
PAIRS_LEARNED = "pairs/learned"
"""Those of them whose term rests, since the policy has them by `replay.pairs.max_lead`."""
PAIRS_FAILED = "pairs/failed"
"""Those left out since the server gave no score."""
PAIRS_MARGIN = "pairs/margin"
"""Mean logit of the preference loss at the policy that scored them: 0 before DPO has moved anything."""
PAIRS_ACCURACY = "pairs/accuracy"
"""Share of them with a margin above 0."""
AGREEMENT = "pairs/agreement"
"""Share of held-out points at which the policy does what teachers agree on; `.../<tool>` where that calls a tool."""
TRACES_COUNT = "traces/turns"
"""Stored turns in a step's batch."""
TRACES_FAILED = "traces/failed"
"""Those left out since the server gave no score."""

OUTER_ROUND = "outer/round"
OUTER_STALL_S = "outer/stall_s"
"""Seconds the training thread waited for the outer loop."""
OUTER_TURN_S = "outer/turn_s"
"""Seconds of a step that a PRIME-RL trainer's first rank spent in the outer loop, the run's end and waits for the other
ranks included; upstream's own times leave them out."""
OUTER_UPLOAD_S = "outer/upload_s"
"""Seconds that coding and uploading took beside training, since this process began; so the bytes below."""
OUTER_BYTES_UP = "outer/bytes_up"
OUTER_BYTES_DOWN = "outer/bytes_down"


class OuterNumbers(Protocol):
    """What the outer loop counts, after an inner step (`sync.report.OuterReport`)."""

    @property
    def round(self) -> int: ...
    @property
    def stall_s(self) -> float: ...
    @property
    def upload_s(self) -> float: ...
    @property
    def bytes_up(self) -> int: ...
    @property
    def bytes_down(self) -> int: ...


def outer_values(report: OuterNumbers) -> dict[str, float]:
    """A step's report by metric name."""
    return {
        OUTER_ROUND: report.round,
        OUTER_STALL_S: report.stall_s,
        OUTER_UPLOAD_S: report.upload_s,
        OUTER_BYTES_UP: report.bytes_up,
        OUTER_BYTES_DOWN: report.bytes_down,
    }


class MetricsTape:
    """Appends records to a JSONL file; a reader may follow it while it grows.

    environment   whose secrets are cut out of the metrics' names: environments and losses give names of their own
    """

    def __init__(self, path: Path | str, environment: Mapping[str, str] = os.environ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._redactor = Redactor(secret_values(environment))
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, **values: float) -> None:
        """Append one record: the step, the wall-clock time in seconds, and the values by metric name.

        A value that isn't finite is written as null, since JSON has no NaN; `read_tape` gives NaN back.
        """
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record |= {
            self._redactor.text(name): float(value) if math.isfinite(value) else None for name, value in values.items()
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsTape":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class TapeFollower:
    """Reads the records that were added to one tape since the last look."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._offset = 0

    def new_records(self) -> list[dict[str, float]]:
        """The complete new records, in order; none while there is no tape. A line without its end is left."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [_record(line) for line in complete.splitlines()]


def read_tape(path: Path | str) -> list[dict[str, float]]:
    """The records of a tape in order. An absent file is an empty tape: the process hasn't logged yet."""
    return TapeFollower(path).new_records()


def _record(line: bytes) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in json.loads(line).items()}
