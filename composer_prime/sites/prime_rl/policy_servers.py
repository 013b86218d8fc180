"""The servers of the policy that a rollout names, asked for logprobs by an environment under PRIME-RL."""

import os
from typing import Any

from composer_prime.teachers.served import ServedModel


class PolicyServers:
    """One connection for each address and name. `close` it in the end."""

    def __init__(self) -> None:
        self._served: dict[tuple[str, str], ServedModel] = {}

    def at(self, client: Any, model: str) -> ServedModel:
        """The model of this name at a verifiers client configuration's address, with its key and headers."""
        key = (client.base_url, model)
        if key not in self._served:
            api_key = os.environ.get(client.api_key_var)
            headers = {**client.headers, **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
            root = client.base_url.rstrip("/").removesuffix("/v1")
            self._served[key] = ServedModel(root, model=model, headers=headers)
        return self._served[key]

    async def close(self) -> None:
        """Close the connections."""
        for served in self._served.values():
            await served.close()
