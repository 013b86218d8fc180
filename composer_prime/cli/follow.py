"""`composer-prime follow`: a machine that only serves a run's weights."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.export import DtypeOption, ModelOption
from composer_prime.cli.store_arg import StoreArgument, check_run
from composer_prime.visible import say


def follow(
    store: StoreArgument,
    model: ModelOption,
    folder: Annotated[Path, typer.Option("--dir", help="Where snapshots are kept.", show_default=False)],
    server: Annotated[
        str | None,
        typer.Option("--server", help="Root URL of a server that sees --dir under the same path.", show_default=False),
    ] = None,
    api: Annotated[str, typer.Option("--api", help="What the server is: prime-rl (also ours), or a plain vllm.")] = (
        "prime-rl"
    ),
    dtype: DtypeOption = "bfloat16",
    poll_s: Annotated[float, typer.Option("--poll-s", min=0.05, help="Seconds between two looks at the bucket.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="End when folder and server are at the newest version.")] = False,
) -> None:
    """Keep a folder, and an inference server, at a run's newest weights, until Ctrl-C. The bucket is only read."""
    check_run(store)
    import time

    from composer_prime.config.paths import models_cache
    from composer_prime.export.bits import dtype_of
    from composer_prime.export.following import Follower
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.server import WeightServer, check_api
    from composer_prime.sites.embedded.interrupt import catch_interrupt
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.store import open_store

    dtype_of(dtype)
    with ExitStack() as stack:
        told = None if server is None else stack.enter_context(closing(WeightServer(server, check_api(api))))
        opened = stack.enter_context(closing(open_store(store)))
        reader = stack.enter_context(closing(MasterReader(opened)))
        base = resolve_model(model, 0, models_cache())
        follower = Follower(reader, base, dtype, folder.absolute(), told, say=say)
        interrupt = stack.enter_context(catch_interrupt())
        while not interrupt.is_set and not (follower.look() and once):
            deadline = time.monotonic() + poll_s
            while not interrupt.is_set and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
