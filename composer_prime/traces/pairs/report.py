"""What making pairs found, counted: printed by the command, and kept by nobody."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from composer_prime.traces.pairs.families import model_families
from composer_prime.traces.pairs.votes import DecidedState, Rules


@dataclass
class Tally:
    """One teacher's votes: how many, for the author, beside a consensus, for it, and lost weight by whose family."""

    num_votes: int = 0
    with_author: int = 0
    decided: int = 0
    with_consensus: int = 0
    models: set[str] = field(default_factory=set)
    circular: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """Counts of states, and a tally a teacher. Every answered state is agreed, differs, or has no consensus.

    circular, few  of those that differ: by teachers too close to student or author alone; of the others: by few votes
    """

    rules: Rules
    num_empty: int = 0
    num_elsewhere: int = 0
    num_states: int = 0
    answered: int = 0
    agreed: int = 0
    differ: int = 0
    circular: int = 0
    few: int = 0
    teachers: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def take(self, decided: DecidedState) -> None:
        """Count one more state."""
        differs = decided.consensus is not None and not decided.is_agreed
        self.num_states += 1
        self.answered += bool(decided.votes)
        self.agreed += decided.is_agreed
        self.differ += differs
        self.circular += differs and decided.consensus is not None and decided.consensus.circular
        most = max(Counter(vote.key for vote in decided.votes).values(), default=self.rules.min_votes)
        self.few += most < self.rules.min_votes
        for vote in decided.votes:
            tally = self.teachers[vote.answer.teacher]
            tally.num_votes += 1
            tally.with_author += vote.key == decided.author_key
            tally.decided += decided.consensus is not None
            tally.with_consensus += decided.chose(vote) == "agreed"
            tally.models.add(vote.answer.model)
            tally.circular += Counter([vote.circular] if vote.circular else ())

    def lines(self) -> list[str]:
        """The report as it is printed."""
        unused = f" (answers left out: {self.num_empty:,} empty, {self.num_elsewhere:,} for other states)"
        family = f" ({self.circular:,} by teachers of the student's or the author's family alone: they don't count)"
        few = f" (fewer than {self.rules.min_votes} votes for any action: {self.few:,})"
        return [
            f"states         {self.num_states:,}",
            f"with answers   {self.answered:,}" + (unused if self.num_empty or self.num_elsewhere else ""),
            f"as the author  {self.agreed:,}",
            f"otherwise      {self.differ:,}" + (family if self.circular else ""),
            f"no consensus   {self.answered - self.agreed - self.differ:,}" + (few if self.few else ""),
            *(_teacher_line(name, self.teachers[name]) for name in sorted(self.teachers)),
            *self._circularity_lines(),
        ]

    def _circularity_lines(self) -> list[str]:
        lines = [
            f"circularity    {name} shares the {who}'s model family: weight times {self.rules.circularity.factor}, "
            f"states {count:,}"
            for name in sorted(self.teachers)
            for who, count in sorted(self.teachers[name].circular.items())
        ]
        if self.rules.circularity.student is None:
            lines.append("circularity    the student is unknown, only authors were compared: name it, --student-model")
        return lines or ["circularity    no teacher shares the student's or an author's model family"]


def _teacher_line(name: str, tally: Tally) -> str:
    families = ", ".join(sorted({family for model in tally.models for family in model_families(model)}))
    with_consensus = f"{tally.with_consensus / tally.decided:.2f}" if tally.decided else "-"
    return (
        f"teacher        {name} ({families}): answers {tally.num_votes:,}, {tally.with_author / tally.num_votes:.2f} "
        f"with the author, {with_consensus} with the consensus"
    )
