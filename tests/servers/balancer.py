"""A load balancer on a loopback port: connections go to the backends in turn, and past those that don't answer."""

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.servers.forward_proxy import relay
from tests.servers.listening import listening


@contextmanager
def balancer(backends: Sequence[int]) -> Iterator[int]:
    """The port of one in front of these ports of this machine, until the block ends."""
    turns = itertools.count()

    def answer(client: socket.socket) -> None:
        turn = next(turns)
        with client:
            for number in range(len(backends)):
                port = backends[(turn + number) % len(backends)]
                with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as backend:
                    back = threading.Thread(target=relay, args=(backend, client), daemon=True)
                    back.start()
                    relay(client, backend)
                    back.join()
                    return

    with listening(answer) as port:
        yield port
