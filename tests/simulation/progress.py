"""That rounds close while a quorum lives: at any time, and not only once all that was planned is over."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.site import Site, SiteProcess
    from tests.simulation.world import World

PATIENCE_S = 10.0
"""Virtual seconds beside a round's own time and its time-outs."""


class Progress:
    """Since when each site was in order, and when a round closed last.

    Nothing changes a site's link, its pauses or its process but the world's own acts, so a look before and after each
    of those misses nothing; what heals by itself is told (`in_order_from_now`). A stall that no act ends is seen at the
    end of the run, by its length.
    """

    def __init__(self, world: "World", limit_s: float) -> None:
        self._world = world
        self._limit_s = limit_s + PATIENCE_S
        self._closed_at_s = 0.0
        self._out_at_s: dict[str, float] = {}
        self._processes: dict[str, SiteProcess | None] = {}

    def closed(self) -> None:
        """A round is being closed."""
        self._judge()
        self._closed_at_s = self._world.scheduler.time

    def in_order_from_now(self, name: str) -> None:
        """A site has joined."""
        self._out_at_s[name] = self._world.scheduler.time

    def look(self) -> None:
        """Called before and after all that is done to the world."""
        self._judge()
        for name, site in self._world.sites.items():
            if not _in_order(site) or site.process is not self._processes.get(name):
                self._out_at_s[name] = self._world.scheduler.time
                self._processes[name] = site.process

    def _judge(self) -> None:
        world = self._world
        terms, idle_s = world.terms, world.scheduler.time - self._closed_at_s
        if idle_s < self._limit_s:
            return
        long_since = world.scheduler.time - self._limit_s
        sound = [name for name in world.sites if self._troubled_until_s(name) <= long_since]
        sound = [name for name in sound if _in_order(world.sites[name])]
        members = [name for name in sound if name not in world.guests]  # a guest makes no quorum
        is_open = min(world.invariants.present()) < terms.final_version
        if is_open and len(members) >= terms.quorum:
            world.invariants.violate(f"stall: no round closed in {idle_s:.0f} s, though {', '.join(sound)} could")

    def _troubled_until_s(self, name: str) -> float:
        """When the site was out of order last, or a request ended that began when it was."""
        return max(self._out_at_s.get(name, 0.0), self._world.sites[name].link.slow_until)


def _in_order(site: "Site") -> bool:
    process = site.process
    if process is None or process.state != "training" or process.process.is_paused or not site.link.is_clean:
        return False
    return process.watched and not process.flipped  # a learner makes no commits, nor does who has a wrong master
