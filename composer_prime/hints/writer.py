"""Hints written by a model: it reads the task, the call and its error, and says in a sentence what to do instead.

Any server with OpenAI's chat completions will do. It is told not to solve the task; whether its hint holds the answer
is looked at by whoever teaches with it.
"""

import os
from collections.abc import Mapping

from composer_prime.config.teachers import HintWriterConfig
from composer_prime.redaction import Redactor, secret_values
from composer_prime.teachers.served import ServedModel

MAX_TOKENS = 80
"""Of a hint."""
_MAX_TEXT = 2000
"""Characters of the task, of the call and of its answer that the writer reads."""

_TASK = (
    "An agent's tool call has failed. Say in one short sentence what the agent should do instead of this call. "
    "Speak to the agent. Don't solve its task and don't state any result."
)


class HintWriter:
    """Asks one served model. `close` it in the end."""

    def __init__(self, config: HintWriterConfig, environment: Mapping[str, str] = os.environ) -> None:
        key = environment.get(config.api_key_var) if config.api_key_var is not None else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._redactor = Redactor(secret_values(environment))
        self._server = ServedModel(config.base_url, model=config.model, headers=headers)

    async def write(self, task: str, call: str, answer: str) -> str:
        """One hint, on one line. Raises TeacherError when there is none."""
        task, call, answer = (self._redactor.text(text)[:_MAX_TEXT] for text in (task, call, answer))
        told = f"Task:\n{task}\n\nCall:\n{call}\n\nAnswer:\n{answer}"
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": told}]
        return " ".join((await self._server.reply(messages, MAX_TOKENS)).split())

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()
