"""What a run came to: summary.json, a table on the screen, and the picture, all made from the sites' own files.

Made anew by whichever supervisor ends last, so that it also holds sites that joined or came back by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from composer_prime.config.paths import RunPaths, SitePaths
from composer_prime.metrics import (
    OUTER_ROUND,
    OUTER_STALL_S,
    SITE_WALL_S,
    TOOLS_CALLS,
    TRAIN_STEP_S,
    TRAIN_TOKENS,
    TRAIN_TRAIN_S,
    read_tape,
)
from composer_prime.sites.embedded.progress import SiteProgress, mean, show
from composer_prime.sites.embedded.result import SiteResult, write_whole
from composer_prime.sites.embedded.supervisor import WALL_ROLE
from composer_prime.visible import size

EDGE_STEPS = 3
"""Steps at each end of a run that its first and last reward are the mean of."""
SMOOTH_STEPS = 3
"""Steps a point of the heavy line is the mean of; the thin line shows each step as it was."""


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
    errors = list(progress.tool_error_shares().values())
    teachers = _teachers(progress)
    counts = (result or _result_so_far(progress)).model_dump(mode="json")
    for name in ("stall_s", "finish_s", "train_s"):
        counts[name] = round(counts[name], 3)
    return {
        "finished": result is not None,
        **_edges("reward", list(progress.trained_rewards().values())),
        **(_edges("tool_errors", errors) if errors else {}),
        **({"teachers": teachers} if teachers else {}),
        **counts,
        **({} if result else dict.fromkeys(("dropped_tokens", "bytes_up", "bytes_down"))),
        "step_s": round(progress.total(TRAIN_STEP_S), 3),
        "wall_s": round(sum(end - start for start, end in wall_spans(paths)), 3),
    }


def _result_so_far(progress: SiteProgress) -> SiteResult:
    return SiteResult(
        steps=progress.numbers().step,
        tokens=int(progress.total(TRAIN_TOKENS)),
        outer_rounds=progress.numbers().rounds,
        stall_s=progress.total(OUTER_STALL_S),
        train_s=progress.total(TRAIN_TRAIN_S),
    )


def _teachers(progress: SiteProgress) -> dict[str, dict[str, float | None]]:
    return {
        name: {
            **_edges("weight", list(weights.values())),
            "probes": progress.total(f"teacher/{name}/probes"),
        }
        for name, weights in progress.teacher_weights().items()
    }


def _edges(name: str, values: list[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_first": None, f"{name}_last": None}
    return {f"{name}_first": round(mean(values[:EDGE_STEPS]), 4), f"{name}_last": round(mean(values[-EDGE_STEPS:]), 4)}


def read_progress(paths: SitePaths) -> SiteProgress:
    """All that a site's tapes hold."""
    progress = SiteProgress(paths)
    progress.update()
    return progress


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
            show(site["reward_first"], ".3f"),
            show(site["reward_last"], ".3f"),
            *(show(site.get(f"tool_errors_{edge}"), ".3f") for edge in ("first", "last") if has_tools),
            f"{site['tokens']:,}",
            str(site["outer_rounds"]),
            *("-" if site[count] is None else size(site[count]) for count in ("bytes_up", "bytes_down")),
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


def _named(master: Mapping[str, Any]) -> str:
    return f"v{master['version']}:{master['sha256'][:8]}"


def plot_rewards(sites: Mapping[str, SiteProgress], path: Path, *, title: str) -> None:
    """Draw reward per training step of every site and write it to `path` as a PNG of 1,200 x 675 pixels.

    Outer rounds are marked on a site's line. The share of tool calls that failed is dashed, a teacher's weight dotted.
    """
    # matplotlib takes most of a second to import; no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, progress) in enumerate(sites.items()):
        color = f"C{index}"
        rewards, merging = progress.trained_rewards(), round_steps(progress.series[OUTER_ROUND])
        steps, level = list(rewards), smooth(list(rewards.values()))
        axes.plot(steps, list(rewards.values()), color=color, linewidth=0.8, alpha=0.35)
        axes.plot(steps, level, color=color, linewidth=2, label=f"site {name}")
        merged = [position for position, step in enumerate(steps) if step in merging]
        marks = [steps[position] for position in merged], [level[position] for position in merged]
        axes.plot(*marks, "o", color=color, markersize=5, markeredgecolor="white")
        errors = progress.tool_error_shares()
        axes.plot(list(errors), smooth(list(errors.values())), color=color, linewidth=1.2, linestyle="--")
        for weights in progress.teacher_weights().values():
            axes.plot(list(weights), list(weights.values()), ":", color=color, linewidth=1.2)
    if any(progress.teacher_weights() for progress in sites.values()):
        axes.plot([], [], ":", color="grey", linewidth=1.2, label="share of its turns at which a teacher is heard")
    if any(progress.series[TOOLS_CALLS] for progress in sites.values()):
        axes.plot([], [], "--", color="grey", linewidth=1.2, label="share of tool calls that failed")
    if any(progress.series[OUTER_ROUND] for progress in sites.values()):
        axes.plot([], [], "o", color="grey", markersize=5, label="outer round merged")
    axes.set_title(title)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"reward (heavy line: mean of {SMOOTH_STEPS} steps)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, format="png")


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and those right before it, SMOOTH_STEPS together."""
    return [mean(values[max(0, end - SMOOTH_STEPS) : end]) for end in range(1, len(values) + 1)]


def round_steps(rounds: Mapping[int, float]) -> set[int]:
    """The steps at which the count of merged rounds had grown."""
    found, before = set(), 0.0
    for step in sorted(rounds):
        if rounds[step] > before:
            found.add(step)
            before = rounds[step]
    return found
