"""Virtual time: every task of every simulated process is a greenlet, and one heap of wake-ups decides who runs next.

Nothing here is parallel and nothing reads a real clock, so a seed gives the same run on any machine. A process may be
paused (its tasks stand still while time goes on) or killed (its tasks end at that instant).
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from heapq import heappop, heappush
from operator import add
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

SHORTEST_S = 1e-6
"""Least time that passes in a wait, so that rounding never makes a loop of waits stand still."""


@dataclass(frozen=True)
class Events:
    """How often what happened in a run. They are apart: the total is their sum.

    num_reads     gets and lists that were answered
    num_writes    puts, creates and deletes that reached the bucket: first and second tries, and lost races, too
    num_failed    requests whose process was told that they failed
    num_faults    of the plan that struck; those that are there from the start are left out
    num_wakeups   waits that ended because their time was up: inner steps, and looks at what may have changed
    """

    num_reads: int = 0
    num_writes: int = 0
    num_failed: int = 0
    num_faults: int = 0
    num_wakeups: int = 0

    def __add__(self, other: "Events") -> "Events":
        return Events(*map(add, astuple(self), astuple(other)))

    @property
    def total(self) -> int:
        return sum(astuple(self))


class Fiber:
    """One task of a process. `token` counts its waits: a wake-up meant for an earlier one does nothing."""

    __slots__ = ("body", "ended", "greenlet", "joiners", "process", "token")

    def __init__(self, process: "Process", body: Callable[[], Any]) -> None:
        self.process = process
        self.body = body
        self.greenlet: Any = None
        self.token = 0
        self.ended = False
        self.joiners: list[tuple[Fiber, int]] = []

    def join(self, timeout: float | None = None) -> None:
        if not self.ended:
            scheduler = self.process.scheduler
            self.joiners.append((scheduler.current, scheduler.current.token))
            self.process.wait(timeout)

    def is_alive(self) -> bool:
        return not self.ended

    def run(self) -> None:
        """The task, to its end; called on a greenlet."""
        process = self.process
        try:
            self.body()
        except GreenletExit:
            pass
        except BaseException as error:
            process.error = process.error or error
        finally:
            self.ended = True
            process.fibers.pop(self, None)
            scheduler = process.scheduler
            for joiner, token in self.joiners:
                scheduler.wake_at(scheduler.time, joiner, token, True)


_IDLE: dict[Any, list[Any]] = {}
"""By the greenlet that they return to: those whose fiber has ended. A new one costs a mapping of memory, most fibers
are short, and one that is dropped before its end keeps the whole world that it last served."""


def _work(fiber: Fiber | None) -> None:
    """What a greenlet does: one fiber after another, of any scheduler."""
    here = getcurrent()
    hub = here.parent
    assert hub is not None
    idle = _IDLE[hub]
    while True:
        assert fiber is not None
        fiber.run()
        fiber.greenlet = fiber = None
        idle.append(here)
        fiber = hub.switch()


class Scheduler:
    """The heap of wake-ups. `run` is called outside of all fibers.

    num_events   of any kind, so far: wake-ups are those that are nothing else
    num_reads, num_writes, num_failed, num_faults   as in `Events`
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.num_events = 0
        self.num_reads = self.num_writes = self.num_failed = self.num_faults = 0
        self.is_stopped = False
        self.current: Any = None
        self._heap: list[tuple[float, int, Fiber | None, int, Any]] = []
        self._number = 0
        self._hub = getcurrent()

    def events(self) -> Events:
        """What happened so far."""
        told = self.num_reads + self.num_writes + self.num_failed + self.num_faults
        wakeups = self.num_events - told
        return Events(self.num_reads, self.num_writes, self.num_failed, self.num_faults, wakeups)

    def call_at(self, at: float, function: Callable[[], Any]) -> None:
        """Call a function, outside of all fibers, at a virtual time."""
        self._number += 1
        heappush(self._heap, (at, self._number, None, 0, function))

    def wake_at(self, at: float, fiber: Fiber, token: int, value: Any) -> None:
        """Let a fiber's wait `token` end with `value` at a virtual time, unless it ended before."""
        self._number += 1
        heappush(self._heap, (at, self._number, fiber, token, value))

    def sleep(self, virtual_s: float) -> Any:
        """Stop the current fiber for so long, or until its present wait is ended; returns what it was ended with."""
        fiber = self.current
        self._number += 1
        at = self.time + (virtual_s if virtual_s > SHORTEST_S else SHORTEST_S)
        heappush(self._heap, (at, self._number, fiber, fiber.token, None))
        return self._hub.switch()

    def suspend(self) -> Any:
        """Stop the current fiber until its present wait is ended; returns what it was ended with."""
        return self._hub.switch()

    def run(self, until: float, most_events: int) -> None:
        """Go on until nothing is left to do, `is_stopped` is set, or a time or a number of events is reached."""
        heap = self._heap
        self._hub = getcurrent()
        idle = _IDLE.setdefault(self._hub, [])
        while heap and not self.is_stopped and heap[0][0] <= until and self.num_events < most_events:
            self.time, _, fiber, token, value = heappop(heap)
            if fiber is None:
                value()
                continue
            process = fiber.process
            if fiber.token != token or fiber.ended or process.is_dead:
                continue
            if process.is_paused:
                process.backlog.append((fiber, token, value))
                continue
            fiber.token = token + 1
            if value is False:
                self.num_events += 1
            self.current = fiber
            if fiber.greenlet is None:
                fiber.greenlet = idle.pop() if idle else greenlet(_work, self._hub)
                fiber.greenlet.switch(fiber)
            else:
                fiber.greenlet.switch(value)
            self.current = None


