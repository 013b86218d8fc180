"""Where the outer state lies beside PRIME-RL's checkpoints, and which of them are whole. No torch.

    checkpoints/step_N/trainer/                 upstream's; `.metadata` is the last that is written of it
    checkpoints/step_N/orchestrator/progress.pt upstream's, of the orchestrator: written when it sends the step's batch
    checkpoints/outer/step_N.pt                 ours: put in place whole, before upstream's trainer begins with its own

Upstream resumes from the newest `step_N`, whole or not, so nothing of ours may lie there.
"""

from pathlib import Path

from composer_prime.errors import ConfigError

_LAST = ".metadata"


def outer_state_file(trainer_checkpoint: Path) -> Path:
    """Where the outer state of upstream's `checkpoints/step_N/trainer` lies."""
    step = trainer_checkpoint.parent
    return step.parent / "outer" / f"{step.name}.pt"


def saved_outer_state(trainer_checkpoint: Path) -> Path:
    """As `outer_state_file`; where there is none, the place in which earlier versions kept it if they did."""
    place, earlier = outer_state_file(trainer_checkpoint), trainer_checkpoint.parent / "outer.pt"
    return earlier if earlier.exists() and not place.exists() else place


def begin_saving(trainer_checkpoint: Path) -> None:
    """What stood at this step is whole no more, and states whose steps upstream has deleted go."""
    (trainer_checkpoint / _LAST).unlink(missing_ok=True)
    states = outer_state_file(trainer_checkpoint).parent
    states.mkdir(parents=True, exist_ok=True)
    for file in states.iterdir():
        if not (states.parent / file.stem).is_dir():  # nor is there one for what a killed process had begun to write
            file.unlink(missing_ok=True)


def newest_whole(checkpoints: Path, orchestrator: Path | None = None) -> int | None:
    """The newest step whose checkpoint is whole, with an outer state if any has one; None: no step's is.

    checkpoints    upstream's folder of them
    orchestrator   the one in which the orchestrator's have to be as well; None: there may be no orchestrator
    """
    steps = {}
    for folder in checkpoints.glob("step_*"):
        theirs = orchestrator is None or (orchestrator / folder.name / "orchestrator" / "progress.pt").is_file()
        if theirs and (folder / "trainer" / _LAST).is_file():
            steps[int(folder.name.removeprefix("step_"))] = saved_outer_state(folder / "trainer").is_file()
    return max((step for step, has_state in steps.items() if has_state), default=max(steps, default=None))


def check_whole(trainer_checkpoint: Path) -> None:
    """Raise ConfigError when a save of upstream's checkpoint was cut off, with the step to resume from instead."""
    if (trainer_checkpoint / _LAST).is_file():
        return
    step = trainer_checkpoint.parent
    newest = newest_whole(step.parent)
    remedy = "no other is, so delete it and start over" if newest is None else f"resume from step {newest}, which is"
    raise ConfigError(f"checkpoint {step} isn't whole, since a save was cut off before its end: {remedy}")
