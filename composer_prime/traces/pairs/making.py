"""From a store's states and the teachers' answers to a file of decisions.

The states are read twice: for the teachers' votes, which decide their weights, then for the decisions.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.arguments import EXPLAINING
from composer_prime.traces.pairs.decisions import decide, decisions_of
from composer_prime.traces.pairs.families import Circularity
from composer_prime.traces.pairs.file import write_decisions
from composer_prime.traces.pairs.page import Page
from composer_prime.traces.pairs.report import Report
from composer_prime.traces.pairs.votes import Collected, VoteRule, Weights, collect, disagreement_variances
from composer_prime.traces.states import States


@dataclass(frozen=True)
class Rules:
    """How votes become a consensus.

    vote         how they are weighed, see `votes.Weights`
    min_support  the least share of the weight that makes a consensus, 0 to 1
    min_votes    the least number of votes for an action that does, at least 1
    circularity  what becomes of teachers that share a family with student or author
    explaining   TOOL.ARGUMENT that don't count, see `action_key`
    """

    vote: VoteRule = "plurality"
    min_support: float = 0.5
    min_votes: int = 2
    circularity: Circularity = field(default_factory=Circularity)
    explaining: Collection[str] = EXPLAINING


def make_pairs(
    source: States, answers: Iterable[Answer], rules: Rules, *, to: Path | None = None, page: Path | None = None
) -> Report:
    """Decide at every state, write the decisions to `to` and what was said to `page`, and count.

    The same states, answers and rules give the same bytes; answers may come in any order.

    Raises BadInput where nothing can come of it: no states, no answers, or none at these states.
    """
    found = collect(source.states(), answers, rules.explaining)
    _refuse_nothing(found)
    report = Report(rules.circularity, found.num_empty, found.num_elsewhere, rules.min_votes)
    shown = Page()
    weights = Weights(rules.vote, rules.circularity, disagreement_variances(found.ballots))
    decided = report.watch(decide(source.states(), found, weights, rules.min_support, rules.min_votes))
    decisions = decisions_of(shown.watch(decided) if page else decided)
    if to is None:
        deque(decisions, maxlen=0)
    else:
        write_decisions(to, decisions)
    if page is not None:
        shown.write(page)
    return report


def _refuse_nothing(found: Collected) -> None:
    if found.ballots:
        return
    if not found.ids:
        raise BadInput("the store holds no state: fill it with `composer-prime replay ingest`")
    if found.num_elsewhere:
        raise BadInput(
            f"none of the {found.num_elsewhere:,} answers is for a state of this store: give the folder that "
            "`composer-prime replay ask` filled from it"
        )
    raise BadInput(
        f"there are no answers to vote with ({found.num_empty:,} are empty): ask teachers first with "
        "`composer-prime replay ask`"
    )
