"""The pictures of an ablation: held-out reward of each arm with its interval, and how training reward grew."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.ablate.rows import Row
from composer_prime.ablate.statistics import Estimate, mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_held_out(arms: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write a PNG of 1,200 x 675 pixels: an arm's mean with its 95 % interval, and a small dot for each seed."""
    figure = _figure()
    axes = figure.add_subplot()
    for place, rows in enumerate(arms.values()):
        values = [row.held_out for row in rows]
        found = mean_interval(values)
        half = 0.0 if math.isnan(found.low) else found.high - found.value
        axes.errorbar([place], [found.value], yerr=[half], fmt="o", markersize=8, capsize=6, color=f"C{place}")
        axes.plot([place + 0.12] * len(values), values, ".", color=f"C{place}", alpha=0.6)
    axes.set_xticks(range(len(arms)), list(arms), rotation=20 if len(arms) > 5 else 0)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_ylabel("held-out reward (bars: 95 % interval, dots: seeds)")
    axes.grid(alpha=0.25, axis="y")
    figure.savefig(path, format="png")


def plot_curves(arms: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write a PNG of 1,200 x 675 pixels: mean training reward by step, banded by its 95 % interval, and by tokens.

    The tokens are a run's generated tokens in equal shares over its steps, the mean over the seeds.
    """
    figure = _figure()
    by_step, by_tokens = figure.subplots(1, 2, sharey=True)
    for place, (name, rows) in enumerate(arms.items()):
        curve = mean_curve(rows)
        if not curve:
            continue
        steps, means = list(range(1, len(curve) + 1)), [each.value for each in curve]
        by_step.plot(steps, means, color=f"C{place}", label=name)
        if not any(math.isnan(each.low) for each in curve):
            by_step.fill_between(
                steps, [each.low for each in curve], [each.high for each in curve], color=f"C{place}", alpha=0.15
            )
        share = sum(row.generated_tokens for row in rows) / len(rows) / len(curve)
        by_tokens.plot([share * step for step in steps], means, color=f"C{place}")
    by_step.set_xlabel("training step")
    by_tokens.set_xlabel("generated tokens")
    by_step.set_ylabel("training reward (band: 95 % interval)")
    by_step.legend(loc="best", frameon=False)
    for axes in (by_step, by_tokens):
        axes.grid(alpha=0.25)
    figure.savefig(path, format="png")


def mean_curve(rows: Sequence[Row]) -> list[Estimate]:
    """Mean training reward over the seeds, step by step, as far as all of them go."""
    length = min(len(row.rewards) for row in rows)
    return [mean_interval([row.rewards[step] for row in rows]) for step in range(length)]


def _figure() -> "Figure":
    """An empty figure that needs no display; matplotlib takes most of a second to import."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
