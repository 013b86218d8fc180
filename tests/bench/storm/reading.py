"""Reads what a storm cost: from the bucket's log, which decides, and from the sites' books, which say when."""

import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

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
from composer_prime.volunteers.invitation import restored
from tests.bench.storm.book import read_book
from tests.bench.storm.places import Place
from tests.bench.storm.plan import Record
from tests.bench.storm.report import SiteTokens, StormReport


@dataclass(frozen=True)
class _Closed:
    """A round: when the first site saw it closed, and what it took."""

    fragment: int
    version: int
    at: float
    commit: Commit


@dataclass(frozen=True)
class _Came:
    """Seconds from the start of a process until it had joined, and until a round took an offer it made."""

    joined_s: float
    merged_s: float


def read_report(record: Record, environment: Mapping[str, str]) -> StormReport:
    """The report of a storm that has ended. environment: variables that lead to its store."""
    with restored(environment):
        os.environ.update(environment)
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
        wanted_sites=wanted_sites(record, rounds[first].at, inside[-1].at),
        participation=live,
        participation_of_all=everyone,
        rejoin_s=[came.merged_s for came in rejoins if came is not None],
        rejoin_join_s=[came.joined_s for came in rejoins if came is not None],
        join_s=[came.merged_s for came in joins if came is not None],
        not_rejoined=sum(came is None for came in rejoins),
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
) -> list[_Came | None]:
    """How each process of that cause came in; None: no round took an offer of it before the run was over.

    A process that was killed again before it came to a round isn't counted.
    """
    found: list[_Came | None] = []
    for place in record.places.values():
        number_of = _incarnations(store, place.name)
        for index, start in enumerate(place.starts):
            if start.cause != cause:
                continue
            book = [line for line in books[place.name] if line["pid"] == start.pid]
            began, joined = (
                next((line["t"] for line in book if line["event"] == event), None) for event in ("started", "joined")
            )
            mine = (place.name, number_of.get(start.pid))
            first = next((c.at for c in rounds if any((e.site, e.incarnation) == mine for e in c.commit.taken)), None)
            if began is None or joined is None or first is None:
                cut_short = index + 1 < len(place.starts)  # struck again before it could
                found += [] if cut_short else [None]
            else:
                found.append(_Came(joined - began, first - began))
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


def wanted_sites(record: Record, begin: float, end: float) -> float:
    """Sites that would have trained on average from `begin` to `end` had nothing gone wrong: from start to leave."""
    left = {fault.site: fault.began_at for fault in record.faults if fault.kind == "leave" and fault.began_at}
    spans = ((place.starts[0].at, left.get(place.name, end)) for place in record.places.values())
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans) / (end - begin)


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
