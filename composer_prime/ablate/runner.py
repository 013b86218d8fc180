"""Trains and judges one run of an ablation: `composer-prime run` as a process, then its weights on held-out tasks."""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from torch import Tensor

from composer_prime.ablate.held_out import check_unseen, final_weights, held_out_reward, write_model
from composer_prime.ablate.plan import Job, Row, read_measured
from composer_prime.config.ablate import OWN_TEACHER, tasks_of
from composer_prime.config.load import recipe_from_data
from composer_prime.config.paths import models_cache, run_uri
from composer_prime.config.recipe import Recipe
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, SiteError
from composer_prime.export.model import made_whole
from composer_prime.sites.embedded.broadcasts import weights
from composer_prime.sites.embedded.local_run import INTERRUPTED_EXIT
from composer_prime.sites.embedded.model import load_policy, resolve_model
from composer_prime.sites.embedded.ports import HOST, claim_port, is_free
from composer_prime.sites.embedded.processes import QUIET_ENV, Child
from composer_prime.sites.embedded.result import write_whole
from composer_prime.sites.embedded.whole_folder import numbered_steps
from composer_prime.store import open_store

GREEDY = 0.0
RESTARTED_FROM = "restarted_from"
"""A file in a restart's model folder: the arm that its weights are from."""
_POLL_S = 0.2


def check_tasks(jobs: Sequence[Job]) -> None:
    """Raise BadInput, with the arm's name, when a run of the first seed trains on tasks that it will be judged on. Of
    later seeds each run looks itself, before it trains."""
    for job in jobs:
        if job.seed == jobs[0].seed:
            _check_tasks(job)


def _check_tasks(job: Job) -> None:
    if tasks_of(job.recipe) == tasks_of(job.judged_by):
        return  # the evaluation compares those of one recipe
    try:
        check_unseen(job.judged_by, job.recipe, job.prompts)
    except BadInput as error:
        raise BadInput(f"arm {job.arm.name}: {error}") from error


def run_job(job: Job, is_stopped: Callable[[], bool]) -> Row | None:
    """Train a run to its end, or go on with one that was cut, and judge it; its row, which is in its file too.

    is_stopped   asked while it trains; once true, the run writes checkpoints and ends

    Returns None when it was stopped. Raises BadInput for what a person can fix, SiteError with the end of the log
    when the run or its evaluation fails.
    """
    _check_tasks(job)
    begun = start_of(job) if job.before else None
    with teacher_served(job, is_stopped) as recipe:
        if is_stopped() or not _train(job, recipe, is_stopped):
            return None
    began = time.monotonic()
    held_out = statistics.fmean(_judge(job, policy) for policy in _final_policies(job))
    held_out_s = time.monotonic() - began
    row = Row(
        **read_measured(job.run),
        arm=job.arm.name,
        seed=job.seed,
        recipe_sha256=job.arm.sha256,
        held_out_prompts=job.prompts,
        held_out=held_out,
        held_out_s=held_out_s,
        start=_judge(job, _untrained(job)) if job.measures_start else begun and begun.held_out,
        restarted_from=begun and begun.arm,
    )
    job.row.parent.mkdir(parents=True, exist_ok=True)
    write_whole(job.row, row.model_dump_json(indent=1) + "\n")
    return row


@contextlib.contextmanager
def teacher_served(job: Job, is_stopped: Callable[[], bool]) -> Iterator[Recipe]:
    """The job's recipe, whose teacher answers inside the block, or `is_stopped`; as it is for an arm with no teacher of
    ours. Of arms that look for harm it is the run's untrained first policy, on a port that a continued run finds in
    its own recipe.

    Raises BadInput when the port of a run that is continued is in use, SiteError when the teacher ends instead.
    """
    if job.arm.harm not in OWN_TEACHER:
        yield job.recipe
        return
    port, log = _port(job), job.log.with_name(f"{job.file}-teacher.log")
    told = job.recipe
    command = [sys.executable, "-m", "composer_prime.cli.main", "replay", "teacher", told.model.name]
    command += ["--port", str(port), "--seed", str(told.run.seed), "--device", told.site.device]
    command += ["--max-model-len", str(told.seq_len + 1), *(["--permuted"] if job.arm.harm == "permuted" else [])]
    teacher = Child("teacher", command, log, env=QUIET_ENV)
    try:
        while not is_stopped() and not is_healthy(port):
            if teacher.poll() is not None:
                raise SiteError(f"its teacher ended, see {log}: {' / '.join(teacher.tail()[-3:])}")
            time.sleep(_POLL_S)
        data = told.to_data()
        data["replay"]["teachers"][0]["base_url"] = f"http://{HOST}:{port}"
        yield recipe_from_data(data)
    finally:
        teacher.kill()


