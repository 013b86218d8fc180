"""Two measurements of docs/benchmarks.md once more, on a GPU: what teachers bring, and several sites at equal samples.

    python -m tests.bench.gpu --out outputs/gpu

In parts: a call ends by itself before `--minutes`, with 75 while there is more to do, and the same call goes on from
there; 0 when all is done. It calls `composer-prime` and keeps what that leaves; `parts.jsonl` says which commands ran
on which device. `--small` cuts everything so far that it passes on two CPU cores: a test of the commands, no
measurement.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from composer_prime.ablate.ablation import finished_rows
from composer_prime.ablate.plan import Job, plan_jobs
from composer_prime.ablate.runner import is_healthy
from composer_prime.config.ablate import read_arms
from composer_prime.config.load import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.config.recipe import Recipe
from composer_prime.errors import BadInput, ComposerPrimeError, SiteError
from composer_prime.sites.embedded.inference_client import newest_broadcast
from composer_prime.sites.embedded.installed import check_device
from composer_prime.sites.embedded.ports import HOST, is_free
from composer_prime.sites.embedded.processes import QUIET_ENV, Child, Interrupt, catch_interrupt

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_EXAMPLES = "orchestrator.train.source.0.env.taskset.num_examples"
OUTER = "outer.fragments=1 outer.sync_delay=0 outer.codec=int8"
TWO = f"sites.count=2 {NUM_EXAMPLES}=1024 orchestrator.batch_size=128 {OUTER} outer.lr=1.27"
FOUR = f"sites.count=4 {NUM_EXAMPLES}=512 orchestrator.batch_size=64 {OUTER} outer.lr=1.65"


@dataclass(frozen=True)
class Measurement:
    """One ablation of a recipe.

    model         of its runs, unless the command line names another; in a small one the recipe's own
    seeds         runs of each arm
    prompts       held-out tasks
    arms          as `composer-prime ablate --arm` takes them, beside those that the recipe's signals give
    has_teacher   whether a run of another seed teaches the others by replay
    small         settings that make a run of it short, and the arms to go with them
    """

    name: str
    recipe: Path
    model: str
    seeds: int
    prompts: int
    arms: tuple[str, ...] = ()
    has_teacher: bool = False
    small: tuple[str, ...] = ()
    small_arms: tuple[str, ...] = ()


TEACHING = Measurement(
    "teaching",
    RECIPES / "local/hints.toml",
    "small-tools",
    seeds=5,
    prompts=256,
    has_teacher=True,
    small=("--max_steps", "2", "--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
)
SITES = Measurement(
    "sites",
    RECIPES / "local/equal_samples.toml",
    "small-sort",
    seeds=8,
    prompts=2048,
    arms=(
        f"two {TWO} outer.inner_steps=2",
        f"four {FOUR} outer.inner_steps=2",
        f"half {NUM_EXAMPLES}=1024 max_steps=16 trainer.scheduler.decay_steps=16",
        f"once {TWO} outer.inner_steps=32",
    ),
    small=(
        "--max_steps",
        "4",
        "--trainer.scheduler.decay_steps",
        "4",
        "--orchestrator.batch_size",
        "16",
        f"--{NUM_EXAMPLES}",
        "64",
    ),
    small_arms=(
        f"two sites.count=2 {NUM_EXAMPLES}=32 orchestrator.batch_size=8 outer.inner_steps=4 outer.fragments=1 "
        "outer.sync_delay=0",
    ),
)

CLI = (sys.executable, "-m", "composer_prime.cli.main")
MORE_EXIT = 75
"""sysexits.h's EX_TEMPFAIL: call again."""
SMALL_SEEDS, SMALL_PROMPTS = 1, 8
TEACHER, TEACHER_SEED = "teacher", 1000
"""The teacher's run, and how far its seed is from the first of the runs that it teaches."""
STOP_S = 60.0
"""Seconds before the end of a part at which what runs is interrupted, a quarter of it at most: a checkpoint is written,
or an evaluation ends."""
POLL_S = 0.1


