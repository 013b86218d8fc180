"""`composer-prime export | follow`: a run's masters as a Hugging Face folder, here, in a bucket or on the hub."""

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from composer_prime.cli.options import StoreArgument, check_run
from composer_prime.visible import say

ModelOption = Annotated[
    str, typer.Option("--model", help='The model the run was created from: a folder, a Hugging Face id, or "tiny".')
]
DtypeOption = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="Of the weights.")]
AlphaOption = Annotated[float | None, typer.Option("--lora-alpha", help="alpha of a run that trains LoRA adapters.")]


def export(
    store: StoreArgument,
    to: Annotated[str, typer.Option(help="A new folder, s3://bucket/prefix or hf://namespace/name.")],
    model: ModelOption,
    version: Annotated[int | None, typer.Option(min=0, help="Rounds of training; default: the newest stored.")] = None,
    dtype: DtypeOption = "bfloat16",
    lora_alpha: AlphaOption = None,
    recipe: Annotated[
        Path | None, typer.Option(help="The run's recipe: compare its renderer with the template.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new hub repository private.")] = False,
) -> None:
    """Write a run's weights as transformers and vLLM load them, each checked by its hash. The bucket is only read."""
    import tempfile

    check_run(store)
    if recipe is not None:
        _check_template(recipe, model)
    from composer_prime.export import snapshot
    from composer_prime.store import open_store

    def write(folder: Path) -> str:
        return _write(store, folder, model, version, dtype, lora_alpha)

    if "://" not in to:
        folder = Path(to).expanduser().absolute()
        snapshot.check_new_folder(folder)
        say(f"{write(folder)} to {folder}")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="composer-prime-export-"))) / "snapshot"
        if to.startswith(snapshot.SCHEME):
            repository = snapshot.parse_repository(to)
            snapshot.check_installed()
            what = write(folder)
            say(f"{what} to {snapshot.upload(folder, repository, what, private=private)}")
            return
        target = stack.enter_context(closing(open_store(to)))
        snapshot.check_new_place(target)
        what = write(folder)
        snapshot.put_folder(folder, target)
        say(f"{what} to {target.uri}")


def _check_template(file: Path, model: str) -> None:
    """Raise ConfigError where a recipe's renderer writes otherwise than the chat template that is exported."""
    from composer_prime.config import Recipe, load_any
    from composer_prime.config.paths import models_cache
    from composer_prime.config.recipe import RendererConfig
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.sites.embedded.renderer_choice import check_renderer

    read = load_any(file)
    renderer = read.orchestrator.renderer if isinstance(read, Recipe) else read.upstream_value("orchestrator.renderer")
    check_renderer(RendererConfig.model_validate(renderer or {}), model, resolve_model(model, 0, models_cache()))


def _write(store: str, folder: Path, model: str, version: int | None, dtype: str, lora_alpha: float | None) -> str:
    """Write the snapshot, and say which it is."""
    from composer_prime.config.paths import models_cache
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.snapshot import card_of, describe, fill_from_masters, open_model, write_folder
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.store import open_store

    with closing(open_store(store)) as opened, closing(MasterReader(opened)) as reader:
        chosen = reader.newest_version() if version is None else version
        reader.check_version(chosen)
        target = open_model(reader, resolve_model(model, 0, models_cache()), model, dtype, lora_alpha=lora_alpha)
        record = describe(reader, target, fill_from_masters(reader, target, chosen))
        write_folder(target, record, folder, card_of(reader, target, record, model))
    return f"exported {record.run} version {record.version} in {record.dtype}"


def follow(
    store: StoreArgument,
    model: ModelOption,
    folder: Annotated[Path, typer.Option("--dir", help="Where snapshots are kept.")],
    server: Annotated[
        str | None, typer.Option(help="Root URL of a server that sees --dir under the same path.")
    ] = None,
    api: Annotated[
        Literal["prime-rl", "vllm"], typer.Option(help="What the server is: prime-rl (also ours), or a plain vllm.")
    ] = "prime-rl",
    dtype: DtypeOption = "bfloat16",
    poll_s: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the bucket.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="End when folder and server are at the newest version.")] = False,
) -> None:
    """Keep a folder, and an inference server, at a run's newest weights, until Ctrl-C. The bucket is only read."""
    check_run(store)

    from composer_prime.config.paths import models_cache
    from composer_prime.export.following import Follower
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.server import WeightServer
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.sites.embedded.processes import catch_interrupt
    from composer_prime.store import open_store

    with ExitStack() as stack:
        told = None if server is None else stack.enter_context(closing(WeightServer(server, api)))
        opened = stack.enter_context(closing(open_store(store)))
        reader = stack.enter_context(closing(MasterReader(opened)))
        base = resolve_model(model, 0, models_cache())
        follower = Follower(reader, base, dtype, folder.absolute(), told, say=say)
        interrupt = stack.enter_context(catch_interrupt())
        while not interrupt.is_set and not (follower.look() and once):
            deadline = time.monotonic() + poll_s
            while not interrupt.is_set and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
