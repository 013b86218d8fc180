"""Watches a launch until all its sites are done, and starts again what was preempted, crashed or hangs.

One turn is: look at the jobs, write down what ended, look at the beats, decide (decisions.py), act. A supervisor
may be killed, and started again anywhere: it holds nothing but since when it has seen something stand.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from composer_prime.errors import BadInput, ExecutorError, StoreError
from composer_prime.executors.base import JobState, Price
from composer_prime.launch.budget import Limits, check_bounded, spent_usd
from composer_prime.launch.decisions import Action, Pulse, decide
from composer_prime.launch.fleet import Fleet, Stopped
from composer_prime.launch.plan import LaunchPlan
from composer_prime.launch.records import Attempt, by_site
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Beat

Say = Callable[[str], None]
REFUSAL_PATIENCE_S = 600.0
"""A platform that refuses for so long to show or to end a job isn't asked again: a person must mend that."""


class Pulses:
    """The pulse of each site's present attempt; `observe` reads the bucket."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, tuple[int, Beat | None, bool]] = {}
        """Each site's attempt, its newest beat, and whether it waited then."""
        self.known: dict[str, Pulse] = {}

    def observe(self, site: str, attempt: int, ticks: float) -> None:
        """Look at the newest beat of a site whose attempt is running. ticks: monotonic seconds."""
        beats = [key for key in self._store.list(keys.site_prefix(site)) if keys.is_beat(key)]
        beat = find_record(self._store, Beat, max(beats)) if beats else None
        last_attempt, last, waited = self._seen.get(site, (0, None, False))
        if last_attempt != attempt:
            self._seen[site], self.known[site] = (attempt, beat, False), Pulse(running_since=ticks)
        elif beat is not None and beat != last:
            pulse = self.known[site]
            is_new = last is None or beat.incarnation != last.incarnation
            moved = last is None or is_new or beat.inner_step != last.inner_step
            waits = not moved and self._waits(beat)
            # Its round may have closed only since the last look, and its next step is still to come.
            since = ticks if moved or waits or waited or pulse.stood_since is None else pulse.stood_since
            steps = not is_new and (moved or pulse.has_stepped)
            self._seen[site] = (attempt, beat, waits)
            self.known[site] = replace(pulse, changed_at=ticks, state=beat.state, stood_since=since, has_stepped=steps)

    def _waits(self, beat: Beat) -> bool:
        """Whether an offer of this site is out in a round that nobody has closed."""
        for fragment, version in enumerate(beat.versions):
            offer, commit = keys.offer(fragment, version, beat.site), keys.commit(fragment, version)
            if offer in self._store.list(offer) and commit not in self._store.list(commit):
                return True
        return False


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
        self._price = Price(plan.usd_per_hour, "")
        self._is_first_turn = True
        self._left: dict[str, Action] = {}
        self._said: dict[str, str] = {}
        self._refused_since: dict[str, float] = {}
        self.troubled: dict[str, str] = {}
        """Sites for which the last turn couldn't do what it had to, and why."""

    def check(self) -> None:
        """Learn the dearest price. Raises BadInput for wheels that can't be made, and limits that can't be kept."""
        if self._plan.packages is not None:
            self._plan.packages.wheels()
        sites = {on: site for site, on in self._plan.places.items()}  # the others there are like it
        prices = [self._fleet.price(self._plan, self._fleet.spec(self._plan, site, 1)) for site in sites.values()]
        for on, price in zip(sites, prices, strict=True):
            check_bounded(self._limits, price, on)
        dearest = max(prices, key=lambda price: math.inf if price.usd_per_hour is None else price.usd_per_hour)
        self._price = replace(dearest, overrun_s=max(price.overrun_s for price in prices))

    def run(self, wait: Callable[[], object], until: Callable[[], bool] = lambda: False) -> bool | None:
        """Turn after turn, with `wait()` between them, until nothing is left to do; whether all sites ended rightly.
        None when `until()` held before: the jobs go on.

        A bucket that fails is tried again at the next turn. Raises as `turn`; jobs that run go on then.
        """
        while True:
            try:
                if self.turn():
                    return all(left.do == "done" for left in self._left.values())
            except StoreError as error:
                self._say(f"no answer, trying again: {error}")
            if until():
                return None
            wait()

    def turn(self) -> bool:
        """Look, decide and act once; True when nothing is left to do.

        A site whose platform fails waits for the next turn, and no other waits for it. What a person must mend is
        raised by the first turn, as BadInput; later on it gives up its site, for good. Raises Stopped.
        """
        self._fleet.refuse_stopped()
        self._refused_since = {site: at for site, at in self._refused_since.items() if site in self.troubled}
        self.troubled = {}
        attempts = [self._fleet.settle(each) for each in self._fleet.look(self._plan)]
        for each in attempts:
            self._tell(each)
        newest = {site: mine[-1] for site, mine in by_site(attempts).items() if site in self._open}
        for site, each in newest.items():
            if each.status is not None and each.status.state is JobState.RUNNING:
                self._pulses.observe(site, each.number, self._ticks())
            if each.problem and not each.is_unknown:
                self._trouble(site, each.problem, each, "show")
        actions = decide(
            self._open,
            attempts,
            self._pulses.known,
            self._limits,
            self._price,
            wanted_s=self._plan.timeout_s,
            now=self._fleet.clock(),
            ticks=self._ticks(),
        )
        for site, action in actions.items():
            self._act(site, action, newest.get(site))
        self._is_first_turn = False
        return not self._open

    @property
    def _open(self) -> list[str]:
        """The sites that something may still have to be done for."""
        return [site for site in self._plan.sites if site not in self._left]

    def _act(self, site: str, action: Action, newest: Attempt | None) -> None:
        if action.do == "start":
            self._start(site, action)
        elif action.do in ("done", "give up"):
            self._leave(site, action)
        elif action.do == "end" and newest is not None:
            number = newest.number
            self._say_once(f"{site}--{number}--end", f"{site} attempt {number}: is ended: {action.why}")
            ended = self._fleet.condemn(newest, "hung", action.why)
            if ended.problem:
                self._trouble(site, f"attempt {number} may still run and be billed: {ended.problem}", ended, "end")
        elif action.why:
            self._say_once(site, f"{site}: {action.why}")

    def _start(self, site: str, action: Action) -> None:
        try:
            job = self._fleet.start(self._plan, site, action.attempt, action.timeout_s)
        except Stopped:
            self._fleet.refuse_stopped()
            self._leave(site, Action("give up", "cancelled"))
        except BadInput as error:
            if self._is_first_turn:
                raise
            self._leave(site, Action("give up", f"refused: {error}"))
        except ExecutorError as error:
            self._trouble(site, str(error))
        else:
            self._say(f"{site} attempt {action.attempt}: started as {job.id} ({action.why})")

    def _leave(self, site: str, left: Action) -> None:
        self._left[site] = left
        if left.do == "give up":
            self._say(f"{site}: given up: {left.why}")

    def _trouble(self, site: str, problem: str, attempt: Attempt | None = None, what: str = "") -> None:
        """Note what kept this turn from what it had to do for a site, to be tried again at the next one. An attempt
        that its platform refuses to show or to end for REFUSAL_PATIENCE_S, turn after turn, gives its site up."""
        self.troubled[site] = problem
        self._say_once(site, f"{site}: no answer, trying again: {problem}")
        if attempt is None or not isinstance(attempt.error, BadInput):
            return
        if self._ticks() - self._refused_since.setdefault(site, self._ticks()) >= REFUSAL_PATIENCE_S:
            refused = f"refused for {REFUSAL_PATIENCE_S / 60:.0f} minutes to {what} attempt {attempt.number}"
            self._leave(site, Action("give up", f"its platform has {refused}, which may still run and be billed"))

    def _tell(self, attempt: Attempt) -> None:
        ended, line = attempt.ended, attempt.state
        if ended is not None:
            code, usd = ended.exit_code, spent_usd(attempt, ended.ended_at)
            line += ("" if code is None else f", exit code {code}") + f" after {ended.seconds:.0f} s"
            line += f", ${usd:.2f}" if usd else ""
        if attempt.site in self._plan.sites and (ended is not None or attempt.status is not None):
            self._say_once(f"{attempt.site}--{attempt.number}", f"{attempt.site} attempt {attempt.number}: {line}")

    def _say_once(self, about: str, line: str) -> None:
        if self._said.get(about) != line:
            self._said[about] = line
            self._say(line)
