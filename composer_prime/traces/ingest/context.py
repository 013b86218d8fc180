"""What a model was shown at a call: each result directly after the turn that called for it, wherever the log has it."""

from collections.abc import Sequence

from composer_prime.traces.states import Message, calls_of, text_of

NO_RESULT = "[no result was logged]"
"""Stands for the result of a call that the log never answers."""
IMAGE = "[image]"
OTHER = "[other content]"
"""What stands for the parts of a message that aren't text."""


def stands_in(message: Message) -> bool:
    """Whether a part of the message is one that text can't say."""
    return any(line in (IMAGE, OTHER) for line in text_of(message).split("\n"))


def in_order(messages: Sequence[Message]) -> list[Message]:
    """The messages of a branch as a model is shown them.

    The results of a turn's calls follow it in the order of the calls, with `NO_RESULT` for those that have none. A
    result belongs to the nearest call before it with its id; one without a call is what a user shows.
    """
    results: dict[tuple[int, int], Message] = {}
    open_calls: dict[str, list[tuple[int, int]]] = {}
    turns: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            for number, call in enumerate(calls_of(message)):
                open_calls.setdefault(call["id"], []).append((len(turns), number))
            turns.append(message)
        elif waiting := open_calls.get(message["tool_call_id"]):
            results[waiting.pop()] = message
        else:
            turns.append({"role": "user", "content": message["content"]})
    shown: list[Message] = []
    for place, message in enumerate(turns):
        shown.append(message)
        for number, call in enumerate(calls_of(message)):
            missing = {"role": "tool", "content": NO_RESULT, "tool_call_id": call["id"]}
            shown.append(results.get((place, number), missing))
    return shown
