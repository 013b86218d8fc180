"""The report of an ablation: report.json with every number, report.md to read, and the pictures beside them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_prime.ablate.forecast import dollars
from composer_prime.ablate.plan import Job
from composer_prime.ablate.plots import plot_curves, plot_held_out
from composer_prime.ablate.rows import Row
from composer_prime.ablate.statistics import Estimate, difference_interval, mean_interval, ratio_interval
from composer_prime.config.ablate import left_out
from composer_prime.sites.embedded.result import write_whole
from composer_prime.visible import markdown

POINT = 0.01
"""Held-out reward that is called a point."""


_EXPLAINED = (
    "- In brackets: the 95 % interval over the seeds, Student's t; differences are taken seed by seed. `*`: the "
    "interval of a difference leaves out 0.",
    "- area: the area under the curve of training reward, as its mean over the steps.",
    f"- A point is {POINT:g} of held-out reward above the untrained model. Tokens and USD a point are the mean cost "
    "over the mean gain, with Fieller's interval, which is left out where the gain may be 0; `-`: no gain.",
    "- Generated tokens count all that the policy generated for training. Time and USD count training and held-out "
    "evaluation, but no start that was killed.",
    "- placebo is base with other sampling: so far chance alone moves an arm. wrong-hint, weak-teacher, permuted and "
    "restart look for harm: hints of other mistakes, a teacher that is the untrained policy, the same with permuted "
    "logits, and the recipe once more from the best policy of the seed, from which its points count.",
)


@dataclass(frozen=True)
class ArmReport:
    """One arm over its finished seeds; None where a number needs what isn't there.

    held_out, area       mean final held-out reward, and mean training reward over all steps
    num_pairs            seeds that the first arm has too
    minus_base           held-out reward minus that of the first arm, seed by seed
    start                of a restart: held-out reward of the policies that it began with
    minus_start          of a restart: held-out reward minus that, seed by seed
    area_minus_base      the same of the area
    tokens_a_point       generated tokens for each POINT of held-out reward above the untrained model
    dollars_a_point      dollars for the same
    """

    name: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    held_out: Estimate
    area: Estimate
    num_pairs: int
    minus_base: Estimate | None
    area_minus_base: Estimate | None
    start: Estimate | None
    minus_start: Estimate | None
    rollouts: float
    generated_tokens: float
    seconds: float
    dollars: float | None
    tokens_a_point: Estimate | None
    dollars_a_point: Estimate | None


def report_arms(
    jobs: Sequence[Job], rows: Mapping[Job, Row], *, usd_per_hour: float | None = None
) -> tuple[ArmReport, ...]:
    """The numbers of each arm that has a finished run, in the arms' order."""
    arms = list(dict.fromkeys(job.arm.name for job in jobs))
    found = {name: {job.seed: row for job, row in rows.items() if job.arm.name == name} for name in arms}
    overrides = {job.arm.name: job.arm.overrides for job in jobs}
    base = found[arms[0]]
    return tuple(
        _report_arm(name, overrides[name], found[name], base if name != arms[0] else {}, base, usd_per_hour)
        for name in arms
        if found[name]
    )


def _report_arm(
    name: str,
    overrides: tuple[str, ...],
    rows: Mapping[int, Row],
    base: Mapping[int, Row],
    first: Mapping[int, Row],
    usd_per_hour: float | None,
) -> ArmReport:
    both = [seed for seed in rows if seed in base]
    begun = {seed: row.start for seed, row in rows.items() if row.restarted_from and row.start is not None}
    starts = begun or {seed: row.start for seed, row in first.items() if row.start is not None and seed in rows}
    costs = [dollars(row.seconds, usd_per_hour) for row in rows.values()]
    known = [cost for cost in costs if cost is not None]
    return ArmReport(
        name=name,
        overrides=overrides,
        seeds=tuple(rows),
        held_out=mean_interval([row.held_out for row in rows.values()]),
        area=mean_interval([row.reward_mean for row in rows.values()]),
        num_pairs=len(both),
        minus_base=_difference(
            both, {s: r.held_out for s, r in rows.items()}, {s: r.held_out for s, r in base.items()}
        ),
        area_minus_base=_difference(
            both, {s: r.reward_mean for s, r in rows.items()}, {s: r.reward_mean for s, r in base.items()}
        ),
        start=mean_interval(list(begun.values())) if begun else None,
        minus_start=_difference(list(begun), {s: r.held_out for s, r in rows.items()}, begun),
        rollouts=_mean([row.rollouts for row in rows.values()]),
        generated_tokens=_mean([row.generated_tokens for row in rows.values()]),
        seconds=_mean([row.seconds for row in rows.values()]),
        dollars=_mean(known) if known else None,
        tokens_a_point=_a_point(rows, starts, {seed: float(row.generated_tokens) for seed, row in rows.items()}),
        dollars_a_point=_a_point(rows, starts, dict(zip(rows, known, strict=True))) if known else None,
    )


