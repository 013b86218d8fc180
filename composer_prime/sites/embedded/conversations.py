"""Some of a site's rollouts as people read them: what was said, which tools were called, what was taught.

The orchestrator writes a few a step beside its metrics; `composer-prime rollouts` and the end of a run show them. They
are for reading alone: nothing trains on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from composer_prime.config.paths import RunPaths
from composer_prime.redaction import Redactor, secret_values
from composer_prime.visible import visible

if TYPE_CHECKING:
    import verifiers.v1 as vf

SHOWN_A_STEP = 4
"""Rollouts that are written of a step: the first of each group, and no more than these."""
MAX_TEXT = 4000
"""Characters of one message that are kept."""
_MAX_DRAWN = 800
"""Characters of a message that are drawn."""
_STYLES = {"assistant": "cyan", "tool": "yellow"}


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    calls   of tools, as "name(arguments)".
    tokens  that the policy sampled for it.
    taught  of them carry a teacher's word, from `[[replay.teachers]]` or `[hints]`.
    """

    role: str
    text: str
    calls: tuple[str, ...] = ()
    tokens: int = 0
    taught: int = 0


@dataclass(frozen=True)
class Conversation:
    """One rollout: what it was about, what came of it."""

    step: int
    source: str
    reward: float
    messages: tuple[Message, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def has_tools(self) -> bool:
        """Whether a tool was called."""
        return any(message.calls for message in self.messages)


def read_messages(trace: vf.Trace) -> tuple[Message, ...]:
    """A trace's last branch: the conversation as it ended."""
    if not trace.branches:
        return ()
    return tuple(_read(node) for node in trace.branches[-1].nodes)


def _read(node: Any) -> Message:
    message = node.message
    content = message.content if isinstance(message.content, str) else _join(message.content)
    calls = [f"{call.name}({call.arguments})" for call in getattr(message, "tool_calls", None) or []]
    return Message(message.role, content, tuple(calls), int(sum(node.mask)), _num_taught(node))


def _num_taught(node: Any) -> int:
    candidates = getattr(node, "routed_experts", None)
    if candidates is not None:
        return int(candidates[:, 0::2, 0].any(axis=1).sum())
    references = getattr(node, "reference_logprobs", None)
    return 0 if references is None else int(sum(ref != 0.0 for ref in references))


def _join(parts: Any) -> str:
    return "\n".join(part.text for part in parts or [] if getattr(part, "type", None) == "text")


def append(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations at the end of a file, one JSON line each, without secrets, and then cut."""
    redactor = Redactor(secret_values(os.environ))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(_short(redactor.data(asdict(each)))) + "\n" for each in conversations)


def _short(data: Any) -> Any:
    for message in data["messages"]:
        message["text"] = message["text"][:MAX_TEXT]
        message["calls"] = [call[:MAX_TEXT] for call in message["calls"]]
    return data


def drop(path: Path, first_step: int) -> None:
    """Leave out what a site that resumes will play again: the conversations of `first_step` and later ones."""
    kept = [each for each in read(path) if each.step < first_step]
    path.unlink(missing_ok=True)
    append(path, kept)


def read(path: Path) -> list[Conversation]:
    """The conversations of a file, in order; none where there is no file."""
    found: list[Conversation] = []
    with suppress(FileNotFoundError, ValueError):  # a last line that is still written
        for line in path.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            messages = tuple(Message(**{**each, "calls": tuple(each["calls"])}) for each in data.pop("messages"))
            found.append(Conversation(**data, messages=messages))
    return found


def draw(conversation: Conversation, site: str) -> Panel:
    """One conversation in a box: a line a message, calls behind an arrow, what was taught marked.

    Whatever policy, tools and environments said is spelled where it isn't text.
    """
    title = f"site {site} step {conversation.step} {conversation.source}: reward {conversation.reward:.2f}"
    lines = [line for message in conversation.messages for line in _drawn_lines(message)]
    return Panel(Group(*lines), title=Text(visible(title)), title_align="left", expand=False)


def _drawn_lines(message: Message) -> list[Text]:
    texts = [visible(message.text, _MAX_DRAWN, lines=message.role != "tool")] if message.text else []
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
