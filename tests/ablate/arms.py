"""A recipe file with both teacher signals, and a runner that trains nothing, for tests of ablations."""

from collections.abc import Callable
from pathlib import Path

from composer_prime.ablate.plan import Job, Row
from composer_prime.sites.embedded.result import write_whole

PLAIN = """max_steps = 4
run.name = "test"
orchestrator.train.source = [{ name = "letters", env.taskset.id = "reverse-letters" }]
"""
HINTS = "[hints]\ntimeout_s = 20.0\n"
TEACHERS = '[[replay.teachers]]\nname = "big"\nbase_url = "http://127.0.0.1:9"\n'
PAIRS = '[replay.pairs]\nstore = "traces"\nfile = "pairs.jsonl"\n'
TRACES = '[replay.traces]\nstore = "store"\n'


def write_recipe(folder: Path, *tables: str) -> str:
    """Write the plain recipe with further tables, its output below the same folder; the file's path."""
    path = folder / "recipe.toml"
    path.write_text(f"output_dir = {str(folder / 'out')!r}\n{PLAIN}{''.join(tables)}")
    return str(path)


def row_of(job: Job, held_out: float, **changes: object) -> Row:
    """A row that a run of this job could have left: 40 s for 4 steps, and 10 s for an evaluation."""
    values: dict[str, object] = {
        "arm": job.arm.name, "seed": job.seed, "recipe_sha256": job.arm.sha256, "held_out_prompts": job.prompts,
        "held_out": held_out, "held_out_s": 10.0, "start": 0.1 if job.measures_start else None, "steps": 4,
        "rollouts": 32, "generated_tokens": 1000, "run_s": 40.0, "rewards": (0.1, 0.2, 0.3, 0.4),
    }  # fmt: skip
    return Row.model_validate(values | changes)


class FakeRunner:
    """Writes the rows that it is told, and remembers which jobs it was given.

    outcome   the held-out reward of a job; an error to raise; None: it was stopped
    """

    def __init__(self, outcome: Callable[[Job], float | Exception | None] = lambda job: 0.5) -> None:
        self.outcome = outcome
        self.given: list[str] = []

    def __call__(self, job: Job, is_stopped: Callable[[], bool]) -> Row | None:
        self.given.append(job.label)
        outcome = self.outcome(job)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            return None
        row = row_of(job, outcome)
        job.row.parent.mkdir(parents=True, exist_ok=True)
        write_whole(job.row, row.model_dump_json())
        return row
