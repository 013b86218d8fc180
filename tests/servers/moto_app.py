"""moto's server, one write at a time: `python moto_app.py PORT`.

moto looks whether a key exists and then writes it, with a thread for each request, so that two conditional writes can
both find nothing. A real S3 lets one of them win, and what we test is our side of that.
"""

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class OneWriteAtATime:
    """A WSGI application in which no request that may change anything meets another such."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._app(environ, start_response)
        with self._writing:
            return self._app(environ, start_response)


def main(port: int) -> None:
    """Serve until killed."""
    app = OneWriteAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(int(sys.argv[1]))
