"""A `RunStatus` as a person reads it: a few lines on the run, a table of its sites, one of its fragments."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from composer_prime.visible import size, visible
from composer_prime.watch.records import RunStatus, SiteStatus

MAX_SITES = 40
"""Rows; where there are more sites, those in the last round come first. `--json` has them all."""


def draw(status: RunStatus, console: Console) -> None:
    """Print the status."""
    for line in run_lines(status):
        console.print(visible(line), markup=False, highlight=False)
    console.print(site_table(status))
    for site in filter(lambda site: site.waits, _shown(status.sites)):
        verb = "waits" if site.waits and site.waits.until is None else "waited"
        console.print(f"site {site.site} {verb} {site.waits}", markup=False, highlight=False, soft_wrap=True)
    console.print(fragment_table(status))
    if any(site.rounds_clipped for site in status.sites):
        console.print(clip_table(status))
    for why, count in status.refused.items():
        console.print(f"refused {count}: {why}", markup=False, highlight=False)
    for problem in status.problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, style="bold")


def run_lines(status: RunStatus) -> list[str]:
    """The run as a whole, in a few lines."""
    state = "closed" if status.closed else "going on"
    access = "open to whoever can write" if not status.signed else f"keys, owner {status.owner or 'none'}"
    written = status.bytes
    return [
        f"run {status.run} in {status.uri}, created by {status.created_by}",
        f"{state}: {status.rounds_done} of {status.rounds} rounds of each fragment; H {status.inner_steps}, "
        f"P {status.fragments}, tau {status.sync_delay}, codec {status.codec}; {access}",
        f"payloads {size(written.payloads)}, merged parts {size(written.merged)}, "
        f"stored masters {size(written.masters)}",
        f"live {live(status)}, contributing {status.contributing}, quorum {status.quorum}",
    ]


def site_table(status: RunStatus) -> Table:
    """One row a site. Who beats is known only after two looks."""
    title = "sites" if status.sites else "no site has come yet"
    if status.sites and not status.watched_s:
        title += " (one look: --watch-s tells who is alive)"
    if len(status.sites) > MAX_SITES:
        title += f", {MAX_SITES} of {len(status.sites):,}"
    table = Table(title=title, title_justify="left")
    table.caption = "step: an inner step; versions: of each fragment; taken, missed: fragment rounds"
    if any(site.dropped_tokens for site in status.sites):
        table.caption += "; dropped: the run was over, or max_stale_rounds further, before a round took them"
    for column in ("site", "state", "alive", "in last round", "step", "versions"):
        table.add_column(column)
    for column in ("tokens", "merged", "carried", "dropped", "taken", "missed", "processes"):
        table.add_column(column, justify="right")
    for site in _shown(status.sites):
        table.add_row(
            site.site,
            site.state,
            alive(site),
            "yes" if site.contributing else "no",
            f"{site.inner_step:,}",
            " ".join(map(str, site.versions)) or "-",
            f"{'claims ' if site.guest else ''}{site.trained_tokens:,}",
            *(f"{n:,}" for n in (site.merged_tokens, site.carried_tokens, site.dropped_tokens)),
            str(site.rounds_taken),
            str(site.rounds_missed),
            str(site.incarnations),
        )
    return table


def _shown(sites: Sequence[SiteStatus]) -> list[SiteStatus]:
    def last(site: SiteStatus) -> tuple[bool, bool, bool]:
        return not site.contributing, not site.rounds_taken, not site.beat_counter

    return sorted(sites, key=last)[:MAX_SITES]


def fragment_table(status: RunStatus) -> Table:
    """One row a fragment."""
    table = Table(title="rounds of each fragment", title_justify="left")
    for column in ("fragment", "parameters", "version", "void", "unsound", "sites taken", "open offers", "snapshots"):
        table.add_column(column, justify="right")
    for fragment in status.by_fragment:
        shown = [str(version) for version in fragment.snapshots]
        table.add_row(
            str(fragment.fragment),
            f"{fragment.parameters:,}",
            str(fragment.version),
            str(fragment.void),
            str(fragment.faulty),
            "-" if fragment.participation is None else f"{fragment.participation:.0%}",
            str(fragment.open_offers),
            " ".join(shown if len(shown) <= 4 else [shown[0], "..", *shown[-2:]]) or "none",
        )
    return table


def clip_table(status: RunStatus) -> Table:
    """One row a site whose offers were taken and clipped."""
    table = Table(title="offers that were taken, and", title_justify="left")
    table.add_column("site")
    for column in ("clipped", "at most to"):
        table.add_column(column, justify="right")
    for site in _shown([each for each in status.sites if each.rounds_clipped]):
        table.add_row(site.site, str(site.rounds_clipped), f"{site.least_clip:.2g}")
    return table


def alive(site: SiteStatus) -> str:
    """What two looks, or one, say of a site's beat."""
    if site.beating is None:
        return f"beat {site.beat_counter}"
    return "yes" if site.beating else "no"


def live(status: RunStatus) -> str:
    """How many sites are live, as far as looking went."""
    if status.live is not None:
        return str(status.live)
    if not status.watched_s:
        return "unknown (one look: --watch-s tells)"
    seen = sum(site.state == "live" and site.beating is True for site in status.sites)
    return f"{seen} or more (--watch-s {status.watched_s:g} is too short to tell)"
