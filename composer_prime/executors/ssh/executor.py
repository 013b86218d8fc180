"""A site on a machine of one's own over ssh: nothing needs to be installed there but Python, no port opened but sshd's.

`--on ssh:[user@]address[:port]` is one host, which a launch gives one site. A job is a folder there, and a process
detached from the connection that started it.
"""

import asyncio
import shlex
from collections.abc import Iterator

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import (
    Job,
    JobSpec,
    JobStatus,
    Price,
    check_name,
    check_names,
    hides_secrets,
    refuse_placement,
)
from composer_prime.executors.local import shim
from composer_prime.executors.local.executor import keeper_request, status_of
from composer_prime.executors.ssh.connection import WORKDIR, Host, HostDown, Patience
from composer_prime.executors.ssh.logs import read_lines


class SshExecutor:
    """One host as a platform.

    host      [user@]address[:port]; BadInput for what isn't
    grace_s   seconds that a job has to end by itself after it was told to, before it is killed
    """

    platform = "ssh"

    def __init__(self, host: str, *, grace_s: float = shim.GRACE_S, patience: Patience | None = None) -> None:
        self._host = Host(host, patience or Patience())
        self._grace_s = grace_s

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what no host can run."""
        check_names(spec)
        refuse_placement(spec, "a host over ssh")

    def log_in(self) -> None:
        """Nothing: keys are asked for by the host."""

    def credentials(self) -> dict[str, str]:
        raise BadInput(
            f"jobs on ssh:{self._host.name} can't be watched from another machine, since ssh's keys stay here: launch "
            "them without --supervise-on, on a machine that stays up"
        )

    def describe(self, spec: JobSpec) -> str:
        """The host, the command, and what it is given."""
        given = sorted({**spec.cache_env, **spec.env}.items())
        return "\n".join(
            [
                f"one process by {self._host.ssh_command}, in {WORKDIR} there: {shlex.join(spec.command)}",
                *(f"env {name}={spec.secrets.redact(value)}" for name, value in given),
                *([f"secrets {', '.join(spec.secrets)}"] if len(spec.secrets) else []),
                f"time-out {spec.timeout_s} s",
            ]
        )

    def price(self, spec: JobSpec) -> Price:
        """Nothing beyond what the machine costs anyway."""
        return Price(0.0, "one's own host", round(self._grace_s))

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job."""
        self.check(spec)
        place = f"{spec.run}/{spec.site}/{spec.attempt}"
        request = {**keeper_request(spec, self._grace_s), "caches": dict(spec.caches)}
        try:
            asyncio.run(self._host.call("start", job=place, request=request))
        except HostDown as error:
            raise ExecutorError(f"{error}: job {spec.name} may run there: submit again to know") from None
        return Job(self.platform, f"{place}@{self._host.name}", spec.run, spec.site, spec.attempt)

    def account(self) -> str:
        return "the host's"  # there they are, whoever looks

    def find(self, run: str) -> list[Job]:
        """The run's jobs there. Raises ExecutorError when the host doesn't answer."""
        check_name("run", run)
        places = (place.split("/") for place in asyncio.run(self._host.call("find", run=run)))
        jobs = [
            Job(self.platform, f"{run}/{site}/{attempt}@{self._host.name}", run, site, int(attempt))
            for site, attempt in places
        ]
        return sorted(jobs, key=lambda job: (job.site, job.attempt))

    def poll(self, job: Job) -> JobStatus:
        """What the job's folder and processes say."""
        return status_of(asyncio.run(self._host.call("status", job=self._place_of(job))))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The log's lines; a lost connection is made again and goes on after the last whole line."""
        batches = read_lines(self._host, self._place_of(job), follow=follow)
        with asyncio.Runner() as runner:
            try:
                while (lines := runner.run(anext(batches, None))) is not None:  # pyright: ignore[reportArgumentType]
                    yield from lines
            finally:
                runner.run(batches.aclose())

    def cancel(self, job: Job) -> JobStatus:
        """Have the job's processes ended, all of them, and wait until they are."""
        place = self._place_of(job)
        try:
            longer_s = max(self._grace_s, shim.GRACE_S) + shim.CONFIRM_S  # a job's own grace is its submitter's
            return status_of(asyncio.run(self._host.call("cancel", longer_s=longer_s, job=place)))
        except HostDown as error:
            raise ExecutorError(f"{error}: job {job.id} may still run there") from None

    def close(self) -> None:
        """Nothing: each call has a connection of its own."""

    def _place_of(self, job: Job) -> str:
        """The job's folder there below that of all jobs. Raises JobUnknown for an id that is none of the job."""
        place, _, host = job.id.rpartition("/")
        attempt, _, host = host.partition("@")
        place = f"{place}/{attempt}"
        # A record in a bucket may say anything: nothing but this job's own folder may come of it.
        if place != f"{check_name('run', job.run)}/{check_name('site', job.site)}/{job.attempt}":
            raise JobUnknown(f"{job.id!r} is no id of attempt {job.attempt} of {job.run} {job.site}")
        if host != self._host.name:
            raise JobUnknown(f"job {job.id} is on the host {host}, and not on {self._host.name}")
        return place
