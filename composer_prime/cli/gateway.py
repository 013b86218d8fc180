"""`composer-prime gateway`: lets volunteers take part in a run whose bucket's keys can't be handed out."""

from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.store_arg import AllowOption, StoreArgument
from composer_prime.visible import say


def gateway(
    store: StoreArgument,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8790,
    audit: Annotated[
        Path | None,
        typer.Option(help="File to append the audit log to, JSON lines; default: standard output.", show_default=False),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests a second that one site may make; 4 times as many at once.")
    ] = 50,
    total_rate: Annotated[
        float, typer.Option(min=1, help="Requests a second of all sites together; twice at once.")
    ] = 500,
    max_object_mib: Annotated[int, typer.Option(min=1, max=5120, help="Largest payload that is taken, MiB.")] = 1024,
    behind_tls: Annotated[
        bool, typer.Option("--behind-tls", help="A reverse proxy speaks TLS; needed for addresses but loopback.")
    ] = False,
    certfile: Annotated[
        Path | None, typer.Option(help="TLS certificate in PEM, if no proxy speaks TLS.", show_default=False)
    ] = None,
    keyfile: Annotated[Path | None, typer.Option(help="Its private key in PEM.", show_default=False)] = None,
    allow: AllowOption = None,
) -> None:
    """Serve one run to volunteers, who sign their requests and get presigned URLs, until Ctrl-C. Several may run.

    The run must admit keys. Listen on 127.0.0.1 and let a reverse proxy (caddy, nginx) speak TLS in front of it.
    """
    from composer_prime.gateway.limits import Rate, Rates
    from composer_prime.gateway.serving import Listening, serve

    serve(
        store,
        Listening(host, port, behind_tls, certfile, keyfile),
        audit=audit,
        rates=Rates(site=Rate(rate, 4 * rate), gateway=Rate(total_rate, 2 * total_rate)),
        max_object_bytes=max_object_mib * 2**20,
        allowed=allow or (),
        say=lambda line: say(line, err=True),
    )
