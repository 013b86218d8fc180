"""Watches a launch until all its sites are done, and starts again what was preempted, crashed or hangs.

One turn is: look at the jobs, write down what ended, look at the beats, decide (decisions.py), act. A supervisor
holds nothing that isn't in the bucket; it may be killed, and started again anywhere.
"""

import time
from collections.abc import Callable

from composer_prime.errors import BadInput, ExecutorError, StoreError
from composer_prime.executors.base import JobState
from composer_prime.launch.budget import Limits, check_bounded
from composer_prime.launch.decisions import Action, Kill, Leave, Place, Standing, Start, Wait, decide
from composer_prime.launch.fleet import NOT_SUBMITTED, Fleet, Seen, SiteStopped, Stopped
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.pulses import Pulses
from composer_prime.launch.records import NOT_RUN, Attempt, JobRecord

Say = Callable[[str], None]
REFUSAL_PATIENCE_S = 600.0
"""A platform that refuses for so long to show or to end a job isn't asked again: a person must mend that."""


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
        self._refused: dict[str, Leave] = {}
        self._refused_since: dict[tuple[str, Place], float] = {}
        self._mended: frozenset[Place] | None = None
        self._said: dict[str, str] = {}
        self._usd_per_hour = plan.usd_per_hour
        self._overrun_s = 0
        self.troubled: dict[str, str] = {}
        """Sites for which the last turn couldn't do what it had to, and why."""

    def check(self) -> None:
        """Raise BadInput for what a platform would refuse, and learn the dearest price: before anything is written."""
        prices = []
        for site in self._plan.one_of_each:
            place = self._plan.places[site]
            spec = self._fleet.spec(self._plan, site, 1, self._plan.timeout_s)
            self._fleet.executor(place.on).check(spec)
            if place.packages is not None:
                place.packages.wheels()
            price = self._fleet.price(self._plan, spec)
            check_bounded(self._limits, price, place.on)
            prices.append(price.usd_per_hour)
            self._overrun_s = max(self._overrun_s, price.overrun_s)
        self._usd_per_hour = None if None in prices else max(price for price in prices if price is not None)

    def run(self, wait: Callable[[], object], until: Callable[[], bool] = lambda: False) -> bool | None:
        """Turn after turn, with `wait()` between them, until nothing is left to do; whether all sites ended rightly.

        None when `until()` held before: the jobs go on.

        A bucket that fails is tried again at the next turn. Raises Stopped when somebody stopped the launch, and
        BadInput as `turn` does; jobs that run go on then.
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
        """Look, decide and act once; True when nothing is left to do.

        A site whose platform fails waits for the next turn, and no other waits for it. What a person must mend is
        raised by the first turn, as BadInput; later on only the site that it concerns is given up.
        """
        stop = self._fleet.book.stopped()
        if stop is not None:
            raise Stopped(f"launch {self._fleet.book.name} was stopped on {stop.by}: nothing of it is started any more")
        self.troubled.clear()
        self._submit_what_was_only_meant()
        seen = {each.place: self._tell(self._fleet.settle(each)) for each in self._fleet.look()}
        for site in self._plan.sites:
            self._note_look(site, _newest(site, seen))
        mended = self._mended
        if mended is None:
            mended = frozenset(place for place, each in seen.items() if each.state in NOT_RUN)
        actions = [self._unless_refused(action, seen) for action in self._decide(seen, mended)]
        for action in actions:
            self._act(action, seen)
        self._mended = mended
        return not self.troubled and all(isinstance(action, Leave) for action in actions)

    def _submit_what_was_only_meant(self) -> None:
        """The jobs of records whose launcher was killed before it wrote down that its platform has them."""
        attempts = self._fleet.book.attempts()
        meant = [each for each in attempts if not (each.started or each.ended or each.verdict)]
        for attempt in meant:  # all of them, before one is submitted
            self._do_about(attempt, self._fleet.confirm)
        for attempt in meant:
            if not self._fleet.is_hidden(attempt):
                self._do_about(attempt, self._fleet.submit)

    def _do_about(self, attempt: Attempt, act: Callable[[LaunchPlan, JobRecord], object]) -> None:
        if attempt.site not in self._plan.sites or attempt.site in self._refused:
            return
        error = self._attempted(attempt.site, lambda: act(self._plan, attempt.record))
        # An end says that the platform refused it, for every launcher: the next attempt may be another.
        if error is not None and self._fleet.book.attempt(attempt.site, attempt.number).ended is None:
            self._refuse(attempt.site, error)

    def _decide(self, seen: dict[Place, Seen], mended: frozenset[Place]) -> list[Action]:
        statuses = {place: each.status for place, each in seen.items() if each.status is not None}
        ticks = self._ticks()
        for (site, number), status in statuses.items():
            if status.half_submitted:
                self._do_about(seen[site, number].attempt, self._fleet.submit)
            if status.state is JobState.RUNNING and site in self._plan.sites:
                self._pulses.observe(site, number, ticks)
        unknown = frozenset(place for place, each in seen.items() if each.unknown)
        return decide(
            self._plan.sites,
            [each.attempt for each in seen.values()],
            Standing(statuses, unknown, self._fleet.book.stopped_sites(), mended),
            self._pulses.known,
            self._limits,
            wanted_s=self._plan.timeout_s,
            usd_per_hour=self._usd_per_hour,
            overrun_s=self._overrun_s,
            now=self._fleet.clock(),
            ticks=ticks,
        )

    def _note_look(self, site: str, newest: Seen | None) -> None:
        """Say what keeps a site's newest attempt from being seen, and remember since when it is a refusal."""
        if newest is None:
            return
        self._note_refusal("show", newest.place, newest.refused)
        if newest.problem not in ("", NOT_SUBMITTED) and not newest.unknown:
            self._say_once(site, f"{site}: no answer, trying again: {newest.problem}")

    def _note_refusal(self, what: str, place: Place, is_refused: bool) -> None:
        if is_refused:
            self._refused_since.setdefault((what, place), self._ticks())
        else:
            self._refused_since.pop((what, place), None)

    def _given_up(self, what: str, place: Place) -> Leave | None:
        """What follows where a platform has refused for REFUSAL_PATIENCE_S, without another answer."""
        since = self._refused_since.get((what, place))
        if since is None or self._ticks() - since < REFUSAL_PATIENCE_S:
            return None
        site, attempt = place
        minutes = f"{REFUSAL_PATIENCE_S / 60:.0f} minutes"
        why = f"its platform has refused for {minutes} to {what} attempt {attempt}, which may still run and be billed"
        return Leave(site, False, why)

    def _unless_refused(self, action: Action, seen: dict[Place, Seen]) -> Action:
        """What is decided, unless it needs what was refused here; another launcher's start is watched."""
        newest = _newest(action.site, seen)
        waiting = newest if isinstance(action, Wait) else None
        if isinstance(action, Start) or (waiting is not None and waiting.problem == NOT_SUBMITTED):
            return self._refused.get(action.site, action)
        if isinstance(action, Kill):
            return self._given_up("end", (action.site, action.attempt)) or action
        return (self._given_up("show", waiting.place) if waiting is not None else None) or action

    def _act(self, action: Action, seen: dict[Place, Seen]) -> None:
        site = action.site
        if isinstance(action, Start):
            error = self._attempted(site, lambda: self._start(action))
            if error is not None:
                self._refuse(site, error)
        elif isinstance(action, Kill):
            self._say_once(f"{site}--{action.attempt}--end", f"{site} attempt {action.attempt}: is ended: {action.why}")
            ended, problem = self._fleet.condemn(seen[site, action.attempt], "hung", action.why)
            self._note_refusal("end", ended.place, ended.refused)
            if problem:
                self._trouble(site, f"attempt {action.attempt} may still run and be billed: {problem}")
        elif isinstance(action, Wait) and action.why:
            self._say_once(site, f"{site}: {action.why}")
        elif isinstance(action, Leave) and self._left.get(site) != action:
            self._left[site] = action
            if not action.ok:
                self._say(f"{site}: given up: {action.why}")

    def _start(self, action: Start) -> None:
        job = self._fleet.start(self._plan, action.site, action.attempt, action.timeout_s)
        self._say(f"{action.site} attempt {action.attempt}: started as {job.id} ({action.why})")

    def _attempted(self, site: str, act: Callable[[], object]) -> BadInput | None:
        """Do something for one site; what a person must mend of it. What its platform couldn't do is trouble."""
        try:
            act()
        except Stopped:
            raise
        except SiteStopped:
            return None  # the next look finds that
        except BadInput as error:
            return error
        except ExecutorError as error:
            self._trouble(site, str(error))
        return None

    def _trouble(self, site: str, problem: str) -> None:
        self.troubled[site] = problem
        self._say_once(site, f"{site}: no answer, trying again: {problem}")

    def _refuse(self, site: str, error: BadInput) -> None:
        if self._mended is None:
            raise error
        self._refused[site] = Leave(site, False, f"refused: {error}")
        self._act(self._refused[site], {})

    def _tell(self, seen: Seen) -> Seen:
        attempt = seen.attempt
        line = seen.state if attempt.ended is None else _end_words(seen)
        if attempt.site in self._plan.sites and (attempt.ended is not None or seen.status is not None):
            self._say_once(f"{attempt.site}--{attempt.number}", f"{attempt.site} attempt {attempt.number}: {line}")
        return seen

    def _say_once(self, about: str, line: str) -> None:
        if self._said.get(about) != line:
            self._said[about] = line
            self._say(line)


def _newest(site: str, seen: dict[Place, Seen]) -> Seen | None:
    """A site's newest attempt."""
    return max((each for each in seen.values() if each.attempt.site == site), key=_number, default=None)


def _number(seen: Seen) -> int:
    return seen.attempt.number


def _end_words(seen: Seen) -> str:
    ended = seen.attempt.ended
    assert ended is not None
    code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
    cost = "" if not ended.usd else f", ${ended.usd:.2f}"
    return f"{ended.state}{code} after {ended.seconds:.0f} s{cost}"
