"""Where a rollout went wrong: the sampled turn whose call failed, told by the message that answers it.

That may be a tool's message, or a user's in harnesses that show a tool's output as one (mini-swe-agent, SWE-agent,
OpenHands, Terminus): of users' messages only those are looked at that begin as such an output does, for what a person
or the policy writes about errors is no error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.config.teachers import HintKind, OutcomeKind
from composer_prime.hints.answers import find_error, find_hint, shows_output


@dataclass(frozen=True)
class ErrorSite:
    """One call that failed, or the last turn of a rollout that earned little.

    turn, answer  indices of nodes: the sampled message that made the call, and the message that shows its error; the
                  turn itself where it is an outcome's
    kind          what it was known by
    line          what tells it best, one line
    tool_name     the tool's name, where a message has it
    hint          what the tool's answer says to do instead, where it is a JSON object with a `hint`; of an outcome what
                  the task says
    """

    turn: int
    answer: int
    kind: HintKind | OutcomeKind
    line: str
    tool_name: str | None
    hint: str | None = None


def error_sites(nodes: Sequence[Any]) -> list[ErrorSite]:
    """The errors in the nodes of a verifiers trace, at most one for each sampled message: its first."""
    sites: dict[int, ErrorSite] = {}
    for answer, node in enumerate(nodes):
        if not _is_answer(node.message):
            continue
        turn = _asked_by(nodes, answer)
        text = text_of(node.message.content)
        if turn is not None and turn not in sites and (found := find_error(text)) is not None:
            name = _tool_name(nodes[turn].message, node.message)
            sites[turn] = ErrorSite(turn, answer, *found, tool_name=name, hint=find_hint(text))
    return [sites[turn] for turn in sorted(sites)]


def outcome_site(trace: Any, hint: str | None) -> ErrorSite | None:
    """The last sampled turn of a trace, by how that ended; None where it ended otherwise."""
    last = max((place for place, node in enumerate(trace.nodes) if node.sampled and any(node.mask)), default=None)
    if last is None:
        return None
    has_call = bool(trace.nodes[last].message.tool_calls)
    if has_call and trace.stop_condition != "max_turns":
        return None
    return ErrorSite(last, last, "out_of_turns" if has_call else "reply", line="", tool_name=None, hint=hint)


def _is_answer(message: Any) -> bool:
    return message.role == "tool" or (message.role == "user" and shows_output(text_of(message.content)))


def _asked_by(nodes: Sequence[Any], answer: int) -> int | None:
    """The sampled message that an answer is to, other answers between them; None: nobody sampled it.

    Where a template renders an earlier turn anew, the answer hangs below a copy of it that isn't sampled.
    """
    place = nodes[answer].parent
    while place is not None and _is_answer(nodes[place].message):
        place = nodes[place].parent
    if place is None or nodes[place].message.role != "assistant":
        return None
    before = (turn for turn in range(answer - 1, -1, -1) if _said(nodes[turn].message) == _said(nodes[place].message))
    return next((turn for turn in (place, *before) if nodes[turn].sampled and any(nodes[turn].mask)), None)


def _said(message: Any) -> Any:
    """What a copy of a turn has in common with it: its calls, or else its words."""
    if message.role != "assistant":
        return None
    return [(call.id, call.name, call.arguments) for call in message.tool_calls or []] or message.content


def _tool_name(turn: Any, answer: Any) -> str | None:
    """As the answer says it, or the call that it answers."""
    named = getattr(answer, "name", None)
    asked = getattr(answer, "tool_call_id", None)
    calls = [call.name for call in turn.tool_calls or [] if call.id == asked]
    return named or next(iter(calls), None)


def text_of(content: Any) -> str:
    """A message's text: what it says, or its parts of type text."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or [] if getattr(part, "type", None) == "text")
