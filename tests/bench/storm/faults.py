"""What goes wrong in a storm, when, and to whom: a seeded schedule, and each fault as a script that the storm plays.

A script is a generator: it does something, yields the seconds until it wants to go on, and ends when all is as before.
"""

import random
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from composer_prime.sync.terms import Terms
from tests.bench.storm.places import Place
from tests.bench.storm.server import StormServer

DECK = (*["kill"] * 8, *["stop"] * 3, *["cut"] * 2, "silence", *["burst"] * 2, "slow", "join", "leave", "restart")
"""Kinds of faults in their shares; dealt like cards, so that a long storm has all of them in these shares."""
HOLD_S = 15.0
"""How long a fault waits for its victim to have an upload under way before it strikes all the same."""
CUT_S = (3.0, 12.0)
"""Shortest and longest time that a site is cut off."""
BURST_S, BURST_SHARE = 6.0, 0.4
SLOW_S, SLOW_BY_S = 10.0, 0.3
STOP_LIVENESS = (1.0, 3.0)
"""How long a process is stopped, in multiples of the liveness time."""

Script = Generator[float, None, None]


@dataclass
class Fault:
    """One fault as it happened. Times are on the machine's monotonic clock; `ended_at` is None until all is as before.

    held   the victim's upload was half-way when it struck
    """

    kind: str
    due_at: float
    site: str | None = None
    began_at: float | None = None
    ended_at: float | None = None
    held: bool = False
    details: dict[str, Any] = field(default_factory=dict)


class Stage(Protocol):
    """What a script asks of the storm."""

    terms: Terms
    server: StormServer
    places: dict[str, Place]
    store_down: bool
    outage_s: float

    def victim(self, fault: Fault) -> Place | None: ...
    def strike(self, fault: Fault, place: Place | None) -> None: ...
    def add_place(self) -> Place: ...


def schedule(seed: int, first_at: float, last_at: float, count: int, kinds: Sequence[str] | None = None) -> list[Fault]:
    """`count` faults spread evenly over the time, each anywhere in the middle of its share of it.

    kinds   these, in this order; None: dealt from the deck
    """
    chance = random.Random(seed)
    dealt: list[str] = list(kinds or ())
    while len(dealt) < count:
        dealt += chance.sample(DECK, len(DECK))
    gap = (last_at - first_at) / max(count, 1)
    return [Fault(dealt[i], first_at + gap * (i + chance.uniform(0.2, 0.8))) for i in range(count)]


# --- one site --------------------------------------------------------------------------------------------------------


def kill(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """SIGKILL with a payload half-way; the storm starts the site again as soon as it sees it dead."""
    place = yield from _find_victim(storm, fault)
    yield from _hold_upload(place, fault)
    storm.strike(fault, place)
    place.send(signal.SIGKILL)
    place.gate.drop_connections()
    place.gate.restore()
    while place.is_down and not place.done:
        yield 0.1


def stop(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """SIGSTOP with a payload half-way, for longer than others wait for a sign of life, then SIGCONT."""
    place = yield from _find_victim(storm, fault)
    yield from _hold_upload(place, fault)
    storm.strike(fault, place)
    place.send(signal.SIGSTOP)
    yield storm.terms.liveness_s * chance.uniform(*STOP_LIVENESS)
    place.send(signal.SIGCONT)
    place.gate.restore()


def cut(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """The site's connections break and new ones are refused."""
    place = yield from _find_victim(storm, fault)
    yield from _hold_upload(place, fault)
    storm.strike(fault, place)
    place.gate.cut()
    yield chance.uniform(*CUT_S)
    place.gate.restore()


def silence(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """Nothing passes between the site and the store, and no connection breaks."""
    place = yield from _find_victim(storm, fault)
    storm.strike(fault, place)
    place.gate.weather.silent = True
    yield chance.uniform(*CUT_S)
    place.gate.restore()


def slow(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """Each request of the site takes longer."""
    place = yield from _find_victim(storm, fault)
    storm.strike(fault, place)
    place.gate.weather.delay_s = SLOW_BY_S
    yield SLOW_S
    place.gate.restore()


def join(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """A site of a new name comes in the middle of the run."""
    place = storm.add_place()
    storm.strike(fault, place)
    place.release()
    yield 0.0


def leave(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """A site says good-bye and doesn't come back."""
    place = yield from _find_victim(storm, fault)
    storm.strike(fault, place)
    place.is_leaving = True
    place.send(signal.SIGTERM)
    while place.pid is not None:
        yield 0.1


# --- the store -------------------------------------------------------------------------------------------------------


def burst(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """The store answers a share of everybody's requests with 503 SlowDown."""
    storm.strike(fault, None)
    hit = [place for place in storm.places.values() if not place.is_hit]
    for place in hit:
        place.gate.weather.busy_share = BURST_SHARE
    yield BURST_S
    for place in hit:
        place.gate.weather.busy_share = 0.0


def restart(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """SIGKILL to the store, which is started again at once."""
    yield from _lose_store(storm, fault, 0.0)


def outage(storm: Stage, fault: Fault, chance: random.Random) -> Script:
    """The store is gone for a while."""
    yield from _lose_store(storm, fault, storm.outage_s)


def _lose_store(storm: Stage, fault: Fault, seconds: float) -> Script:
    while storm.store_down:
        yield 1.0
    storm.strike(fault, None)
    storm.store_down = True
    storm.server.kill()
    yield seconds
    storm.server.start()
    started = time.monotonic()
    while not storm.server.is_ready():
        yield 0.2
    fault.details["start_s"] = time.monotonic() - started
    storm.store_down = False


def _find_victim(storm: Stage, fault: Fault) -> Generator[float, None, Place]:
    """A site that nothing else has hit; waits until there is one."""
    while (place := storm.victim(fault)) is None:
        yield 0.5
    return place


def _hold_upload(place: Place, fault: Fault) -> Script:
    """Wait until the site has a payload half-way to the store; not for ever."""
    weather, until = place.gate.weather, time.monotonic() + HOLD_S
    weather.hold_upload = True
    while not weather.held and time.monotonic() < until:
        yield 0.02
    weather.hold_upload = False
    fault.held = weather.held


SCRIPTS: dict[str, Callable[[Stage, Fault, random.Random], Script]] = {
    script.__name__: script for script in (kill, stop, cut, silence, slow, join, leave, burst, restart, outage)
}
