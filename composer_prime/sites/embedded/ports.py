"""Loopback ports for inference servers: a free one of our choosing, or the recipe's, checked before anything starts.

Ports are drawn below the kernel's ephemeral range, where no outgoing connection (to the bucket, between two
processes of a site) can take one between our check and a server's bind, or while a server restarts.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from composer_prime.config.recipe import Recipe
from composer_prime.errors import BadInput

HOST = "127.0.0.1"
_FIRST, _LAST = 20000, 30000
_MAX_TRIES = 100
_BACKLOG = 2048


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    try:
        listen(port).close()
    except BadInput:
        return False
    return True


def claim_port(fixed: int | None, taken: set[int]) -> int:
    """A free port that isn't in `taken`, which gains it; `fixed` itself where the recipe names one.

    Raises BadInput when `fixed` is in use, or when no free port turns up.
    """
    candidates = [fixed] if fixed is not None else random.sample(range(_FIRST, _LAST), _MAX_TRIES)
    for port in candidates:
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    if fixed is not None:
        raise BadInput(
            f"inference.server.port ({fixed}) is in use on {HOST}: stop what listens there, name another port, "
            "or leave the key out and a free one is taken"
        )
    raise BadInput(f"no free port on {HOST} in {_FIRST}-{_LAST} after {_MAX_TRIES} tries: set inference.server.port")


def claim_ports(recipe: Recipe, sites: Sequence[str]) -> list[int]:
    """A port for each site's server. Raises BadInput when a fixed one is in use.

    A fixed inference.server.port is the first listed site's; the others, and then a joiner, take those after it.
    """
    taken: set[int] = set()
    first, names = recipe.inference.server.port, recipe.site_names
    places = [names.index(site) if site in names else len(names) for site in sites]
    return [claim_port(None if first is None else first + place, taken) for place in places]


def listen(port: int, setting: str = "inference.server.port") -> socket.socket:
    """A socket that listens on that loopback port. Raises BadInput, naming the setting, when something else does."""
    # With the protocol named: asyncio switches Nagle's delay off only then, and a short answer waits 40 ms otherwise.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
    try:
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:  # the port after 65535 is none
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{setting} ({port}) can't be listened on at {HOST}: {why}; stop what uses it, or name another port"
        ) from error
    return listener
