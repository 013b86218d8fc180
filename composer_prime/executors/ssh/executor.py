"""Sites on one's own machines over ssh: nothing needs to be installed there but Python, no port opened but sshd's.

A job is a folder on its host, and a process detached from the connection that started it. Which host has a job is
written down, create-once, on a host that its name alone tells, so that every launcher finds the same one.
"""

import asyncio
import logging
import shlex
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.base import Job, JobSpec, JobStatus, Price, check_name, check_names, hides_secrets
from composer_prime.executors.local import shim
from composer_prime.executors.local.executor import status_of
from composer_prime.executors.ssh.hosts import Host, by_preference, choose, fitting, read_hosts
from composer_prime.executors.ssh.link import HostDown, Link, Patience
from composer_prime.executors.ssh.logs import read_lines
from composer_prime.executors.ssh.names import written_out

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class SshExecutor:
    """The hosts of a file as a platform. Synchronous outside; its connections live in a thread of its own.

    grace_s   seconds that a job has to end by itself after it was told to, before it is killed
    """

    platform = "ssh"

    def __init__(self, hosts_file: Path, *, grace_s: float = shim.GRACE_S, patience: Patience | None = None) -> None:
        """Read the hosts. Raises BadInput for a file that is wrong; connects to nobody."""
        self._begin(read_hosts(hosts_file), str(hosts_file), grace_s, patience or Patience())

    @classmethod
    def of_record(
        cls, hosts: Mapping[str, Host], bucket: str, *, grace_s: float = shim.GRACE_S, patience: Patience | None = None
    ) -> Self:
        """For jobs that were started by another machine, on hosts as `bucket` records them. It starts none."""
        executor = cls.__new__(cls)
        executor._begin(dict(hosts), f"the record of hosts in {bucket}", grace_s, patience or Patience(), bucket)
        return executor

    def _begin(self, hosts: dict[str, Host], file: str, grace_s: float, patience: Patience, bucket: str = "") -> None:
        self._file = file
        self._bucket = bucket
        self._hosts = hosts
        self._grace_s = grace_s
        link = Link if not bucket else partial(Link.of_record, bucket)
        self._links = {name: link(name, host, patience) for name, host in hosts.items()}
        self._placing = asyncio.Lock()
        self._loop = _LoopThread()

    def hosts_elsewhere(self) -> dict[str, Host]:
        """The hosts as another machine reaches them, for a record in the bucket."""
        return {name: written_out(name, host) for name, host in self._hosts.items()}

    @hides_secrets
    def check(self, spec: JobSpec) -> None:
        """Refuse what no host can run."""
        check_names(spec)
        if self._bucket:
            raise BadInput(
                f"{self._file} starts no jobs, since hosts' env isn't in it: give the hosts file by --on ssh:FILE"
            )
        fitting(self._hosts, spec.resources, self._file)

    def describe(self, spec: JobSpec) -> str:
        """The hosts that could take it, the command, and what it is given."""
        able = fitting(self._hosts, spec.resources, self._file)
        lines = [f"one process over ssh: {shlex.join(spec.command)}"]
        lines.append("on the one of these with the smallest share of its slots taken, or with the site's files:")
        lines += [f"  {name}: {host.ssh_command()} ({_offer(host)})" for name, host in able.items()]
        given = sorted({**spec.cache_env, **spec.env}.items())
        lines += [f"env {name}={spec.secrets.redact(value)}" for name, value in given]
        lines += [f"secrets {', '.join(spec.secrets)}"] if len(spec.secrets) else []
        return "\n".join([*lines, f"time-out {spec.timeout_s} s"])

    def price(self, spec: JobSpec) -> Price:
        """Nothing beyond what the machines cost anyway."""
        return Price(0.0, f"one's own hosts ({self._file})", round(self._grace_s))

    @hides_secrets
    def submit(self, spec: JobSpec) -> Job:
        """Start the job on its host, where it waits while all slots are taken."""
        self.check(spec)
        return self._loop.run(self._submit(spec))

    def account(self) -> str:
        return "the hosts'"  # there they are, whoever looks

    def find(self, run: str) -> list[Job]:
        """The run's jobs on all hosts. Raises ExecutorError, naming them, when some hosts don't answer."""
        check_name("run", run)
        return self._loop.run(self._find(run))

    def poll(self, job: Job) -> JobStatus:
        """What the job's folder and processes say."""
        link, place = self._place_of(job)
        return status_of(self._loop.run(link.call("status", job=place)))

    def logs(self, job: Job, *, follow: bool = False) -> Iterator[str]:
        """The log's lines; a lost connection is made again and goes on after the last whole line."""
        link, place = self._place_of(job)
        batches = read_lines(link, place, follow=follow)
        try:
            while (lines := self._loop.run(_next(batches))) is not None:
                yield from lines
        finally:
            if self._loop.is_running():
                self._loop.run(batches.aclose())

    def cancel(self, job: Job) -> JobStatus:
        """Have the job's processes ended, all of them, and wait until they are."""
        link, place = self._place_of(job)
        try:
            longer_s = max(self._grace_s, shim.GRACE_S) + shim.CONFIRM_S  # a job's own grace is its submitter's
            return status_of(self._loop.run(link.call("cancel", longer_s=longer_s, job=place)))
        except HostDown as error:
            raise ExecutorError(f"{error}: job {job.id} may still run there") from None

    def close(self) -> None:
        """Close the connections."""
        self._loop.close(self._links.values())

    def _place_of(self, job: Job) -> tuple[Link, str]:
        """The way to a job's host, and the job's folder there below that of all jobs. Raises JobUnknown for an id that
        is none of the job, ExecutorError for a host that the file doesn't name."""
        place, _, host = job.id.rpartition("@")
        # A record in a bucket may say anything: nothing but this job's own folder may come of it.
        if place != f"{check_name('run', job.run)}/{check_name('site', job.site)}/{job.attempt}":
            raise JobUnknown(f"{job.id!r} is no id of attempt {job.attempt} of {job.run} {job.site}")
        if host not in self._links:
            # Not unknown: it may well run there, and must not be taken for lost.
            raise ExecutorError(
                f"job {job.id} is on the host {host}, which {self._file} doesn't name: "
                + ("" if self._bucket else f"add [hosts.{host}] there, or ")
                + "give the file that has it as --on ssh:FILE"
            )
        return self._links[host], place

    async def _submit(self, spec: JobSpec) -> Job:
        place = f"{spec.run}/{spec.site}/{spec.attempt}"
        # One at a time, so that two jobs of one launcher don't both see the same slot free.
        async with self._placing:
            host = await self._host_of(spec, place)
            try:
                await self._links[host].call("start", job=place, **self._order(spec, self._hosts[host]))
            except HostDown as error:
                raise ExecutorError(
                    f"{error}: job {spec.name} belongs there and may run: submit again to know"
                ) from None
        return Job(self.platform, f"{place}@{host}", spec.run, spec.site, spec.attempt)

    async def _host_of(self, spec: JobSpec, place: str) -> str:
        """The host that the job belongs to, by the record on one host: the first that was written counts."""
        recorder = self._links[by_preference(self._hosts, spec.name)[0]]
        try:
            host = await recorder.call("placed", job=place)
            if host is None:
                host = await recorder.call("place", job=place, host=await self._choose(spec, place))
        except HostDown as error:
            raise ExecutorError(
                f"{error}: it has the record of where job {spec.name} runs, if it does: wait for it, or take it out "
                f"of {self._file}"
            ) from None
        if host not in self._hosts:
            raise ExecutorError(
                f"job {spec.name} was placed on the host {host}, which {self._file} doesn't name: add it again"
            )
        return host

    async def _choose(self, spec: JobSpec, place: str) -> str:
        """A host that has the job already, by another hosts file say; else the one with most room."""
        seen, down = await self._ask_all("look", job=place)
        for name, error in down.items():
            log.warning("host=%s left out for job=%s: %s", name, spec.name, error)
        holders = [name for name, answer in seen.items() if answer["has"]]
        if holders:
            return holders[0]
        able = fitting(self._hosts, spec.resources, self._file)
        busy = {name: answer["unfinished"] for name, answer in seen.items() if name in able}
        if not busy:
            raise ExecutorError("; ".join(str(down[name]) for name in able))
        return choose(able, busy, spec, [name for name, answer in seen.items() if answer["had_site"]])

    def _order(self, spec: JobSpec, host: Host) -> dict[str, Any]:
        """What a host needs to know to start a job. Goes by standard input alone, since it holds the secrets."""
        request = {
            "command": list(spec.command),
            "env": {**host.env, **spec.env},
            "defaults": spec.cache_env,
            "secrets": spec.secrets.reveal(),
            "timeout_s": spec.timeout_s,
            "grace_s": self._grace_s,
            "labels": spec.labels,
            "caches": dict(spec.caches),
        }
        return {"slots": host.slots, "gpus_per_slot": host.gpus_per_slot, "request": request}

    async def _find(self, run: str) -> list[Job]:
        seen, down = await self._ask_all("find", run=run)
        if down:
            reasons = "; ".join(map(str, down.values()))
            remedy = (
                "if that is gone for good, give a hosts file without it as --on ssh:FILE"
                if self._bucket
                else f"take what is gone for good out of {self._file}"
            )
            raise ExecutorError(f"{reasons}: jobs of {run} may still run there; {remedy}")
        jobs = []
        for host, places in seen.items():
            for site, attempt in (place.split("/") for place in places):
                jobs.append(Job(self.platform, f"{run}/{site}/{attempt}@{host}", run, site, int(attempt)))
        return sorted(jobs, key=lambda job: (job.site, job.attempt))

    async def _ask_all(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, HostDown]]:
        """(answers by host, the hosts that gave none). Any other failure is raised."""
        asked = (link.call(operation, **arguments) for link in self._links.values())
        answers = dict(zip(self._links, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        for answer in answers.values():
            if isinstance(answer, BaseException) and not isinstance(answer, HostDown):
                raise answer
        down = {name: answer for name, answer in answers.items() if isinstance(answer, HostDown)}
        return {name: answer for name, answer in answers.items() if name not in down}, down


async def _next(batches: AsyncGenerator[list[str], None]) -> list[str] | None:
    return await anext(batches, None)


def _offer(host: Host) -> str:
    gpus = f", {host.gpus_per_slot} {host.gpu or 'GPUs'} each" if host.gpus else ""
    return f"{host.slots} slot{'s' if host.slots > 1 else ''}{gpus}"


class _LoopThread:
    """An event loop in a thread, for callers in other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; an interrupted caller cancels it. Raises ExecutorError once closed."""
        if not self.is_running():
            work.close()
            raise ExecutorError("these connections were closed: open the executor again")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self, links: Iterable[Link]) -> None:
        """Drop the links, end what still runs, and the thread. May be called twice."""
        if not self._thread.is_alive():
            return
        self.run(_end_all(list(links)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all(links: list[Link]) -> None:
    for link in links:
        link.drop()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
