"""`composer-prime follow` and `publish`: a machine that only serves a run's weights, and who helps it."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.export import AlphaOption, DtypeOption, ModelOption
from composer_prime.cli.store_arg import StoreArgument, check_run
from composer_prime.visible import say

PollOption = Annotated[float, typer.Option("--poll-s", min=0.05, help="Seconds between two looks at the bucket.")]


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
    poll_s: PollOption = 2.0,
    patience_s: Annotated[
        float, typer.Option("--patience-s", min=0, help="How long late deltas are waited for, before whole masters.")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="End when folder and server are at the newest version.")] = False,
) -> None:
    """Keep a folder, and an inference server, at a run's newest weights, until Ctrl-C. The bucket is only read."""
    check_run(store)
    from composer_prime.config.paths import models_cache
    from composer_prime.export.bits import dtype_of
    from composer_prime.export.following import Follower
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.server import WeightServer, check_api
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.store import open_store

    dtype_of(dtype)
    with ExitStack() as stack:
        told = None if server is None else stack.enter_context(closing(WeightServer(server, check_api(api))))
        opened = stack.enter_context(closing(open_store(store)))
        reader = stack.enter_context(closing(MasterReader(opened)))
        base = resolve_model(model, 0, models_cache())
        follower = Follower(reader, base, dtype, folder.absolute(), told, patience_s=patience_s, say=say)
        _repeat(lambda: follower.look() and once, poll_s)


def publish(
    store: StoreArgument,
    dtype: DtypeOption = "bfloat16",
    name: Annotated[str, typer.Option("--site", help="The name this publisher signs as.")] = "publisher",
    key: Annotated[
        Path | None, typer.Option("--key", help="Its private key file, in a run that admits keys.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The run's base model: publish whole folders too.", show_default=False),
    ] = None,
    lora_alpha: AlphaOption = None,
    poll_s: PollOption = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Publish what is due and end.")] = False,
) -> None:
    """Leave deltas between a run's snapshots in its bucket, and whole folders if asked to; ends with the run."""
    check_run(store)
    from composer_prime.config.paths import models_cache
    from composer_prime.errors import StoreError
    from composer_prime.export.publishing import Publisher
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.shelf import Shelf
    from composer_prime.export.snapshot import open_model
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.store import open_store
    from composer_prime.sync.signatures import SigningKey

    signing = None if key is None else SigningKey.load(key)
    with closing(open_store(store)) as opened, closing(MasterReader(opened, signing)) as reader:
        publisher = Publisher(reader, dtype, name)
        shelf = None
        if model is not None:
            base = resolve_model(model, 0, models_cache())
            shelf = Shelf(reader, open_model(reader, base, model, dtype, lora_alpha=lora_alpha), model)

        def look() -> bool:
            try:
                steps = publisher.tick()
                shelved = None if shelf is None else shelf.tick()
            except StoreError as error:
                if once:
                    raise
                say(f"the bucket can't be read or written now, looking again soon: {error}")
                return False
            for step in steps:
                say(
                    f"fragment {step.fragment} version {step.base_version} to {step.version}: {step.changed:,} weights "
                    f"changed, {step.nbytes:,} bytes"
                )
            if shelved is not None:
                say(f"whole folder at {opened.uri}/{shelved}")
            return once or publisher.is_final

        _repeat(look, poll_s)


def _repeat(look: Callable[[], bool], poll_s: float) -> None:
    """Look every `poll_s` seconds until it says that it is done, or somebody stops us."""
    import time

    from composer_prime.sites.embedded.interrupt import catch_interrupt

    with catch_interrupt() as interrupt:
        while not interrupt.is_set and not look():
            deadline = time.monotonic() + poll_s
            while not interrupt.is_set and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
