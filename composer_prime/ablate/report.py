"""The report of an ablation: report.json with every number, report.md with one table, and held_out.png beside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from pydantic_core import to_json

from composer_prime.ablate.plan import Job, Row
from composer_prime.config.ablate import left_out
from composer_prime.plan.prices import dollars
from composer_prime.sites.embedded.result import write_whole
from composer_prime.visible import markdown

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""

_EXPLAINED = (
    "- In brackets: the 95 % interval over the seeds, Student's t; differences are taken seed by seed. `*`: the "
    "interval of a difference leaves out 0.",
    "- area: the area under the curve of training reward, as its mean over the steps.",
    "- began at: held-out reward of the untrained model, and of the policies that a restart began with.",
    "- Generated tokens count all that the policy generated for training. Time and USD count training and held-out "
    "evaluation, but no start that was killed.",
    "- placebo is base with other sampling: so far chance alone moves an arm. wrong-hint, weak-teacher, permuted and "
    "restart look for harm: hints of other mistakes, a teacher that is the untrained policy, the same with permuted "
    "logits, and the recipe once more from the best policy of the seed.",
)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; low and high are NaN where nothing follows, as from one seed."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_clear(self) -> bool:
        """Whether the interval is known and leaves out zero."""
        return self.low > 0 or self.high < 0


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits; NaN for no degree of freedom."""
    if freedom < 1:
        return math.nan
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean of the values, at least one, with Student's t interval: mean +- t s / sqrt(n)."""
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def difference_interval(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Mean of the differences seed by seed, with its t interval."""
    return mean_interval([value - base for value, base in zip(values, baseline, strict=True)])


@dataclass(frozen=True)
class ArmReport:
    """One arm over its finished seeds; None where a number needs what isn't there.

    held_out, area       mean final held-out reward, and mean training reward over all steps
    minus_base           held-out reward minus that of the first arm, of the seeds that both have
    area_minus_base      the same of the area
    start                held-out reward of the policies that it began with, where that was measured
    minus_start          held-out reward minus that, seed by seed
    """

    name: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    held_out: Estimate
    minus_base: Estimate | None
    area: Estimate
    area_minus_base: Estimate | None
    start: Estimate | None
    minus_start: Estimate | None
    rollouts: float
    generated_tokens: float
    seconds: float
    dollars: float | None

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        estimates = ((self.held_out, ".3f"), (self.minus_base, "+.3f"), (self.area, ".3f"))
        return (
            self.name,
            str(len(self.seeds)),
            *(_spell(*each) for each in (*estimates, (self.area_minus_base, "+.3f"), (self.start, ".3f"))),
            f"{self.rollouts:,.0f}",
            f"{self.generated_tokens:,.0f}",
            f"{self.seconds:,.0f} s",
            "-" if self.dollars is None else f"{self.dollars:.4g}",
        )


def report_arms(jobs: Sequence[Job], rows: Mapping[Job, Row], usd_per_hour: float | None) -> list[ArmReport]:
    """The numbers of each arm that has a finished run, in the arms' order."""
    arms = {job.arm.name: job.arm.overrides for job in jobs}
    found = {name: {job.seed: row for job, row in rows.items() if job.arm.name == name} for name in arms}
    base = found[jobs[0].arm.name]
    return [
        _report_arm(name, arms[name], found[name], {} if found[name] is base else base, usd_per_hour)
        for name in arms
        if found[name]
    ]


def _report_arm(
    name: str, overrides: tuple[str, ...], by_seed: Mapping[int, Row], base: Mapping[int, Row], price: float | None
) -> ArmReport:
    rows = list(by_seed.values())
    pairs = [(row, base[seed]) for seed, row in by_seed.items() if seed in base]
    begun = [(row.held_out, row.start) for row in rows if row.start is not None]
    return ArmReport(
        name=name,
        overrides=overrides,
        seeds=tuple(by_seed),
        held_out=mean_interval([row.held_out for row in rows]),
        minus_base=_difference([(row.held_out, other.held_out) for row, other in pairs]),
        area=mean_interval([row.reward_mean for row in rows]),
        area_minus_base=_difference([(row.reward_mean, other.reward_mean) for row, other in pairs]),
        start=mean_interval([start for _, start in begun]) if begun else None,
        minus_start=_difference(begun),
        rollouts=fmean(row.rollouts for row in rows),
        generated_tokens=fmean(row.generated_tokens for row in rows),
        seconds=(seconds := fmean(row.seconds for row in rows)),
        dollars=dollars(seconds, price),
    )


def _difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    return difference_interval(*zip(*pairs, strict=True)) if pairs else None


def write_report(
    jobs: Sequence[Job], rows: Mapping[Job, Row], failed: Mapping[Job, str], *, usd_per_hour: float | None = None
) -> Path:
    """Write report.json, report.md and held_out.png into the ablation's folder; the path of report.md.

    rows     at least one; runs without a row are named as missing
    failed   why, of the runs that were tried now and failed
    """
    folder = jobs[0].folder
    arms = report_arms(jobs, rows, usd_per_hour)
    missing = [job.label for job in jobs if job not in rows]
    reasons = {job.label: " ".join(reason.split()) for job, reason in failed.items()}
    data = {
        "run": jobs[0].arm.recipe.run.name,
        "held_out_prompts": jobs[0].prompts,
        "usd_per_hour": usd_per_hour,
        "missing": missing,
        "failed": reasons,
        "arms": arms,
        "rows": [row.model_dump() | {"dollars": dollars(row.seconds, usd_per_hour)} for row in rows.values()],
    }
    write_whole(folder / "report.json", to_json(data, indent=1, inf_nan_mode="null").decode() + "\n")
    _plot(arms, rows, folder / "held_out.png")
    first, base = jobs[0], f"minus {jobs[0].arm.name}"
    steps = " or ".join(map(str, sorted({job.recipe.max_steps for job in jobs})))
    price = "unknown" if usd_per_hour is None else f"{usd_per_hour:g} USD an hour"
    header = ("arm", "seeds", "held-out reward", base, "area", base, "began at", "rollouts", "generated tokens", "time",
              "USD")  # fmt: skip
    lines = [
        f"# Ablation of {first.arm.recipe.run.name}",
        "",
        f"{len(rows)} of {len(jobs)} runs are done, {steps} steps each. "
        f"Held-out reward: greedy, on {first.prompts} tasks that no run trained on. Price: {price}.",
        *([f"Missing: {', '.join(missing)}."] if missing else []),
        "",
        *_verdicts(arms),
        *_remarks(rows, reasons),
        *(f"| {' | '.join(cells)} |" for cells in (header, ["---:"] * len(header), *(arm.cells() for arm in arms))),
        "",
        "![held-out reward by arm](held_out.png)",
        "",
        *(f"- {arm.name}: {' '.join(f'`{each}`' for each in arm.overrides) or 'the recipe'}" for arm in arms),
        *(f"- {line}" for line in left_out([job.arm for job in jobs])),
        "",
        *_EXPLAINED,
    ]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    return folder / "report.md"


def _verdicts(arms: Sequence[ArmReport]) -> list[str]:
    """A line for each arm that did harm: the interval of its difference to the first arm, or to where it began, lies
    below 0."""
    found = [(arm.name, arms[0].name, arm.minus_base) for arm in arms]
    found += [(arm.name, "where it began", arm.minus_start) for arm in arms]
    lines = [
        f"**{name} is worse than {other}**: {_spell(difference, '+.3f')}."
        for name, other, difference in found
        if difference is not None and difference.high < 0
    ]
    return [*lines, ""] if lines else []


def _remarks(rows: Mapping[Job, Row], reasons: Mapping[str, str]) -> list[str]:
    """A list of the runs that failed, and of those whose replay teachers fell silent; nothing when there are none."""
    remarks = [f"- {label} failed: {markdown(reason)}" for label, reason in reasons.items()]
    for job, row in rows.items():
        if row.unanswered_tokens:
            share = f"{row.unanswered_tokens:,} of {row.generated_tokens:,} generated tokens"
            remarks.append(f"- {job.label}: no teacher answered for {share}")
    return [*remarks, ""] if remarks else []


def _plot(arms: Sequence[ArmReport], rows: Mapping[Job, Row], path: Path) -> None:
    """Write a PNG of 1,200 x 675 pixels: an arm's mean with its 95 % interval, and a small dot for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # most of a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, arm in enumerate(arms):
        half = 0.0 if math.isnan(arm.held_out.low) else arm.held_out.high - arm.held_out.value
        axes.errorbar([place], [arm.held_out.value], yerr=[half], fmt="o", markersize=8, capsize=6, color=f"C{place}")
        values = [row.held_out for job, row in rows.items() if job.arm.name == arm.name]
        axes.plot([place + 0.12] * len(values), values, ".", color=f"C{place}", alpha=0.6)
    axes.set_xticks(range(len(arms)), [arm.name for arm in arms], rotation=20 if len(arms) > 5 else 0)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_ylabel("held-out reward (bars: 95 % interval, dots: seeds)")
    axes.grid(alpha=0.25, axis="y")
    figure.savefig(path, format="png")


def _spell(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:{form}}"
    star = " *" if form.startswith("+") and estimate.is_clear else ""
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]{star}"
