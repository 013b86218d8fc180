"""Chats by a model's own template, a program that somebody else wrote: one that loops is ended."""

import sys
import time
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

LIMIT_S = 10.0
"""Of this thread's own time, for one chat; honest templates take milliseconds."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[Any], **options: Any) -> str:
    """The chat with its generation prompt. Raises TimeoutError after LIMIT_S, else what the template raises.

    The clock is looked at on each of the template's lines and at each call: one operation that takes for ever isn't
    ended.
    """
    until, before = time.thread_time() + LIMIT_S, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > until:
            raise TimeoutError(f"it takes more than {LIMIT_S:g} s")
        return watch if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))
    finally:
        sys.settrace(before)
