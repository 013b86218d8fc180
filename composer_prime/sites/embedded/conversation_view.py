"""Draws conversations for a terminal; whatever policy, tools and environments said is spelled where it isn't text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from composer_prime.config.paths import RunPaths
from composer_prime.sites.embedded.conversations import Conversation, Message, read
from composer_prime.visible import visible

_STYLES = {"assistant": "cyan", "tool": "yellow"}
_MAX_SHOWN = 800
"""Characters of a message that are drawn."""


def draw(conversation: Conversation, site: str) -> Panel:
    """One conversation in a box: a line a message, calls behind an arrow, what was taught marked."""
    title = f"site {site} step {conversation.step} {conversation.source}: reward {conversation.reward:.2f}"
    lines = [line for message in conversation.messages for line in _lines(message)]
    return Panel(Group(*lines), title=Text(visible(title)), title_align="left", expand=False)


def _lines(message: Message) -> list[Text]:
    said = (
        visible(message.text, _MAX_SHOWN, lines=True) if message.role != "tool" else visible(message.text, _MAX_SHOWN)
    )
    texts = [said] if message.text else []
    texts += [f"-> {visible(call)}" for call in message.calls]
    style = _STYLES.get(message.role, "")
    taught = f"  [taught: {message.taught} of {message.tokens} tokens]" if message.taught else ""
    lines = [Text(f"{message.role}: {text}", style=style) for text in texts or [""]]
    lines[-1].append(taught, style="magenta")
    return lines


def before_and_after(paths: RunPaths, sites: Sequence[str], console: Console) -> None:
    """Draw one conversation of a site's first step and one of its last, for the first site where tools were called."""
    for site in sites:
        found = read(paths.site(site).conversations)
        if any(each.has_tools for each in found):
            for step in dict.fromkeys((found[0].step, found[-1].step)):
                console.print(draw(_typical([each for each in found if each.step == step]), site))
            return


def _typical(conversations: Sequence[Conversation]) -> Conversation:
    """Of those in which a tool was called, where there are some, the one whose reward is nearest to the mean of all."""
    mean = sum(each.reward for each in conversations) / len(conversations)
    with_tools = [each for each in conversations if each.has_tools]
    return min(with_tools or conversations, key=lambda each: abs(each.reward - mean))
