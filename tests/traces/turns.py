"""verifiers traces made by hand: message nodes with token ids, as verifiers leaves them on a finished rollout."""

from collections.abc import Sequence
from typing import Any

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace


def node(
    parent: int | None,
    role: str,
    token_ids: Sequence[int],
    *,
    num_sampled: int = 0,
    content: str = "",
    body: Sequence[int] = (),
    **fields: Any,
) -> MessageNode:
    """One message: its last `num_sampled` tokens were sampled; `body` are the places of its content tokens."""
    message = {"role": role, "content": content, **fields}
    if role == "tool":
        message.setdefault("tool_call_id", "call")
    count = len(token_ids)
    return MessageNode.model_validate(
        {
            "parent": parent,
            "message": message,
            "sampled": num_sampled > 0,
            "token_ids": list(token_ids),
            "mask": [place >= count - num_sampled for place in range(count)],
            "is_content": [place in body for place in range(count)] if body else [],
            "logprobs": [-1.0] * num_sampled,
        }
    )


def trace(*nodes: MessageNode) -> WireTrace:
    """A finished trace of these nodes."""
    made = WireTrace.model_validate({"task": {"type": "Task", "data": {}}, "agent": {"config": {}}})
    made.nodes = list(nodes)
    return made