def _difference(seeds: Sequence[int], values: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    return difference_interval([values[seed] for seed in seeds], [base[seed] for seed in seeds]) if seeds else None


def _a_point(rows: Mapping[int, Row], starts: Mapping[int, float], costs: Mapping[int, float]) -> Estimate | None:
    """Cost for each point above the start of the same seed."""
    if not starts:
        return None
    gains = [(rows[seed].held_out - start) / POINT for seed, start in starts.items()]
    return ratio_interval([costs[seed] for seed in starts], gains)


def write_report(
    jobs: Sequence[Job],
    rows: Mapping[Job, Row],
    failed: Mapping[Job, str],
    *,
    usd_per_hour: float | None = None,
) -> Path:
    """Write report.json, report.md, held_out.png and curves.png into the ablation's folder; the path of report.md.

    rows     at least one; runs without a row are named as missing
    failed   why, of the runs that were tried now and failed
    """
    folder = jobs[0].folder
    arms = report_arms(jobs, rows, usd_per_hour=usd_per_hour)
    missing = [job.label for job in jobs if job not in rows]
    reasons = {job.label: " ".join(reason.split()) for job, reason in failed.items()}
    by_arm = {arm.name: [row for job, row in rows.items() if job.arm.name == arm.name] for arm in arms}
    plot_held_out(by_arm, folder / "held_out.png")
    plot_curves(by_arm, folder / "curves.png")
    data = {
        "run": jobs[0].arm.recipe.run.name,
        "held_out_prompts": jobs[0].prompts,
        "usd_per_hour": usd_per_hour,
        "point": POINT,
        "missing": missing,
        "failed": reasons,
        "arms": [asdict(arm) for arm in arms],
        "rows": [row.model_dump() | {"dollars": dollars(row.seconds, usd_per_hour)} for row in rows.values()],
    }
    write_whole(folder / "report.json", json.dumps(_without_nan(data), indent=1) + "\n")
    path = folder / "report.md"
    write_whole(path, "\n".join(_lines(jobs, rows, arms, missing, reasons, usd_per_hour)) + "\n")
    return path


def _lines(
    jobs: Sequence[Job],
    rows: Mapping[Job, Row],
    arms: Sequence[ArmReport],
    missing: Sequence[str],
    reasons: Mapping[str, str],
    usd_per_hour: float | None,
) -> list[str]:
    first = jobs[0]
    steps = " or ".join(map(str, sorted({job.recipe.max_steps for job in jobs})))
    price = "unknown" if usd_per_hour is None else f"{usd_per_hour:g} USD an hour"
    return [
        f"# Ablation of {first.arm.recipe.run.name}",
        "",
        f"{len(rows)} of {len(jobs)} runs are done, {steps} steps each. "
        f"Held-out reward: greedy, on {first.prompts} tasks that no run trained on. Price: {price}.",
        *([f"Missing: {', '.join(missing)}."] if missing else []),
        "",
        *_verdicts(arms),
        *_remarks(rows, reasons),
        *_table(
            ("arm", "seeds", "held-out reward", "area", "rollouts", "generated tokens", "tokens a point", "time", "USD",
             "USD a point"),
            [_arm_cells(arm) for arm in arms],
        ),
        "",
        f"## Minus {first.arm.name}",
        "",
        *_table(
            ("arm", "pairs", "held-out reward", "area", "began at"),
            [
                (arm.name, str(arm.num_pairs), _spell(arm.minus_base, "+.3f"),
                 _spell(arm.area_minus_base, "+.3f"), _spell(arm.start, ".3f"))
                for arm in arms
                if arm.name != first.arm.name
            ],
        ),
        "",
        "![held-out reward by arm](held_out.png)",
        "",
        "![training reward by step and by generated tokens](curves.png)",
        "",
        "## Arms",
        "",
        *[f"- {arm.name}: {' '.join(f'`{each}`' for each in arm.overrides) or 'the recipe'}" for arm in arms],
        *[f"- {line}" for line in left_out([job.arm for job in jobs])],
        "",
        "## Runs",
        "",
        *_table(
            ("arm", "seed", "began at", "held-out reward", "rollouts", "generated tokens", "seconds", "USD"),
            [_run_cells(row, usd_per_hour) for row in rows.values()],
        ),
        "",
        "## How to read this",
        "",
        *_EXPLAINED,
    ]  # fmt: skip


def _verdicts(arms: Sequence[ArmReport]) -> list[str]:
    """A line for each arm that did harm: the interval of its difference to the first arm, or of a restart to where it
    began, lies below 0."""
    found = [(arm.name, arms[0].name, arm.minus_base) for arm in arms[1:]]
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


def _arm_cells(arm: ArmReport) -> tuple[str, ...]:
    return (
        arm.name,
        str(len(arm.seeds)),
        _spell(arm.held_out, ".3f"),
        _spell(arm.area, ".3f"),
        f"{arm.rollouts:,.0f}",
        f"{arm.generated_tokens:,.0f}",
        _spell(arm.tokens_a_point, ",.0f"),
        f"{arm.seconds:,.0f} s",
        "-" if arm.dollars is None else f"{arm.dollars:.4g}",
        _spell(arm.dollars_a_point, ".3g"),
    )


def _run_cells(row: Row, usd_per_hour: float | None) -> tuple[str, ...]:
    cost = dollars(row.seconds, usd_per_hour)
    return (
        row.arm,
        str(row.seed),
        "-" if row.start is None else f"{row.start:.3f}, {row.restarted_from or 'untrained'}",
        f"{row.held_out:.3f}",
        f"{row.rollouts:,}",
        f"{row.generated_tokens:,}",
        f"{row.seconds:,.0f}",
        "-" if cost is None else f"{cost:.4g}",
    )


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def _spell(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:{form}}"
    star = " *" if form.startswith("+") and estimate.is_clear else ""
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]{star}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _without_nan(data: Any) -> Any:
    """The data with null for NaN, which JSON can't spell."""
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