class Part:
    """One call of this script: its time, its folder, and what it ran."""

    def __init__(self, args: argparse.Namespace, interrupt: Interrupt) -> None:
        self.out: Path = args.out.absolute()
        self.out.mkdir(parents=True, exist_ok=True)
        limit_s = 60 * args.minutes
        self._ends = time.monotonic() + limit_s
        self._stop_s = min(STOP_S, limit_s / 4)
        self._interrupt = interrupt
        self._machine = machine(args.device) | {"small": args.small}

    @property
    def is_over(self) -> bool:
        """Whether nothing more may start, and what runs must stop."""
        return self._interrupt.is_set or time.monotonic() > self._ends - self._stop_s

    def run(self, name: str, arguments: Sequence[str]) -> bool:
        """Run a command of ours to its end, and return whether it came to it, or was stopped since time is up.

        Raises SiteError with the end of its log when it failed.
        """
        began, load = datetime.now(UTC), os.getloadavg()
        child, asked = self._start(name, arguments), 0
        try:
            while (code := child.poll()) is None:
                late = time.monotonic() - self._ends + self._stop_s
                if self.is_over and (asked == 0 or (asked == 1 and late > self._stop_s / 2)):
                    os.kill(child.pid, signal.SIGINT)  # the second time it leaves what it is in
                    asked += 1
                if late > self._stop_s:
                    break
                time.sleep(POLL_S)
        finally:
            child.kill()
        self._note(began, arguments, code, load)
        if code == 0 or asked:
            return code == 0
        raise SiteError(f"{name} ended with {code}, see {child.log}: {' / '.join(child.tail()[-3:])}")

    @contextlib.contextmanager
    def serving(self, name: str, arguments: Sequence[str], port: int) -> Iterator[bool]:
        """A server in the background; whether it answers, which it doesn't when time is up first.

        Raises BadInput when the port is in use, SiteError when the server ends instead.
        """
        if not is_free(port):
            raise BadInput(f"--port ({port}) is in use on {HOST}: stop what listens there")
        server = self._start(name, arguments)
        self._note(datetime.now(UTC), arguments, None, os.getloadavg())
        try:
            while not (answers := is_healthy(port)) and not self.is_over:
                if server.poll() is not None:
                    raise SiteError(f"{name} ended, see {server.log}: {' / '.join(server.tail()[-3:])}")
                time.sleep(POLL_S)
            yield answers
        finally:
            server.kill()

    def _start(self, name: str, arguments: Sequence[str]) -> Child:
        print(f"composer-prime {shlex.join(arguments)}", flush=True)
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        return Child(name, [*CLI, *arguments], log, env=QUIET_ENV, orphan=signal.SIGTERM)

    def _note(self, began: datetime, arguments: Sequence[str], code: int | None, load: Sequence[float]) -> None:
        """A line in parts.jsonl. code: None for a server, and for a command that was killed."""
        seconds = (datetime.now(UTC) - began).total_seconds()
        ran = {"began": began.isoformat(), "seconds": seconds, "exit": code, "command": list(arguments)}
        with (self.out / "parts.jsonl").open("a") as file:
            file.write(json.dumps(ran | self._machine | {"load_average_before": list(load)}) + "\n")


def machine(device: str) -> dict[str, object]:
    """What a number depends on beside the recipe."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or platform.machine()
    cores, versions = os.cpu_count(), f"{torch.__version__} (CUDA {torch.version.cuda})"
    return {"device": device, "device_name": name, "cpu_cores": cores, "torch": versions, "host": platform.platform()}


@dataclass(frozen=True)
class Plan:
    """A measurement as the command line has it. `settings` are those of every run."""

    measurement: Measurement
    settings: tuple[str, ...]
    seeds: int
    prompts: int
    port: int

    @property
    def teacher(self) -> Recipe:
        return load_recipe(self.measurement.recipe, self._teacher_settings)

    @property
    def _teacher_settings(self) -> tuple[str, ...]:
        seed = load_recipe(self.measurement.recipe, self.settings).run.seed + TEACHER_SEED
        return (*self.settings, "--run.name", TEACHER, "--run.seed", str(seed))

    @property
    def taught_settings(self) -> tuple[str, ...]:
        if not self.measurement.has_teacher:
            return self.settings
        teachers = f'[{{ name = "{TEACHER}", base_url = "http://{HOST}:{self.port}" }}]'
        return (*self.settings, "--replay.teachers", teachers)

    def jobs(self) -> tuple[Job, ...]:
        """The ablation's runs. Raises BadInput where the folder holds others."""
        arms = read_arms(str(self.measurement.recipe), self.taught_settings, self.measurement.arms, harm=False)
        return plan_jobs(arms, self.seeds, self.prompts)

    def is_done(self) -> bool:
        """Say how far it is; whether nothing is left."""
        jobs = self.jobs()
        rows = finished_rows(jobs)
        report = jobs[0].folder / "report.md"
        left = [job.label for job in jobs if job not in rows]
        newest = max((job.row.stat().st_mtime_ns for job in rows), default=0)
        if not report.exists() or report.stat().st_mtime_ns < newest:  # a part may end before it is written
            left.append("the report")
        state = f"left: {', '.join(left)}" if left else str(report)
        print(f"{self.measurement.name}: {len(rows)} of {len(jobs)} runs done, {state}", flush=True)
        return not left

    def go_on(self, part: Part) -> None:
        """Do what is left of it, as far as the time goes. Raises SiteError when a command fails."""
        if not self.measurement.has_teacher:
            self._ablate(part)
        elif self._teach(part):
            with self._teacher_serving(part) as answers:
                if answers:
                    self._ablate(part)

    def _ablate(self, part: Part) -> None:
        arms = [word for arm in self.measurement.arms for word in ("--arm", arm)]
        numbers = ("--no-harm", "--seeds", str(self.seeds), "--held-out-prompts", str(self.prompts))
        recipe = str(self.measurement.recipe)
        part.run(self.measurement.name, ["ablate", recipe, *arms, *numbers, *self.taught_settings])

    def _teach(self, part: Part) -> bool:
        """Make the teacher unless it is there; whether it is."""
        paths = RunPaths.of(self.teacher)
        if all(paths.site(name).result.exists() for name in self.teacher.site_names):
            return True
        resume = ["--resume"] if paths.root.exists() else []
        return part.run(TEACHER, ["run", str(self.measurement.recipe), *resume, *self._teacher_settings])

    def _teacher_serving(self, part: Part) -> contextlib.AbstractContextManager[bool]:
        teacher = self.teacher
        newest = newest_broadcast(RunPaths.of(teacher).site(teacher.site_names[0]))
        if newest is None:
            raise SiteError(f"{RunPaths.of(teacher).root} has no weights to teach with: delete that folder")
        where = ["--port", str(self.port), "--weights", str(newest[1]), "--device", teacher.site.device]
        named = ["replay", "teacher", teacher.model.name, "--seed", str(teacher.run.seed)]
        return part.serving(f"{TEACHER}-server", [*named, *where], self.port)


