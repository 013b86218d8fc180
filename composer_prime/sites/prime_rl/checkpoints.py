"""Where the outer state lies beside PRIME-RL's checkpoints, and which of them are whole. No torch.

    checkpoints/step_N/trainer/                 upstream's; `.metadata` is the last that is written of it
    checkpoints/step_N/orchestrator/progress.pt upstream's, of the orchestrator: written when it sends the step's batch
    checkpoints/outer/step_N.pt                 ours: put in place whole, before upstream's trainer begins with its own
    checkpoints/outer/step_N.sha256             ours: the hash of that
    checkpoints/outer/step_N.files              ours: what upstream's trainer had written in the end, for it deletes
                                                old checkpoints file by file

Upstream resumes from the newest `step_N`, whole or not, so nothing of ours may lie there.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import ConfigError
from composer_prime.sites.embedded.result import write_whole
from composer_prime.sites.intact import damage

logger = logging.getLogger(__name__)

_LAST = ".metadata"


@dataclass(frozen=True)
class OuterState:
    """Our part of the checkpoint that upstream's trainer has loaded.

    file    where it lies, if there is one
    is_own  whether it is of this trainer's own folder; PRIME-RL also takes another's, by `[resume] dir`
    """

    file: Path
    is_own: bool


def outer_state_file(trainer_checkpoint: Path) -> Path:
    """Where the outer state of upstream's `checkpoints/step_N/trainer` lies."""
    step = trainer_checkpoint.parent
    return step.parent / "outer" / f"{step.name}.pt"


def sums_file(outer_state: Path) -> Path:
    """Where the hash of an outer state lies."""
    return outer_state.with_suffix(".sha256")


def begin_saving(trainer_checkpoint: Path) -> None:
    """What stood at this step is whole no more, and states whose steps upstream has deleted go."""
    (trainer_checkpoint / _LAST).unlink(missing_ok=True)
    states = outer_state_file(trainer_checkpoint).parent
    states.mkdir(parents=True, exist_ok=True)
    for file in states.iterdir():
        if not (states.parent / file.stem).is_dir():  # nor is there one for what a killed process had begun to write
            file.unlink(missing_ok=True)


def end_saving(trainer_checkpoint: Path) -> None:
    """Note what upstream's trainer has written of its checkpoint, all of which must be there for it to be whole."""
    files = (file for file in trainer_checkpoint.rglob("*") if file.is_file())
    names = sorted(str(file.relative_to(trainer_checkpoint)) for file in files)
    write_whole(_list_file(trainer_checkpoint), "\n".join(names))


def _list_file(trainer_checkpoint: Path) -> Path:
    return outer_state_file(trainer_checkpoint).with_suffix(".files")


def _is_whole(trainer_checkpoint: Path) -> bool:
    listed = _list_file(trainer_checkpoint)
    names = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else ()
    if not all((trainer_checkpoint / name).is_file() for name in (_LAST, *names)):
        return False
    state = outer_state_file(trainer_checkpoint)
    cause = damage(sums_file(state)) if state.is_file() else None
    if cause is not None:
        logger.warning("outer_state_damaged path=%s: %s", state, cause)
    return cause is None


def newest_whole(checkpoints: Path, orchestrator: Path | None = None) -> int | None:
    """The newest step whose checkpoint is whole, with an outer state if any has one; None: no step's is.

    checkpoints    upstream's folder of them
    orchestrator   the one in which the orchestrator's have to be as well; None: there may be no orchestrator
    """
    found = []
    for folder in checkpoints.glob("step_*"):
        if orchestrator is None or (orchestrator / folder.name / "orchestrator" / "progress.pt").is_file():
            has_state = outer_state_file(folder / "trainer").is_file()
            found.append((has_state, int(folder.name.removeprefix("step_")), folder / "trainer"))
    return next((step for _, step, trainer in sorted(found, reverse=True) if _is_whole(trainer)), None)


def check_whole(trainer_checkpoint: Path) -> None:
    """Raise ConfigError where upstream's trainer hasn't got a whole checkpoint, with the step to resume from."""
    if _is_whole(trainer_checkpoint):
        return
    step = trainer_checkpoint.parent
    newest = newest_whole(step.parent)
    remedy = "no other is, so start over without resuming" if newest is None else f"resume from step {newest}, which is"
    raise ConfigError(
        f"checkpoint {step} isn't whole: its trainer was ended before it had saved it, or its outer state is damaged; "
        f"{remedy}"
    )
