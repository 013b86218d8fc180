"""A load balancer on a loopback port: connections go to the backends in turn, and past those that don't answer."""

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.servers.forward_proxy import relay


@contextmanager
def balancer(backends: Sequence[int]) -> Iterator[int]:
    """The port of one in front of these ports of this machine, until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    turns = itertools.count()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=answer, args=(client, next(turns)), daemon=True).start()

    def answer(client: socket.socket, turn: int) -> None:
        with client:
            for number in range(len(backends)):
                port = backends[(turn + number) % len(backends)]
                with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as backend:
                    back = threading.Thread(target=relay, args=(backend, client), daemon=True)
                    back.start()
                    relay(client, backend)
                    back.join()
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