class Process:
    """A running process of a site: its tasks, its clock, and whether it still lives."""

    def __init__(self, scheduler: Scheduler, name: str, *, skew: float = 1.0, offset_s: float = 0.0) -> None:
        self.scheduler = scheduler
        self.name = name
        self.skew = skew
        self.offset_s = offset_s
        self.is_dead = False
        self.is_paused = False
        self.backlog: list[tuple[Fiber, int, Any]] = []
        self.error: BaseException | None = None
        self.fibers: dict[Fiber, None] = {}
        """Its tasks that have not ended, oldest first."""
        self.collects_from = 0.0
        """When its last collection of garbage began."""

    def now(self) -> float:
        return self.offset_s + self.scheduler.time * self.skew

    def spawn(self, body: Callable[[], Any]) -> Fiber:
        fiber = Fiber(self, body)
        self.fibers[fiber] = None
        self.scheduler.wake_at(self.scheduler.time, fiber, 0, None)
        return fiber

    def sleep(self, virtual_s: float) -> None:
        """Let others run for so long, on nobody's clock; the event that this waits for is counted by the caller."""
        self.scheduler.sleep(virtual_s)

    def wait(self, seconds: float | None) -> bool:
        """Let others run until this wait is ended, or `seconds` of this process's clock have passed; then False."""
        if self.is_dead:
            raise GreenletExit
        scheduler = self.scheduler
        fiber = scheduler.current
        if seconds is not None:
            scheduler.wake_at(scheduler.time + max(seconds / self.skew, SHORTEST_S), fiber, fiber.token, False)
        return bool(scheduler.suspend())

    def kill(self) -> None:
        """All tasks end at once; called outside of all fibers."""
        self.is_dead = True
        for fiber in list(self.fibers):
            if fiber.greenlet is None:
                fiber.ended = True
                continue
            self.scheduler.current = fiber
            fiber.greenlet.throw(GreenletExit)
        self.scheduler.current = None

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        for fiber, token, value in backlog:
            self.scheduler.wake_at(self.scheduler.time, fiber, token, value)


class SimCondition:
    """A reentrant lock with a waiting room, for the fibers of one process."""

    __slots__ = ("_depth", "_owner", "_process", "_queue", "_waiting")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._owner: Fiber | None = None
        self._depth = 0
        self._queue: list[tuple[Fiber, int]] = []
        self._waiting: list[tuple[Fiber, int]] = []

    def __enter__(self) -> bool:
        fiber = self._process.scheduler.current
        if self._owner is not fiber:
            while self._owner is not None:
                self._queue.append((fiber, fiber.token))
                self._process.wait(None)
            self._owner = fiber
        self._depth += 1
        return True

    def __exit__(self, *details: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._queue:
                self._wake([self._queue.pop(0)])

    def wait(self, timeout: float | None = None) -> bool:
        fiber, depth = self._process.scheduler.current, self._depth
        self._depth = 1
        self.__exit__()
        ticket = (fiber, fiber.token)
        self._waiting.append(ticket)
        woken = self._process.wait(timeout)
        if not woken and ticket in self._waiting:  # notified at that very instant: it isn't there any more
            self._waiting.remove(ticket)
        self.__enter__()
        self._depth = depth
        return woken

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._wake(waiting)

    def _wake(self, tickets: list[tuple[Fiber, int]]) -> None:
        scheduler = self._process.scheduler
        for fiber, token in tickets:
            scheduler.wake_at(scheduler.time, fiber, token, True)


class SimRuntime:
    """`composer_prime.sync.runtime.Runtime` over the fibers of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def now(self) -> float:
        return self.process.now()

    def lock(self) -> Any:
        return SimCondition(self.process)

    def condition(self) -> SimCondition:
        return SimCondition(self.process)

    def spawn(self, name: str, body: Callable[[], None]) -> Fiber:
        return self.process.spawn(body)

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        listed = list(items)
        if len(listed) < 2:
            return [function(item) for item in listed]
        results: list[Any] = [None] * len(listed)
        errors: list[Exception | None] = [None] * len(listed)

        scheduler = self.process.scheduler
        left, caller = len(listed), scheduler.current
        token = caller.token

        def run(place: int) -> None:
            nonlocal left
            try:
                results[place] = function(listed[place])
            except Exception as error:
                errors[place] = error
            left -= 1
            if not left:
                scheduler.wake_at(scheduler.time, caller, token, True)

        for place in range(len(listed)):
            self.process.spawn(partial(run, place))
        self.process.wait(None)
        for error in errors:
            if error is not None:
                raise error
        return results

    def close(self) -> None:
        """No idle threads to let go of."""
