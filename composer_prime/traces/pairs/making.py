"""From a store's states and the teachers' answers to a file of decisions."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.traces.answers import Answer
from composer_prime.traces.pairs.actions import is_empty
from composer_prime.traces.pairs.file import Decision, TeacherVote, write_decisions
from composer_prime.traces.pairs.lessons import acted
from composer_prime.traces.pairs.report import Report
from composer_prime.traces.pairs.votes import DecidedState, Rules, decide
from composer_prime.traces.states import States


def make_pairs(source: States, answers: Iterable[Answer], rules: Rules, *, to: Path | None = None) -> Report:
    """Decide at every state, write the decisions to `to`, and count. One answer counts at every state of its id.

    The same states, answers and rules give the same bytes; answers may come in any order.

    Raises BadInput where a teacher has two answers at a state that aren't equal, or nothing can come of it: no states,
    no answers, or none at these states.
    """
    report = Report(rules)
    decisions = _decisions(source, _by_state(answers, report), report)
    if to is None:
        deque(decisions, maxlen=0)
    else:
        write_decisions(to, decisions)
    return report


def _by_state(answers: Iterable[Answer], report: Report) -> dict[str, dict[str, Answer]]:
    """The answers that say something, by state and teacher."""
    found: dict[str, dict[str, Answer]] = defaultdict(dict)
    for answer in answers:
        if is_empty(answer.action):
            report.num_empty += 1
        elif found[answer.state].setdefault(answer.teacher, answer) != answer:
            raise BadInput(
                f"teacher {answer.teacher} has two answers at state {answer.state}, and a vote is one: "
                "remove one of them, or give them to teachers of two names"
            )
    return found


def _decisions(source: States, answers: dict[str, dict[str, Answer]], report: Report) -> Iterator[Decision]:
    """The record of each state that was answered, in the store's order."""
    seen: set[str] = set()
    for state in source.states():
        seen.add(state.id)
        decided = decide(state, answers.get(state.id, {}).values(), report.rules)
        report.take(decided)
        if decided.votes:
            yield _decision(decided)
    report.num_elsewhere = sum(len(those) for id, those in answers.items() if id not in seen)
    _refuse_nothing(report)


def _decision(decided: DecidedState) -> Decision:
    """What the student's or author's family alone is for isn't agreed."""
    found = None if decided.consensus is None or decided.consensus.circular else decided.consensus
    assert decided.score is not None  # there are votes
    return Decision(
        session=decided.state.session,
        turn=decided.state.turn,
        state=decided.state.id,
        score=decided.score,
        supported=decided.supported,
        support=None if found is None else found.support,
        chosen=None if found is None or decided.is_agreed else acted(found.action),
        teachers={
            vote.answer.teacher: TeacherVote(
                model=vote.answer.model, weight=vote.weight, chose=decided.chose(vote), circular=vote.circular
            )
            for vote in decided.votes
        },
    )


def _refuse_nothing(report: Report) -> None:
    if report.answered:
        return
    if not report.num_states:
        raise BadInput("the store holds no state: fill it with `composer-prime replay ingest`")
    if report.num_elsewhere:
        raise BadInput(
            f"none of the {report.num_elsewhere:,} answers is for a state of this store: give the folder that "
            "`composer-prime replay ask` filled from it"
        )
    raise BadInput(
        f"there are no answers to vote with ({report.num_empty:,} are empty): ask teachers first with "
        "`composer-prime replay ask`"
    )
