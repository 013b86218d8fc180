"""Which decisions were met under which faults: the branches of one seed, and a table over many."""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.simulation.plan import STRIKES

WATCHED = {
    "jumped": "log: jumped over collected rounds",
    "overtaken": "log: overtaken by an older process",
    "offer_stands_already": "log: offer of an older process stands",
    "own_offer_lost": "log: own offer's payload gone",
    "round_under_way": "log: came back while a round was under way",
    "learns": "join: as a learner",
    "garbage_collected": "garbage: collected",
    "snapshot_failed": "store: snapshot failed",
    "garbage_left": "store: garbage left",
    "snapshot_refused": "store: snapshot refused",
    "store_failed": "store: pass failed",
    "beat_failed": "store: beat failed",
    "tape_not_flushed": "store: tape not flushed",
    "run_created": "start: manifest raced for",
    "run_finished": "end: finished",
}
FORBIDDEN = ("commit_void", "part_void", "admission_void")
"""Log lines that sound sites on a sound store never cause."""


REFUSALS = {
    "stands on master": "wrong base",
    "payload is of round": "stale payload",
    "was made by incarnation": "replaced incarnation",
    "no object at": "payload missing",
    "another sha256": "payload damaged",
    "bytes or more": "payload of another size",
    "a copy": "a copy",
    "payload was taken": "payload taken before",
}
"""What tells why an offer was refused, and what the table calls it; any other reason is an unsound record."""


def refusal(why: str) -> str:
    """The name of a reason for which a commit refuses an offer."""
    return next((name for telling, name in REFUSALS.items() if telling in why), "unsound record")


def _known() -> frozenset[str]:
    strikes = {*STRIKES, "absent", "damage", "outage", "restart"} | {"corrupt, a bit flipped"}
    returns = ("no offer", "offer taken", "offer open", "offer missed")
    behind = ("no offer", "offer open", "offer missed")
    groups = {
        "close": ("at once", "after grace", "void, too few valid", "void, nothing to merge"),
        "commit": ("gathered", "sliced", "void"),
        "dropped": ("stale", "run ended", "another process of this name had its offer merged"),
        "end": ("without a close record", "own master differed from the others'"),
        "fault": strikes,
        "garbage": ("made again by a late request", "object deleted"),
        "guests": ("a commit by a host", "a part by a host"),
        "join": ("begins at the held master", "begins at the newest master", "a learner's movement carried"),
        "offer": ("payload of an earlier round",),
        "part": ("merged by its first choice", "taken over", "an offer excluded"),
        "refused": (*REFUSALS.values(), "unsound record"),
        "request": ("answer lost", "cut", "lost", "payload unreadable", "repeated"),
        "return": (*returns, *(f"{what}, others merged" for what in behind)),
        "site": ("carried", "close", "merged", "offer"),
    }
    named = {f"{group}: {what}" for group, names in groups.items() for what in names}
    return frozenset(named | set(WATCHED.values()) | {"join failed, tried again"})


KNOWN = _known()
"""Every branch that the hooks can name, so that the table shows those that were never met, too."""
OUT_OF_REACH = {
    "refused: unsound record": "no sound site writes one; tests/spec/test_verdicts.py has each kind",
    "refused: payload taken before": "a site learns that its payload was taken before it offers into a later round",
}
"""Branches that schedules of sound sites hardly ever meet, and why."""


class Coverage(logging.Handler):
    """Counts branches of one world; also the handler that hears what the sites log."""

    def __init__(self) -> None:
        super().__init__()
        self.branches: Counter[str] = Counter()
        self.forbidden: list[str] = []

    def branch(self, name: str) -> None:
        self.branches[name] += 1

    def handle(self, record: logging.LogRecord) -> bool:
        event = str(record.msg).split(" ", 1)[0]
        if event == "begins" and isinstance(record.args, tuple):
            self.branches[f"join: begins at the {record.args[1]} master"] += 1
        if event in WATCHED:
            self.branches[WATCHED[event]] += 1
        elif event in FORBIDDEN:
            self.forbidden.append(record.getMessage())
        return True


class Table:
    """Fault x branch: in how many seeds with that fault the branch was met."""

    def __init__(self) -> None:
        self.cells: Counter[tuple[str, str]] = Counter()
        self.seeds: Counter[str] = Counter()
        self.branches: Counter[str] = Counter()

    def add(self, faults: Iterable[str], branches: Iterable[str]) -> None:
        kinds = sorted(set(faults)) or ["none"]
        self.seeds.update(kinds)
        for branch in branches:
            self.branches[branch] += 1
            for kind in kinds:
                self.cells[kind, branch] += 1

    def merge(self, other: "Table") -> None:
        self.cells.update(other.cells)
        self.seeds.update(other.seeds)
        self.branches.update(other.branches)

    def __str__(self) -> str:
        kinds = sorted(self.seeds)
        branches = KNOWN | self.branches.keys()
        width = max(map(len, branches))
        lines = [" " * width + "".join(f"{kind[:8]:>9}" for kind in kinds) + f"{'seeds':>9}"]
        lines.append(f"{'(seeds with it)':{width}}" + "".join(f"{self.seeds[kind]:9}" for kind in kinds))
        for branch in sorted(branches):
            cells = "".join(f"{self.cells[kind, branch] or '.':>9}" for kind in kinds)
            lines.append(f"{branch:{width}}{cells}{self.branches[branch] or '.':>9}")
        lines += [f"{branch}: {why}" for branch, why in OUT_OF_REACH.items() if branch not in self.branches]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The same as a table of a page."""
        kinds = sorted(self.seeds)
        lines = ["| | " + " | ".join([*kinds, "seeds"]) + " |", "|---|" + "--:|" * (len(kinds) + 1)]
        lines.append("| seeds with it | " + " | ".join(f"{self.seeds[kind]:,}" for kind in kinds) + " | |")
        for branch in sorted(KNOWN | self.branches.keys()):
            numbers = [*(self.cells[kind, branch] for kind in kinds), self.branches[branch]]
            lines.append(f"| {branch} | " + " | ".join(f"{number:,}" if number else "." for number in numbers) + " |")
        return "\n".join(lines)


HEAD = """# Which decisions the simulation met, under which faults
Made by `python -m tests.simulation --seeds {seeds} --coverage {path}`; how fast it is and what came of it:
[benchmarks.md](benchmarks.md#simulation), what the faults are: [operations.md](operations.md#simulation-and-benches).

A row is a decision of a site, or what befell one, a column a kind of fault. A cell says in how many of the seeds that
have such a fault the decision was met, once or more; a dot says: in none. A seed with several kinds of faults is in
each of their columns, one without any in `none`; the last column counts every seed once.
"""


def page(table: Table, seeds: str, path: Path) -> str:
    """A page of the documentation, made of nothing but the table."""
    unmet = [f"- {branch}: {why}." for branch, why in OUT_OF_REACH.items() if branch not in table.branches]
    lines = [HEAD.format(seeds=seeds, path=path.as_posix()), table.markdown()]
    if unmet:
        lines += ["", "What these seeds can hardly meet, and why:", *unmet]
    return "\n".join(lines) + "\n"
