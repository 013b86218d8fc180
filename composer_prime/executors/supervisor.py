"""Watches a launch until all its sites are done, and starts again what was preempted, crashed or hangs.

One turn is: look at the jobs, write down what ended, look at the beats, decide (supervising.py), act. A supervisor
holds nothing that isn't in the bucket; it may be killed, and started again anywhere.
"""

import time
from collections.abc import Callable

from composer_prime.errors import ExecutorError, StoreError
from composer_prime.executors.base import JobState
from composer_prime.executors.budget import Limits
from composer_prime.executors.fleet import NOT_SUBMITTED, Fleet, Seen, Stopped
from composer_prime.executors.launching import LaunchPlan, spec_of
from composer_prime.executors.records import Attempt
from composer_prime.executors.supervising import Action, Kill, Leave, Pulse, Start, decide
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat

Say = Callable[[str], None]


class Supervisor:
    """One launch command's watch over its sites.

    say     gets one line for whatever changes
    ticks   monotonic seconds, for the watchdog
    """

    def __init__(
        self, fleet: Fleet, plan: LaunchPlan, limits: Limits, *, say: Say, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._limits = limits
        self._say = say
        self._ticks = ticks
        self._pulses = Pulses(fleet.book.store)
        self._left: dict[str, Leave] = {}
        self._gone: list[Attempt] = []
        self._said: dict[tuple[str, int], str] = {}
        self._usd_per_hour = plan.usd_per_hour

    def check(self) -> None:
        """Raise BadInput for what the platform would refuse, and learn the price: before anything is written."""
        site = self._plan.sites[0]
        intent = self._fleet.intent(self._plan, site, 1, self._plan.timeout_s, "")
        self._fleet.executor(self._plan.on).check(spec_of(intent, self._fleet.book.name, self._plan.secrets))
        self._usd_per_hour = intent.usd_per_hour

    def run(self, wait: Callable[[], object], until: Callable[[], bool] = lambda: False) -> bool | None:
        """Turn after turn, with `wait()` between them, until nothing is left to do; whether all sites ended rightly.

        None when `until()` held before: the jobs go on.

        A platform or a bucket that fails is tried again at the next turn. Raises Stopped when somebody stopped the
        launch, and BadInput for what a person must mend; jobs that run go on then.
        """
        while True:
            try:
                if self.turn():
                    return all(left.ok for left in self._left.values())
            except (ExecutorError, StoreError) as error:
                self._say(f"no answer, trying again: {error}")
            if until():
                return None
            wait()

    def turn(self) -> bool:
        """Look, decide and act once; True when nothing is left to do."""
        stop = self._fleet.book.stopped()
        if stop is not None:
            raise Stopped(f"launch {self._fleet.book.name} was stopped on {stop.by}: nothing of it is started any more")
        seen = {(each.attempt.site, each.attempt.number): self._tell(each) for each in self._look()}
        statuses = {place: each.status for place, each in seen.items() if each.status is not None}
        ticks = self._ticks()
        for (site, number), status in statuses.items():
            if status.state is JobState.RUNNING:
                self._pulses.observe(site, number, ticks)
        actions = decide(
            self._plan.sites,
            [each.attempt for each in seen.values()],
            statuses,
            self._pulses.known,
            self._limits,
            wanted_s=self._plan.timeout_s,
            usd_per_hour=self._usd_per_hour,
            now=time.time(),
            ticks=ticks,
        )
        for action in actions:
            self._act(action, seen)
        return all(isinstance(action, Leave) for action in actions)

    def _look(self) -> list[Seen]:
        """Every attempt of our sites; what ended is written down, what was never submitted is submitted."""
        found = []
        for seen in self._fleet.look(self._plan.sites):
            if seen.problem == NOT_SUBMITTED:
                self._fleet.submit(seen.attempt.intent, self._plan.secrets)
            elif _was_killed(seen.attempt) and seen.attempt not in self._gone:
                self._fleet.confirm_killed(seen.attempt)
                self._gone.append(seen.attempt)
            found.append(self._fleet.settle(seen))
        return found

    def _tell(self, seen: Seen) -> Seen:
        attempt = seen.attempt
        line = seen.state if attempt.ended is None else _end_words(seen)
        if self._said.get((attempt.site, attempt.number)) != line and not (seen.problem and seen.status is None):
            self._said[attempt.site, attempt.number] = line
            self._say(f"{attempt.site} attempt {attempt.number}: {line}")
        return seen

    def _act(self, action: Action, seen: dict[tuple[str, int], Seen]) -> None:
        if isinstance(action, Start):
            job = self._fleet.start(self._plan, action.site, action.attempt, action.timeout_s)
            self._say(f"{action.site} attempt {action.attempt}: started as {job.id} ({action.why})")
        elif isinstance(action, Kill):
            hanging = seen[action.site, action.attempt]
            assert hanging.status is not None
            self._say(f"{action.site} attempt {action.attempt}: hangs: {action.why}")
            self._fleet.kill(hanging.attempt, hanging.status, action.why)
        elif isinstance(action, Leave) and self._left.get(action.site) != action:
            self._left[action.site] = action
            if not action.ok:
                self._say(f"{action.site}: given up: {action.why}")


class Pulses:
    """The beats of sites as this process has seen them change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._attempts: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self.known: dict[str, Pulse] = {}

    def observe(self, site: str, attempt: int, ticks: float) -> None:
        """Look at the newest beat of a site whose attempt is running."""
        digest, state = self._read(site)
        if self._attempts.get(site) != attempt:
            self._attempts[site], self._digests[site] = attempt, digest
            self.known[site] = Pulse(running_since=ticks)
        elif digest != self._digests[site]:
            self._digests[site] = digest
            self.known[site] = Pulse(self.known[site].running_since, ticks, state)

    def _read(self, site: str) -> tuple[str, str]:
        beats = [key for key in self._store.list(keys.site_prefix(site)) if keys.is_beat(key)]
        if not beats:
            return "", ""
        beat = find_record(self._store, Beat, max(beats))
        return ("", "") if beat is None else (sha256_hex(beat.to_bytes()), beat.state)


def _was_killed(attempt: Attempt) -> bool:
    return attempt.ended is not None and attempt.ended.state == "hung"


def _end_words(seen: Seen) -> str:
    ended = seen.attempt.ended
    assert ended is not None
    code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
    cost = "" if not ended.usd else f", ${ended.usd:.2f}"
    return f"{ended.state}{code} after {ended.seconds:.0f} s{cost}"
