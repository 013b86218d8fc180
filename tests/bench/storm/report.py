"""What a storm cost, in numbers and as a table; `storm_reading` finds the numbers."""

import json
import os
import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class SiteTokens:
    """What became of one site's tokens, over all its processes; counts are of whole steps' tokens.

    made       trained in steps its processes made
    trained    as its ledger says at its end; the rest of `made` was lost with a process that was killed
    merged     as its ledger says
    logged     as the commits in the bucket say
    dropped, carried   the other fates; carried by a site that left before the end, or never offered again
    """

    site: str
    processes: int
    made: float
    trained: float
    merged: float
    logged: float
    dropped: float
    carried: float
    left_early: bool
    cpu_share: float

    @property
    def lost(self) -> float:
        """Tokens that went with killed processes: never offered, and newer than the checkpoint."""
        return self.made - self.trained


@dataclass(frozen=True)
class StormReport:
    """A storm in numbers. Seconds are of the wall; `goodput` is None without a fault-free run to compare with.

    wanted_sites  how many would have trained on average had nothing gone wrong: late ones since their start
    rejoin_s      from the start of each killed site's new process to the first round that took an offer it made
    rejoin_join_s the part of it until the site had joined
    join_s        as rejoin_s, of sites that came late
    import_s      what a process's imports take, which are in neither
    """

    num_sites: int
    duration_s: float
    faults: dict[str, int]
    faults_missed: int
    faults_held: int
    num_rounds: int
    round_s: float
    tokens_per_s: float
    wanted_sites: float
    participation: float
    participation_of_all: float
    rejoin_s: list[float]
    rejoin_join_s: list[float]
    join_s: list[float]
    not_rejoined: int
    import_s: float
    stall_share: float
    sites: list[SiteTokens]
    hash_differences: list[str]
    log_faults: list[str]
    crashes: list[str]
    store_start_s: list[float]
    finish_s: float
    requests_per_s: float
    busy_share: float
    load: float
    goodput: float | None = None
    reference_s: float = 0.0
    reference_tokens_per_s: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)

    def against(self, reference: "StormReport | None") -> "StormReport":
        """With its goodput: tokens merged a second and wanted site, as a share of the fault-free run's."""
        if reference is None:
            return self
        per_site = reference.tokens_per_s / reference.wanted_sites
        return replace(
            self,
            goodput=self.tokens_per_s / self.wanted_sites / per_site,
            reference_s=reference.duration_s,
            reference_tokens_per_s=reference.tokens_per_s,
        )

    @property
    def median_rejoin_s(self) -> float | None:
        return statistics.median(self.rejoin_s) if self.rejoin_s else None

    def to_json(self) -> str:
        lost = [site.lost for site in self.sites]
        return json.dumps({**asdict(self), "median_rejoin_s": self.median_rejoin_s, "lost_tokens": sum(lost)}, indent=2)

    def draw(self) -> Group:
        """For a terminal."""
        return Group(self._draw_numbers(), self._draw_sites(), Text("\n".join(self.hash_differences + self.log_faults)))

    def _draw_numbers(self) -> Table:
        table = Table(title=f"storm: {self.num_sites} sites, {self.duration_s:.0f} s", show_header=False)
        made, lost = sum(site.made for site in self.sites), sum(site.lost for site in self.sites)
        dropped = sum(site.dropped for site in self.sites)
        hour = 3600 / self.duration_s
        goodput = "no fault-free run" if self.goodput is None else f"{self.goodput:.1%}"
        how = f" of {self.wanted_sites:.2f} sites, {self.tokens_per_s:.0f} tokens/s"
        how += f" (without faults {self.reference_tokens_per_s:.0f} of {self.num_sites}, in {self.reference_s:.0f} s)"
        rejoin = "none"
        if self.rejoin_s:
            joining = f"{statistics.median(self.rejoin_join_s):.1f} s of it until joined"
            rejoin = f"{self.median_rejoin_s:.1f} s ({joining}), slowest {max(self.rejoin_s):.1f} s"
        rows = {
            "faults": ", ".join(f"{count} {kind}" for kind, count in self.faults.items()),
            "  an hour": f"{sum(self.faults.values()) * hour:.0f}; {self.faults_held} with an upload half-way",
            "goodput": goodput + (how if self.goodput is not None else ""),
            "rounds": f"{self.num_rounds}, one in {self.round_s:.2f} s",
            "contributing": f"{self.participation:.1%} of live sites, {self.participation_of_all:.1%} of all",
            "rejoin, median": f"{rejoin}; {len(self.rejoin_s)} of {len(self.rejoin_s) + self.not_rejoined}",
            "imports apart": f"{self.import_s:.1f} s",
            "late sites merged after": ", ".join(f"{value:.1f} s" for value in self.join_s) or "none came",
            "hash differences": str(len(self.hash_differences) + len(self.log_faults)),
            "tokens lost": f"{lost:.0f} with killed processes, {dropped:.0f} dropped, of {made:.0f} trained",
            "crashes": ", ".join(self.crashes) or "none",
            "stalled": f"{self.stall_share:.1%} of the sites' time",
            "requests": f"{self.requests_per_s:.0f} a second, of all sites",
            "machine": f"load {self.load:.2f}, {self.busy_share:.0%} of {os.cpu_count()} cores busy",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def _draw_sites(self) -> Table:
        table = Table()
        for column in ("site", "processes", "trained", "merged", "dropped", "carried", "lost", "cpu"):
            table.add_column(column, justify="left" if column == "site" else "right")
        for site in self.sites:
            fates = (site.trained, site.merged, site.dropped, site.carried, site.lost)
            name = site.site + (" (left)" if site.left_early else "")
            table.add_row(name, str(site.processes), *(f"{value:.0f}" for value in fates), f"{site.cpu_share:.0%}")
        return table
