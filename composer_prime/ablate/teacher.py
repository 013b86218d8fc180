"""The teacher of arms that look for harm: the run's untrained first policy, served by us as long as the run lasts.

It is `composer-prime replay teacher` as a process, on a port that a continued run finds in its own recipe.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator

import httpx

from composer_prime.ablate.plan import Job
from composer_prime.config.ablate import OWN_TEACHER
from composer_prime.config.load import recipe_from_data
from composer_prime.config.recipe import Recipe
from composer_prime.errors import BadInput, SiteError
from composer_prime.sites.embedded.ports import HOST, claim_port, is_free
from composer_prime.sites.embedded.processes import QUIET_ENV, Child

_POLL_S = 0.2


@contextlib.contextmanager
def teacher_served(job: Job, is_stopped: Callable[[], bool]) -> Iterator[Recipe]:
    """The job's recipe, whose teacher answers inside the block, or `is_stopped`; as it is for an arm with no teacher of
    ours.

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
