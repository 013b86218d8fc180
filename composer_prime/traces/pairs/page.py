"""One page for a browser: at each state, what the author did and what each teacher would have done."""

import html
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.traces.pairs.decisions import DecidedState
from composer_prime.traces.states import Message, calls_of, text_of
from composer_prime.visible import visible

MAX_STATES = 2000
MAX_SHOWN = 2000
"""Characters of one text; of a longer one, its length is said."""

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>What the teachers would have done</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
table { border-collapse: collapse; width: 100% } h2 { font-size: 1.1em; margin: 2em 0 .3em }
td, th { border-top: 1px solid #ccc; padding: .3em .6em; text-align: left; vertical-align: top }
th { white-space: nowrap; font-weight: normal } pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
.chosen { background: #e6f4e6 } .author { background: #f2f2f2 }
</style>
<h1>What the teachers would have done</h1>
"""


class Page:
    """Gathers the first `MAX_STATES` decisions that pass, and writes them."""

    def __init__(self) -> None:
        self._sections: list[str] = []
        self._num_states = 0

    def watch(self, decisions: Iterable[DecidedState]) -> Iterator[DecidedState]:
        """The decisions, unchanged."""
        for decision in decisions:
            self._num_states += 1
            if self._num_states <= MAX_STATES:
                self._sections.append(section(decision))
            yield decision

    def text(self) -> str:
        """The whole page, which needs no other file."""
        said = f"States: {self._num_states:,}"
        if self._num_states > MAX_STATES:
            said += f", of which the first {MAX_STATES:,} are shown"
        return f"{_HEAD}<p>{said}. Green: the teachers' consensus.</p>\n" + "".join(self._sections)

    def write(self, path: Path) -> None:
        """Replace the file. Raises BadInput where it can't be written."""
        beside = path.with_name(f"{path.name}.part")
        try:
            beside.write_text(self.text(), encoding="utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise BadInput(f"{path} can't be written: {error}: name a file in a folder that is there") from error


def section(decision: DecidedState) -> str:
    """One state as HTML: whatever its texts hold, they stay text."""
    state = decision.state
    seen = state.messages[-1] if state.messages else {}
    author = f"the author, {state.author}" if state.author else "the author"
    rows = [
        _row("", f"saw last ({seen.get('role', 'nothing')})", text_of(seen)),
        _row("chosen" if decision.is_agreed else "author", author, told(state.action)),
    ]
    for vote in decision.votes:
        answer, is_chosen = vote.ballot.answer, decision.chose(vote) == "agreed"
        who = f"{answer.teacher}, {answer.model}, weight {vote.weight:.3g}"
        rows.append(_row("chosen" if is_chosen else "", who, told(answer.action)))
    heading = f"{state.session} · turn {state.turn} · {_outcome(decision)}"
    return f"<h2>{_escaped(heading)}</h2>\n<table>{''.join(rows)}</table>\n"


def _outcome(decision: DecidedState) -> str:
    if decision.score is None:
        return "no answers"
    agree = f"{decision.score:.0%} agree with the author"
    if decision.consensus is None:
        return f"no consensus, {agree}"
    near = ", but only of the student's or the author's family" if decision.consensus.circular else ""
    return agree if decision.is_agreed else f"{decision.consensus.support:.0%} agree on another action{near}, {agree}"


def told(action: Message) -> str:
    """A message's text and its calls, as a person reads them."""
    calls = [f"{call['function']['name']} {call['function'].get('arguments', '')}" for call in calls_of(action)]
    return "\n".join(part for part in (text_of(action), *calls) if part)


def _row(style: str, who: str, text: str) -> str:
    return f'<tr class="{style}"><th>{_escaped(who)}</th><td><pre>{_escaped(text)}</pre></td></tr>\n'


def _escaped(text: str) -> str:
    return html.escape(visible(text, MAX_SHOWN, lines=True))
