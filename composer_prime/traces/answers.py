"""What a text teacher would have done at a decision point: the record between asking and making pairs."""

from dataclasses import dataclass

from composer_prime.traces.states import Message


@dataclass(frozen=True)
class Answer:
    """One teacher's answer at one decision point.

    state    TraceState.id
    teacher  its name in the teachers' file
    model    the model that answered, as the server names it; it may differ from the one that was asked for
    action   the assistant's message: content, and tool_calls where it calls
    weight   the teacher's share in a vote, greater than 0
    """

    state: str
    teacher: str
    model: str
    action: Message
    weight: float = 1.0