def _port(job: Job) -> int:
    if not job.run.recipe.exists():
        return claim_port(None, set())
    held = recipe_from_data(json.loads(job.run.recipe.read_text(encoding="utf-8")))
    port = int(held.replay.teachers[0].base_url.rpartition(":")[2])
    if not is_free(port):
        raise BadInput(
            f"port {port} on {HOST}, where the run in {job.run.root} has its teacher, is in use: stop what listens "
            "there, or delete that folder to begin the run anew"
        )
    return port


def is_healthy(port: int) -> bool:
    """Whether a server on this machine answers /health with success."""
    try:
        return httpx.get(f"http://{HOST}:{port}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def start_of(job: Job) -> Row:
    """The row of the run that this one goes on from: the best of its seed at the first call, which puts its final
    weights, without an outer loop the first site's, where the job's recipe has its model.

    Raises BadInput when a run of the seed has no row.
    """
    rows = {each: each.finished() for each in job.before}
    done = {each.arm.name: (each, row) for each, row in rows.items() if row is not None}
    if missing := [each.label for each, row in rows.items() if row is None]:
        raise BadInput(f"it begins where the best run of its seed ended, and there is no row of {', '.join(missing)}")
    folder = Path(job.recipe.model.name)
    if not folder.exists():
        best, row = max(done.values(), key=lambda each: each[1].held_out)
        with made_whole(folder) as making:
            write_model(_first_model(best), next(_final_policies(best)), making)
            (making / RESTARTED_FROM).write_text(row.arm, encoding="utf-8")
    return done[(folder / RESTARTED_FROM).read_text(encoding="utf-8")][1]


def _train(job: Job, recipe: Recipe, is_stopped: Callable[[], bool]) -> bool:
    """Whether the run came to its end; a folder that is there is continued."""
    job.recipe_file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(job.recipe_file, to_toml(recipe.to_data()))
    resume = ["--resume"] if job.run.root.exists() else []
    command = [sys.executable, "-m", "composer_prime.cli.main", "run", str(job.recipe_file), *resume]
    child = Child("run", command, job.log, env=QUIET_ENV)
    asked = False
    try:
        while (code := child.poll()) is None:
            if is_stopped() and not asked:
                child.terminate()
                asked = True
            time.sleep(_POLL_S)
    finally:
        child.kill()
    if asked or code == INTERRUPTED_EXIT:
        return False
    said = child.tail()
    if code == BadInput.exit_code:
        raise BadInput(said[-1].removeprefix("composer-prime: ") if said else f"no message, see {job.log}")
    if code:
        raise SiteError(f"the run ended with {code}, see {job.log}: {' / '.join(said[-3:])}")
    return True


def _judge(job: Job, policy: Mapping[str, Tensor]) -> float:
    return held_out_reward(job.judged_by, policy, prompts=job.prompts, temperature=GREEDY)


def _untrained(job: Job) -> Mapping[str, Tensor]:
    return _trained_part(weights(load_policy(_first_model(job))), job)


def _final_policies(job: Job) -> Iterator[Mapping[str, Tensor]]:
    """The run's masters; without an outer loop each site's own last weights."""
    if (uri := run_uri(job.recipe)) is not None:
        with contextlib.closing(open_store(uri)) as store:
            yield final_weights(store)
        return
    from safetensors.torch import load_file

    for name in job.recipe.site_names:
        paths = job.run.site(name)
        if not (versions := numbered_steps(paths.broadcasts)):
            raise BadInput(f"{paths.broadcasts} holds no weights of {job.label}: delete {job.row}, to make it again")
        yield _trained_part(load_file(paths.broadcast(versions[-1]) / "model.safetensors"), job)


def _trained_part(values: Mapping[str, Tensor], job: Job) -> Mapping[str, Tensor]:
    """Parameters without the lasting buffers, which training doesn't move."""
    model = load_policy(_first_model(job))
    return {name: values[name] for name, _ in model.named_parameters()}


def _first_model(job: Job) -> Path:
    recipe = job.recipe
    return resolve_model(recipe.model.name, recipe.run.seed, models_cache(), device=recipe.site.device)