def read_plans(args: argparse.Namespace) -> list[Plan]:
    """The measurements that are asked for."""
    given = {"teaching": args.teaching, "sites": args.sites}
    plans = []
    for measurement in (TEACHING, SITES):
        if args.only not in (None, measurement.name):
            continue
        cut = measurement.small if args.small else ()
        arms = measurement.small_arms if args.small else measurement.arms
        if args.arm and measurement is SITES:
            arms = tuple(args.arm)
        chosen = args.model or (None if args.small else measurement.model)
        model = ("--model.name", chosen) if chosen else ()
        folder = ("--output_dir", str(args.out.absolute() / measurement.name))
        plans.append(
            Plan(
                replace(measurement, recipe=given[measurement.name] or measurement.recipe, arms=arms),
                (*folder, "--site.device", args.device, *model, *cut),
                args.seeds or (SMALL_SEEDS if args.small else measurement.seeds),
                args.held_out_prompts or (SMALL_PROMPTS if args.small else measurement.prompts),
                args.port,
            )
        )
    return plans


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m tests.bench.gpu", description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder of all that is left behind")
    parser.add_argument("--device", default="cuda", help="site.device of all runs, and of the teacher")
    parser.add_argument(
        "--model", help="model.name of all runs, such as a folder; by default models of 32 M parameters"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="one call ends before so many")
    parser.add_argument("--teaching", type=Path, metavar="RECIPE", help=f"in place of {TEACHING.recipe.name}")
    parser.add_argument("--sites", type=Path, metavar="RECIPE", help=f"in place of {SITES.recipe.name}")
    parser.add_argument("--arm", action="append", help="of the sites, in place of ours; as for composer-prime ablate")
    parser.add_argument("--only", choices=["teaching", "sites"], help="one of the two")
    parser.add_argument("--seeds", type=int, help=f"runs of each arm, {TEACHING.seeds} and {SITES.seeds} by default")
    parser.add_argument("--held-out-prompts", type=int, help=f"{TEACHING.prompts} and {SITES.prompts} by default")
    parser.add_argument("--port", type=int, default=8100, help="of the teacher; the same in every call")
    parser.add_argument("--small", action="store_true", help="runs of a few steps, one of each arm: no measurement")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Do what is left until time is up; the exit code."""
    args = parse(arguments)
    try:
        check_device(args.device)
        plans = read_plans(args)
        with catch_interrupt() as interrupt:
            part = Part(args, interrupt)
            size = "small, no measurement" if args.small else "as measured"
            print(f"on {args.device}, {size}", flush=True)
            for plan in plans:
                if not plan.is_done() and not part.is_over:
                    plan.go_on(part)
        done = [plan.is_done() for plan in plans]
    except ComposerPrimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if all(done):
        return 0
    print("There is more to do: the same command goes on from here.")
    return MORE_EXIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
