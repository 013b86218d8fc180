"""The context with the hint in it: the rollout's own token ids, the hint's at the end of the message before the call.

Nothing is rendered or tokenized anew but the hint, so the sampled token ids are exactly the rollout's, and the only
change before them is the hint. It stands inside a user's or a tool's message, which every chat template allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_prime.config.teachers import HintKind, OutcomeKind
from composer_prime.hints.answers import LINE_CHARS
from composer_prime.hints.error_sites import ErrorSite

TEMPLATES: Mapping[HintKind | OutcomeKind, str] = {
    "unknown_tool": (
        "Hint: if you go on as planned, you call a tool that isn't there: {error}\nCall one of the tools that you were "
        "given, by its exact name."
    ),
    "bad_arguments": (
        "Hint: if you now call {tool} as planned, it refuses the arguments: {error}\nCheck their names, types and "
        "values against the tool's description, and write valid JSON."
    ),
    "timeout": (
        "Hint: if you now call {tool} as planned, it doesn't end in time: {error}\nAsk for less at once, and start "
        "nothing that waits for input."
    ),
    "traceback": (
        "Hint: if you now call {tool} as planned, it raises {error}\nFind the argument or the line that leads to this, "
        "and change it first."
    ),
    "exit_code": (
        "Hint: if you now call {tool} as planned, it fails: {error}\nCheck names, paths and options against what is "
        "there first."
    ),
    "error": (
        "Hint: if you now call {tool} as planned, it answers: {error}\nHeed what this says about the arguments, and "
        "change them first."
    ),
}
"""What a recipe's `hints.templates` leaves out. Of failed tests none is taught: the call that runs them is right."""


@dataclass(frozen=True)
class HintedContext:
    """A token sequence to be scored for one turn.

    token_ids  the conversation up to the turn's last sampled token, the hint in it
    places     where the turn's sampled tokens stand in it
    node       the turn's node
    said       the sampled tokens of each turn before it
    hint_ids   what was put in
    tail       tokens between the hint and the turn's first sampled one
    """

    token_ids: list[int]
    places: list[int]
    node: Any
    said: list[list[int]]
    hint_ids: list[int]
    tail: int


def hint_text(
    site: ErrorSite, templates: Mapping[HintKind | OutcomeKind, str], written: str | None = None
) -> str | None:
    """The hint for one error, to follow the words of the message before the call: a template of the recipe's, else what
    the environment says itself, else what a model has written, else our template. None: its kind has none."""
    if (hint := site.hint or written) is not None and site.kind not in templates:
        return f"\n\nHint: {hint}"
    template = templates.get(site.kind, TEMPLATES.get(site.kind))
    tool = (site.tool_name or "the tool")[:LINE_CHARS]
    return None if template is None else "\n\n" + template.format(error=site.line, tool=tool)


def hinted_context(nodes: Sequence[Any], site: ErrorSite, hint_ids: Sequence[int]) -> HintedContext | None:
    """The context of `site.turn` with `hint_ids` after the last token of the body of the message before it.

    None when that is no user's or tool's message, or nobody said which of its tokens are its body: the renderer doesn't
    tell, or the rollout carries no tokens for it.
    """
    *before, last = _path(nodes, site.turn)
    if not before or nodes[before[-1]].message.role not in ("user", "tool"):
        return None
    body = [place for place, is_content in enumerate(nodes[before[-1]].is_content) if is_content]
    if not body:
        return None
    cut = body[-1] + 1
    told = nodes[before[-1]].token_ids
    token_ids = [token for index in before[:-1] for token in nodes[index].token_ids]
    token_ids += [*told[:cut], *hint_ids, *told[cut:]]
    turn = nodes[last]
    sampled = [place for place, is_sampled in enumerate(turn.mask) if is_sampled]
    places = [len(token_ids) + place for place in sampled]
    whole = [*token_ids, *turn.token_ids[: sampled[-1] + 1]]
    return HintedContext(
        list(map(int, whole)),  # the next verifiers has numpy's
        places,
        turn,
        said=[sampled_ids(node) for node in nodes[:last] if node.sampled and any(node.mask)],
        hint_ids=list(hint_ids),
        tail=len(told) - cut + sampled[0],
    )


def sampled_ids(node: Any) -> list[int]:
    """A node's sampled tokens."""
    return [int(token) for token, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]


def _path(nodes: Sequence[Any], last: int) -> list[int]:
    """Indices of the nodes from the root to `last`."""
    path, place = [], last
    while place is not None:
        path.append(place)
        place = nodes[place].parent
    return path[::-1]
