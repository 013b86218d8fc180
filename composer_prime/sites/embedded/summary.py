"""What a run came to: summary.json, a table on the screen, and the picture, all made from the sites' own files.

Made anew by whichever supervisor ends last, so that it also holds sites that joined or came back by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from composer_prime.config.paths import RunPaths, SitePaths
from composer_prime.metrics import SITE_WALL_S, read_tape
from composer_prime.sites.embedded.plot import plot_rewards
from composer_prime.sites.embedded.progress import SiteFollower, SiteProgress, mean
from composer_prime.sites.embedded.result import SiteResult, write_whole
from composer_prime.sites.embedded.screen import show
from composer_prime.sites.embedded.supervisor import WALL_ROLE

EDGE_STEPS = 3
"""Steps at each end of a run that its first and last reward are the mean of."""


def write_summary(paths: RunPaths) -> dict[str, Any]:
    """Write summary.json and, when there is a reward to show, reward.png into the run's folder; give the summary.

    {"run", "wall_s", "masters_equal", "sites": {name: `summarise_site`}}, seconds and bytes; wall_s counts the time in
    which any of the sites was under way, from its command's start on. masters_equal is null without an outer loop.
    """
    progress = {folder.name: read_progress(SitePaths(folder)) for folder in sorted(paths.sites.glob("*/"))}
    sites = {name: summarise_site(paths.site(name), each) for name, each in progress.items()}
    walls = [span for name in sites for span in wall_spans(paths.site(name))]
    summary = {
        "run": paths.root.name,
        "wall_s": round(covered_s(walls), 3),
        "masters_equal": masters_equal(sites),
        "sites": sites,
    }
    write_whole(paths.summary, json.dumps(summary, indent=2) + "\n")
    if any(each.trained_rewards() for each in progress.values()):
        plot_rewards(progress, paths.reward_plot, title=paths.root.name)
    return summary


def summarise_site(paths: SitePaths, progress: SiteProgress) -> dict[str, Any]:
    """One site's numbers: from its result when it finished, else what its tapes know; null where nothing is known.

    reward_first and reward_last are means over the first and the last EDGE_STEPS steps, as are tool_errors_first and
    tool_errors_last, the share of tool calls that failed, where there are calls. teachers has
    the share of its turns at which each was heard at first and at last, and its probes. step_s is the wall time of the
    training steps, waiting included, and train_s what of it was training.
    """
    result = SiteResult.load(paths.result)
    rewards = list(progress.trained_rewards().values())
    errors = list(progress.tool_error_shares().values())
    if result is None:
        numbers = progress.numbers()
        counts = {
            "steps": numbers.step,
            "tokens": int(sum(progress.tokens.values())),
            "dropped_tokens": None,
            "outer_rounds": numbers.rounds,
            "master_sha256": {},
            "bytes_up": None,
            "bytes_down": None,
            "stall_s": sum(progress.stall_s.values()),
            "finish_s": 0.0,
            "train_s": sum(progress.train_s.values()),
        }
    else:
        counts = result.model_dump(mode="json")
    for name in ("stall_s", "finish_s", "train_s"):
        counts[name] = round(counts[name], 3)
    return {
        "finished": result is not None,
        **_edges("reward", rewards),
        **(_edges("tool_errors", errors) if errors else {}),
        **({"teachers": _teachers(progress)} if progress.teachers else {}),
        **counts,
        "step_s": round(sum(progress.step_s.values()), 3),
        "wall_s": round(sum(end - start for start, end in wall_spans(paths)), 3),
    }


def _teachers(progress: SiteProgress) -> dict[str, dict[str, float | None]]:
    return {
        name: {
            **_edges("weight", [weights[step] for step in sorted(weights)]),
            "probes": sum(progress.probes.get(name, {}).values()),
        }
        for name, weights in progress.teachers.items()
    }


def _edges(name: str, values: list[float]) -> dict[str, float | None]:
    return {f"{name}_first": rounded(mean(values[:EDGE_STEPS])), f"{name}_last": rounded(mean(values[-EDGE_STEPS:]))}


def read_progress(paths: SitePaths) -> SiteProgress:
    """All that a site's tapes hold."""
    follower = SiteFollower(paths)
    follower.update()
    return follower.progress


def wall_spans(paths: SitePaths) -> list[tuple[float, float]]:
    """When the site was under way: start and end of every supervisor it had, in seconds since the epoch."""
    records = read_tape(paths.tape(WALL_ROLE))
    return [(record["time"] - record[SITE_WALL_S], record["time"]) for record in records]


def covered_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def masters_equal(sites: Mapping[str, dict[str, Any]]) -> bool | None:
    """Whether all sites that finished hold the same masters; None when none of them holds any."""
    masters = [site["master_sha256"] for site in sites.values() if site["master_sha256"]]
    return all(each == masters[0] for each in masters) if masters else None


def rounded(value: float) -> float | None:
    """For JSON: four digits, and null for NaN."""
    return None if math.isnan(value) else round(value, 4)


def draw_summary(summary: Mapping[str, Any]) -> Table:
    """The summary as a table, one line a site."""
    table = Table(title=f"run {summary['run']}: {summary['wall_s']:.0f} s", title_justify="left", expand=False)
    table.add_column("site")
    has_tools = any("tool_errors_first" in site for site in summary["sites"].values())
    tools = ("errors first", "last") if has_tools else ()
    for column in ("steps", "reward first", "last", *tools, "tokens", "fragment rounds", "up", "down", "stall", "wall"):
        table.add_column(column, justify="right")
    table.add_column("masters")
    for name, site in summary["sites"].items():
        stall = min(1.0, site["stall_s"] / site["step_s"]) if site["step_s"] else math.nan
        table.add_row(
            name if site["finished"] else f"{name} (unfinished)",
            str(site["steps"]),
            show(_number(site["reward_first"]), ".3f"),
            show(_number(site["reward_last"]), ".3f"),
            *(show(_number(site.get(f"tool_errors_{edge}")), ".3f") for edge in ("first", "last") if has_tools),
            f"{site['tokens']:,}",
            str(site["outer_rounds"]),
            show_bytes(site["bytes_up"]),
            show_bytes(site["bytes_down"]),
            f"{show(100 * stall, '.1f')} %",
            f"{site['wall_s']:.0f} s",
            " ".join(f"{key}:{_named(master)}" for key, master in site["master_sha256"].items()) or "-",
        )
    return table


def teacher_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """At what share of its turns each teacher was heard, a line for each site and teacher."""
    for name, site in summary["sites"].items():
        for teacher, found in site.get("teachers", {}).items():
            yield (
                f"site {name}: teacher {teacher} was heard at {found['weight_first']:.0%} of its turns at first and at "
                f"{found['weight_last']:.0%} at last; {found['probes']:.0f} rollouts compared it with the policy"
            )


def dropped_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """What no round took, a line for each site of which that is so."""
    for name, site in summary["sites"].items():
        if dropped := site["dropped_tokens"]:
            yield (
                f"site {name}: {dropped:,} of its {site['tokens']:,} tokens are in no round, since the run was over, "
                "or outer.max_stale_rounds further, before one took them"
            )


def show_bytes(count: int | None) -> str:
    """A byte count for people, in powers of 1,000."""
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _named(master: Mapping[str, Any]) -> str:
    return f"v{master['version']}:{master['sha256'][:8]}"
