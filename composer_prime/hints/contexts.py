"""The context with the hint in it: the rollout's own token ids, and the hint's at the end of the tool's message.

Nothing is rendered or tokenized anew but the hint, so the sampled token ids are exactly the rollout's, and the only
change before them is the hint. It stands inside the tool's message, which every chat template allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.config.teachers import HintKind
from composer_prime.hints.error_sites import ErrorSite

TEMPLATES: Mapping[HintKind, str] = {
    "traceback": (
        "Hint: {tool} raised an exception: {error}\nThe last line of the traceback names the cause. Find the argument "
        "or the line that led to it and change that; the same call again fails the same way."
    ),
    "exit_code": (
        "Hint: {tool} failed: {error}\nRead its message before the next step. Check names, paths and options against "
        "what is there, then repair the cause; the same command again fails the same way."
    ),
    "error": (
        "Hint: {tool} answered with an error: {error}\nThe call was refused or failed. Look at what it says about the "
        "arguments, and change them before trying again."
    ),
}
"""What a recipe's `hints.templates` leaves out."""


@dataclass(frozen=True)
class HintedContext:
    """A token sequence to be scored for one turn.

    token_ids  the conversation up to the turn's last sampled token, the hint in it
    places     where the turn's sampled tokens stand in it
    node       the turn's node
    """

    token_ids: list[int]
    places: list[int]
    node: Any


def hint_text(site: ErrorSite, templates: Mapping[HintKind, str]) -> str:
    """The hint for one error, as it follows the tool's own words."""
    template = templates.get(site.kind, TEMPLATES[site.kind])
    return "\n\n" + template.format(error=site.line, tool=site.tool_name or "the tool")


def hinted_context(nodes: Sequence[Any], site: ErrorSite, hint_ids: Sequence[int]) -> HintedContext | None:
    """The context of `site.turn` with `hint_ids` after the last token of the tool message's body.

    None when nobody said which of the tool message's tokens are its body: the renderer doesn't tell, or the rollout
    carries no tokens for it.
    """
    tool = nodes[site.tool]
    body = [place for place, is_content in enumerate(tool.is_content) if is_content]
    if not body:
        return None
    token_ids: list[int] = []
    for index in _path(nodes, site.turn)[:-1]:
        cut = body[-1] + 1 if index == site.tool else len(nodes[index].token_ids)
        token_ids += nodes[index].token_ids[:cut]
        if index == site.tool:
            token_ids += [*hint_ids, *tool.token_ids[cut:]]
    turn = nodes[site.turn]
    sampled = [place for place, is_sampled in enumerate(turn.mask) if is_sampled]
    places = [len(token_ids) + place for place in sampled]
    return HintedContext([*token_ids, *turn.token_ids[: sampled[-1] + 1]], places, turn)


def _path(nodes: Sequence[Any], last: int) -> list[int]:
    """Indices of the nodes from the root to `last`."""
    path, place = [], last
    while place is not None:
        path.append(place)
        place = nodes[place].parent
    return path[::-1]
