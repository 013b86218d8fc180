"""`composer-prime gateway`: lets volunteers take part in a run whose bucket's keys can't be handed out."""

from typing import Annotated

import typer

from composer_prime.cli.options import AllowOption, StoreArgument
from composer_prime.visible import say


def gateway(
    store: StoreArgument,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8790,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests a second that one site may make; 4 times as many at once.")
    ] = 50,
    total_rate: Annotated[
        float, typer.Option(min=1, help="Requests a second of all sites together; twice at once.")
    ] = 500,
    max_object_mib: Annotated[int, typer.Option(min=1, max=5120, help="Largest payload that is taken, MiB.")] = 1024,
    behind_tls: Annotated[
        bool, typer.Option("--behind-tls", help="A reverse proxy on another machine speaks TLS.")
    ] = False,
    allow: AllowOption = None,
) -> None:
    """Serve one run to volunteers, who sign their requests and get presigned URLs, until Ctrl-C. Several may run.

    The run must admit keys. Put a reverse proxy (nginx, caddy) with TLS in front. Standard output gets a line of JSON
    about each request.
    """
    from composer_prime.gateway.limits import Rate, Rates
    from composer_prime.gateway.serving import serve

    serve(
        store,
        host,
        port,
        behind_tls=behind_tls,
        rates=Rates(site=Rate(rate, 4 * rate), gateway=Rate(total_rate, 2 * total_rate)),
        max_object_bytes=max_object_mib * 2**20,
        allowed=allow or (),
        say=lambda line: say(line, err=True),
        note=say,
    )
