"""What making pairs found, counted: printed by the command, and kept by nobody."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from composer_prime.traces.pairs.decisions import DecidedState
from composer_prime.traces.pairs.families import Circularity, model_families


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

    circularity: Circularity
    num_empty: int
    num_elsewhere: int
    min_votes: int
    num_states: int = 0
    answered: int = 0
    agreed: int = 0
    differ: int = 0
    undecided: int = 0
    circular: int = 0
    few: int = 0
    teachers: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def watch(self, decisions: Iterable[DecidedState]) -> Iterator[DecidedState]:
        """The decisions, each counted as it passes."""
        for decision in decisions:
            self.num_states += 1
            self.answered += bool(decision.votes)
            self.agreed += decision.is_agreed
            self.differ += decision.consensus is not None and not decision.is_agreed
            self.undecided += bool(decision.votes) and decision.consensus is None
            self.circular += decision.consensus is not None and decision.consensus.circular and not decision.is_agreed
            most = max(Counter(vote.ballot.key for vote in decision.votes).values(), default=self.min_votes)
            self.few += most < self.min_votes
            self._tally(decision)
            yield decision

    def _tally(self, decision: DecidedState) -> None:
        for vote in decision.votes:
            tally = self.teachers[vote.ballot.answer.teacher]
            tally.num_votes += 1
            tally.with_author += vote.ballot.key == decision.author_key
            tally.decided += decision.consensus is not None
            tally.with_consensus += decision.chose(vote) == "agreed"
            tally.models.add(vote.ballot.answer.model)
            if vote.circular:
                tally.circular[vote.circular] += 1

    def lines(self) -> list[str]:
        """The report as it is printed."""
        unused = f" (answers left out: {self.num_empty:,} empty, {self.num_elsewhere:,} for other states)"
        few = f" (fewer than {self.min_votes} votes for any action: {self.few:,})" if self.few else ""
        return [
            f"states         {self.num_states:,}",
            f"with answers   {self.answered:,}" + (unused if self.num_empty or self.num_elsewhere else ""),
            f"as the author  {self.agreed:,}",
            f"otherwise      {self.differ:,}" + self._of_a_family(),
            f"no consensus   {self.undecided:,}" + few,
            *(_teacher_line(name, self.teachers[name]) for name in sorted(self.teachers)),
            *self._circularity_lines(),
        ]

    def _of_a_family(self) -> str:
        family = f" ({self.circular:,} by teachers of the student's or the author's family alone: they don't count)"
        return family if self.circular else ""

    def _circularity_lines(self) -> list[str]:
        lines = [
            f"circularity    {name} shares the {who}'s model family: weight times {self.circularity.factor}, "
            f"states {count:,}"
            for name in sorted(self.teachers)
            for who, count in sorted(self.teachers[name].circular.items())
        ]
        if self.circularity.student is None:
            lines.append("circularity    the student is unknown, only authors were compared: name it, --student-model")
        return lines or ["circularity    no teacher shares the student's or an author's model family"]


def _teacher_line(name: str, tally: Tally) -> str:
    families = ", ".join(sorted({family for model in tally.models for family in model_families(model)}))
    with_consensus = f"{tally.with_consensus / tally.decided:.2f}" if tally.decided else "-"
    return (
        f"teacher        {name} ({families}): answers {tally.num_votes:,}, {tally.with_author / tally.num_votes:.2f} "
        f"with the author, {with_consensus} with the consensus"
    )
