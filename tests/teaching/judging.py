"""`python -m tests.teaching.judging`: the rows of docs/evidence/teaching as a table, and what its bars say of them.

Held-out rewards are means over seeds; a difference to base is taken seed by seed, with Student's 95 % interval.
"""

import json
from collections import defaultdict
from collections.abc import Iterator

from composer_prime.ablate.report import Estimate, difference_interval, mean_interval
from tests.teaching.__main__ import DENSE, ROWS, SPARSE

ARMS = ("base", "placebo", "+hint", "+replay", "full", "wrong-hint", "weak-teacher", "permuted", "restart", "imitation")
LEARNS, STAYS, WORSE, REACHES = 0.5, 0.05, 0.03, 0.9


class Judged:
    """One setting's held-out rewards, by arm and seed."""

    def __init__(self, name: str) -> None:
        file = ROWS / f"{name}.jsonl"
        self.name, self.rows = name, [json.loads(line) for line in file.read_text().splitlines()]
        self.rewards: dict[str, dict[int, float]] = defaultdict(dict)
        for row in self.rows:
            if "held_out" in row:
                self.rewards[row["arm"]][row["seed"]] = row["held_out"]

    def alone(self, arm: str) -> float:
        """What was measured once: the player, base with eight times the rollouts."""
        return next((row["reward"] for row in self.rows if row["arm"] == arm), float("nan"))

    def mean(self, arm: str) -> float:
        return mean_interval(list(self.rewards[arm].values())).value if self.rewards[arm] else float("nan")

    def difference(self, arm: str) -> Estimate:
        """To base, at the seeds that both have."""
        seeds = sorted(self.rewards[arm].keys() & self.rewards["base"].keys())
        return difference_interval(*([self.rewards[one][seed] for seed in seeds] for one in (arm, "base")))

    def harm(self) -> Iterator[str]:
        """Arms below base, where base learns; imitation is no arm of ours."""
        floor = self.difference("placebo").low - WORSE
        for arm in ARMS[2:-2]:
            found = self.difference(arm)
            if found.value < -WORSE or found.low < floor:
                yield f"{arm} {found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}], placebo's low end {floor:+.3f}"

    def fallen(self) -> float:
        """How far restarts end from where they began, in the mean."""
        ends = [row["held_out"] - row["start"] for row in self.rows if row["arm"] == "restart"]
        return sum(ends) / len(ends)

    def help(self) -> tuple[float, float]:
        """The better of +hint and +replay, and what it must reach."""
        best = max(self.mean("+hint"), self.mean("+replay"))
        return best, REACHES * (1.0 if self.name == "locks" else self.alone("player"))


def cell(judged: Judged, arm: str) -> str:
    if arm == "base" or not judged.rewards[arm]:
        return f"{judged.mean(arm):.3f}"
    found = judged.difference(arm)
    return f"{judged.mean(arm):.3f} ({found.low:+.3f} to {found.high:+.3f})"


def tables(found: list[Judged]) -> Iterator[str]:
    yield f"| arm | {' | '.join(one.name for one in found)} |"
    yield "|---" * (len(found) + 1) + "|"
    for arm in ARMS:
        yield f"| {arm} | {' | '.join(cell(one, arm) for one in found)} |"
    for arm in ("player", "base x8"):
        yield f"| {arm} | {' | '.join(f'{one.alone(arm):.3f}' for one in found)} |"
    seeds = [str(min(len(one.rewards[arm]) for arm in ARMS)) for one in found]
    yield f"| seeds | {' | '.join(seeds)} |"


def verdicts(found: list[Judged]) -> Iterator[str]:
    for one in found:
        if one.name in DENSE and one.mean("base") < LEARNS:
            yield f"{one.name}: base comes to {one.mean('base'):.3f}, so it carries nothing"
        elif one.name in DENSE:
            yield f"{one.name}: harm: {'; '.join(one.harm()) or 'none'}"
        elif max(one.mean("base"), one.alone("base x8")) > STAYS:
            yield f"{one.name}: base comes to {one.mean('base'):.3f}, {one.alone('base x8'):.3f}: it carries nothing"
        else:
            best, bar = one.help()
            yield f"{one.name}: help: {best:.3f} of {bar:.3f}: {'yes' if best >= bar else 'no'}"
        yield f"{one.name}: restarts end {one.fallen():+.3f} from where they began"


def main() -> None:
    for names in (DENSE, SPARSE):
        found = [Judged(name) for name in names if (ROWS / f"{name}.jsonl").exists()]
        whole = [one for one in found if all(one.rewards[arm] for arm in ARMS)]
        print("\n".join([*tables(whole), "", *verdicts(whole), ""]))


if __name__ == "__main__":
    main()
