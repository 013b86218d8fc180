"""reward.png: reward per training step of every site, with the outer rounds marked on its line; and where tools are
called the share of calls that failed, dashed.

matplotlib takes most of a second to import, so that happens when a picture is drawn, and without a display.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from composer_prime.sites.embedded.progress import SiteProgress, mean

SMOOTH_STEPS = 3
"""Steps a point of the heavy line is the mean of; the thin line shows each step as it was."""


def plot_rewards(sites: Mapping[str, SiteProgress], path: Path, *, title: str) -> None:
    """Draw the picture and write it to `path` as a PNG of 1,200 x 675 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, progress) in enumerate(sites.items()):
        color = f"C{index}"
        rewards = progress.trained_rewards()
        steps, level = list(rewards), smooth(list(rewards.values()))
        axes.plot(steps, list(rewards.values()), color=color, linewidth=0.8, alpha=0.35)
        axes.plot(steps, level, color=color, linewidth=2, label=f"site {name}")
        merged = [position for position, step in enumerate(steps) if step in round_steps(progress.rounds)]
        marks = [steps[position] for position in merged], [level[position] for position in merged]
        axes.plot(*marks, "o", color=color, markersize=5, markeredgecolor="white")
        errors = progress.tool_error_shares()
        axes.plot(list(errors), smooth(list(errors.values())), color=color, linewidth=1.2, linestyle="--")
        for weights in progress.teachers.values():
            axes.plot(sorted(weights), [weights[step] for step in sorted(weights)], ":", color=color, linewidth=1.2)
    if any(progress.teachers for progress in sites.values()):
        axes.plot([], [], ":", color="grey", linewidth=1.2, label="share of its turns at which a teacher is heard")
    if any(progress.tool_calls for progress in sites.values()):
        axes.plot([], [], "--", color="grey", linewidth=1.2, label="share of tool calls that failed")
    if any(progress.rounds for progress in sites.values()):
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
