"""What a storm cost: read from the bucket's log, which decides, and from the sites' books, which say when."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from composer_prime.bench.storm_book import read_book
from composer_prime.bench.storm_places import Place
from composer_prime.bench.storm_plan import Record
from composer_prime.errors import ComposerPrimeError, SiteError
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.reading import find_record
from composer_prime.sync.records import Claim, Commit
from composer_prime.sync.replica import rebuild_master
from composer_prime.sync.roster import Roster
from composer_prime.sync.run import Run, load_run
from composer_prime.sync.runtime import ThreadRuntime
from composer_prime.sync.snapshots import load_master
from composer_prime.sync.verifying import Verifier


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
    """A storm in numbers. Seconds are of the wall; `goodput` is None without a fault-free run to compare with."""

    num_sites: int
    duration_s: float
    faults: dict[str, int]
    faults_missed: int
    faults_held: int
    num_rounds: int
    round_s: float
    tokens_per_s: float
    participation: float
    participation_of_all: float
    rejoin_s: list[float]
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
        """With its goodput: tokens merged a second, as a share of the fault-free run's."""
        if reference is None:
            return self
        return replace(
            self,
            goodput=self.tokens_per_s / reference.tokens_per_s,
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
        how = f" (of {self.reference_tokens_per_s:.0f} tokens/s in {self.reference_s:.0f} s without faults)"
        rejoin = "none" if not self.rejoin_s else f"{self.median_rejoin_s:.1f} s, slowest {max(self.rejoin_s):.1f} s"
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


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Closed:
    """A round: when the first site saw it closed, and what it took."""

    fragment: int
    version: int
    at: float
    commit: Commit


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def read_report(record: Record, environment: Mapping[str, str]) -> StormReport:
    """The report of a storm that has ended. environment: variables that lead to its store."""
    with _environment(environment):
        store = open_store(record.uri)
        try:
            return _read(record, store)
        finally:
            store.close()


def _read(record: Record, store: Store) -> StormReport:
    runtime = ThreadRuntime()
    run = load_run(store)
    books = {place.name: read_book(place.folder) for place in record.places.values()}
    rounds = _rounds(store, run, runtime, books)
    # From a round's end to a round's end, so that a short fault-free run has the rate of a long one.
    first = max(number for number, closed in enumerate(rounds) if closed.at <= record.warm_at)
    inside = [closed for closed in rounds[first + 1 :] if closed.at <= record.over_at]
    if not inside:
        raise SiteError(f"no round closed in {record.plan.duration_s:.0f} s: give the storm more time or fewer sites")
    span_s = inside[-1].at - rounds[first].at
    tokens = sum(entry.tokens for closed in inside for entry in closed.commit.taken) / len(run.fragments)
    rejoins = _first_merges(store, record, books, rounds, "killed")
    joins = _first_merges(store, record, books, rounds, "late")
    happened = [fault for fault in record.faults if fault.began_at is not None]
    live, everyone = _participation(record, books, rounds[first : first + 1 + len(inside)])
    steps = [line for book in books.values() for line in book if line["event"] == "step"]
    stalled = sum(line["stall_s"] for line in steps)
    report = StormReport(
        num_sites=record.plan.num_sites,
        duration_s=span_s,
        faults={kind: sum(f.kind == kind for f in happened) for kind in sorted({f.kind for f in happened})},
        faults_missed=len(record.faults) - len(happened),
        faults_held=sum(fault.held for fault in happened),
        num_rounds=len(inside),
        round_s=span_s / max(1, len(inside)),
        tokens_per_s=tokens / span_s,
        participation=live,
        participation_of_all=everyone,
        rejoin_s=[value for value in rejoins if value is not None],
        join_s=[value for value in joins if value is not None],
        not_rejoined=sum(value is None for value in rejoins),
        import_s=record.import_s,
        stall_share=stalled / (stalled + record.plan.step_s * len(steps)),
        sites=[_tokens(record, place, books[place.name], rounds) for place in record.places.values()],
        hash_differences=_compare_masters(store, run, runtime, books),
        log_faults=_verify(store),
        crashes=[f"{place.name}: {crash}" for place in record.places.values() for crash in place.crashes],
        store_start_s=[fault.details["start_s"] for fault in happened if "start_s" in fault.details],
        finish_s=record.ended_at - record.over_at,
        requests_per_s=record.requests_per_s,
        busy_share=record.busy_share,
        load=record.load,
        events=[{**asdict(fault), "began_at": fault.began_at - record.warm_at} for fault in happened if fault.began_at],
    )
    runtime.close()
    return report


def _rounds(store: Store, run: Run, runtime: ThreadRuntime, books: Mapping[str, list[dict[str, Any]]]) -> list[_Closed]:
    """Every round of the log, in the order in which they closed."""
    seen: dict[tuple[int, int], float] = {}
    for book in books.values():
        for line in book:
            for fragment, version in enumerate(line.get("versions", ())):
                place = (fragment, version)
                seen[place] = min(seen.get(place, line["t"]), line["t"])
    closed = []
    for fragment in range(len(run.fragments)):
        times = sorted((version, at) for (index, version), at in seen.items() if index == fragment and version)
        end = max((version for version, _ in times), default=0)
        commits = runtime.map(
            lambda version, f=fragment: find_record(store, Commit, keys.commit(f, version)),
            range(run.terms.final_version),
        )
        for version, commit in enumerate(commits):
            # nobody's book may show a version that was passed at once: it closed when the next one did
            at = min((at for later, at in times if later > version), default=None)
            if commit is not None and at is not None and version <= end:
                closed.append(_Closed(fragment, version, at, commit))
    return sorted(closed, key=lambda one: one.at)


def _first_merges(
    store: Store, record: Record, books: Mapping[str, list[dict[str, Any]]], rounds: list[_Closed], cause: str
) -> list[float | None]:
    """Seconds from the start of each process of that cause to the first round that took an offer it made.

    None: it came to none before it was killed again, or before the run was over.
    """
    found: list[float | None] = []
    for place in record.places.values():
        number_of = _incarnations(store, place.name)
        for index, start in enumerate(place.starts):
            if start.cause != cause:
                continue
            book = [line for line in books[place.name] if line["pid"] == start.pid]
            began = next((line["t"] for line in book if line["event"] == "started"), None)
            mine = (place.name, number_of.get(start.pid))
            first = next((c.at for c in rounds if any((e.site, e.incarnation) == mine for e in c.commit.taken)), None)
            if began is None or first is None:
                cut_short = index + 1 < len(place.starts)  # struck again before it could
                found += [] if cut_short else [None]
            else:
                found.append(first - began)
    return found


def _incarnations(store: Store, site: str) -> dict[int, int]:
    """Incarnation by process id."""
    found = {}
    for key in store.list(keys.site_prefix(site)):
        claim = find_record(store, Claim, key) if keys.is_claim(key) else None
        if claim is not None:
            found[claim.pid] = claim.incarnation
    return found


def _participation(
    record: Record, books: Mapping[str, list[dict[str, Any]]], rounds: list[_Closed]
) -> tuple[float, float]:
    """Means over rounds: sites taken by sites live, and by sites there were at the start.

    A site is live in a round when it had joined before it began and nothing kept it away until it closed.
    """
    up = {place.name: _up(record, place, books[place.name]) for place in record.places.values()}
    live_shares, all_shares = [], []
    for before, closed in pairwise(rounds):
        taken = {entry.site for entry in closed.commit.taken}
        live = {name for name, spans in up.items() if any(a <= before.at and closed.at <= b for a, b in spans)}
        if live:
            live_shares.append(len(taken & live) / len(live))
        all_shares.append(min(1.0, len(taken) / record.plan.num_sites))
    return (statistics.mean(live_shares), statistics.mean(all_shares)) if live_shares else (0.0, 0.0)


def _up(record: Record, place: Place, book: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The spans in which a site was there and nothing kept it from taking part."""
    spans = []
    for start in place.starts:
        mine = [line for line in book if line["pid"] == start.pid]
        joined = next((line["t"] for line in mine if line["event"] == "joined"), None)
        if joined is not None:
            spans.append((joined, mine[-1]["t"]))
    for first, last in place.down:
        spans = [piece for a, b in spans for piece in ((a, min(b, first)), (max(a, last), b)) if piece[0] < piece[1]]
    return spans


def _tokens(record: Record, place: Place, book: list[dict[str, Any]], rounds: list[_Closed]) -> SiteTokens:
    ends = [line for line in book if line["event"] == "ended"]
    ledgers = ends[-1]["tokens"] if ends else []
    count = max(1, len(ledgers))
    trained, merged, dropped = (
        sum(ledger[name] for ledger in ledgers) / count for name in ("trained", "merged", "dropped")
    )
    logged = sum(entry.tokens for c in rounds for entry in c.commit.taken if entry.site == place.name)
    cpu_s = {line["pid"]: line["cpu_s"] for line in book if "cpu_s" in line}
    return SiteTokens(
        site=place.name,
        processes=len(place.starts),
        made=record.plan.step_tokens * sum(line["event"] == "step" for line in book),
        trained=trained,
        merged=merged,
        logged=logged / max(1, record.terms.fragments),
        dropped=dropped,
        carried=trained - merged - dropped,
        left_early=not ends or not ends[-1]["finished"],
        cpu_share=sum(cpu_s.values()) / (book[-1]["t"] - book[0]["t"]) if len(book) > 1 else 0.0,
    )


# --- are they the same? ----------------------------------------------------------------------------------------------


def _compare_masters(
    store: Store, run: Run, runtime: ThreadRuntime, books: Mapping[str, list[dict[str, Any]]]
) -> list[str]:
    """Differences between the masters that sites ended with and those rebuilt from version 0 and the log alone."""
    ended = {
        site: line["masters"]
        for site, book in books.items()
        for line in book
        if line["event"] == "ended" and line["finished"]
    }
    roster = Roster(store, run.manifest, run.sha256)
    differences = [] if ended else ["no site came to the run's end"]
    for fragment in range(len(run.codings)):
        start = load_master(store, run, fragment, 0, run.manifest.masters[fragment])
        final = run.terms.final_version
        try:
            rebuilt = rebuild_master(store, run, fragment, final, runtime=runtime, roster=roster, start=start)
        except ComposerPrimeError as error:
            differences.append(f"fragment {fragment} can't be rebuilt: {error}")
            continue
        for site, masters in ended.items():
            has = (masters[fragment]["version"], masters[fragment]["sha256"])
            if has != (final, rebuilt.sha256):
                differences.append(
                    f"{site} ended with {has} of fragment {fragment}, the log makes {final}, {rebuilt.sha256}"
                )
    return differences


def _verify(store: Store) -> list[str]:
    """What `composer-prime verify` finds wrong: payloads, parts, snapshots and the close record are compared."""
    verifier = Verifier(store)
    try:
        if not verifier.is_closed:
            return ["the run has no close record"]
        for fragment in range(len(verifier.run.fragments)):
            verifier.check(fragment)
    except ComposerPrimeError as error:
        return [str(error)]
    finally:
        verifier.close()
    return []
