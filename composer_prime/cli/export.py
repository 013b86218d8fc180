"""`composer-prime export`: a run's masters as a Hugging Face folder, or a repository on the hub."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli.store_arg import StoreArgument, check_run
from composer_prime.visible import say

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help='The model the run was created from: a folder, a Hugging Face id, or "tiny".',
        show_default=False,
    ),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]

AlphaOption = Annotated[
    float | None, typer.Option("--lora-alpha", help="alpha of a run that trains LoRA adapters.", show_default=False)
]


def export(
    store: StoreArgument,
    to: Annotated[str, typer.Option("--to", help="A new folder, or hf://namespace/name.", show_default=False)],
    model: ModelOption,
    version: Annotated[
        int | None,
        typer.Option("--version", min=0, help="Rounds of training; default: the newest stored.", show_default=False),
    ] = None,
    dtype: DtypeOption = "bfloat16",
    lora_alpha: AlphaOption = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="The run's recipe: compare its renderer with the template.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new hub repository private.")] = False,
) -> None:
    """Write a run's weights as transformers and vLLM load them, each checked by its hash. The bucket is only read."""
    import tempfile

    check_run(store)
    if recipe is not None:
        _check_template(recipe, model)
    from composer_prime.export.hub import SCHEME, check_installed, parse_repository, upload
    from composer_prime.export.snapshot import check_new_folder

    if not to.startswith(SCHEME):
        folder = Path(to).expanduser().absolute()
        check_new_folder(folder)
        say(_write(store, folder, model, version, dtype, lora_alpha) + f" to {folder}")
        return
    repository = parse_repository(to)
    check_installed()
    with tempfile.TemporaryDirectory(prefix="composer-prime-export-") as scratch:
        folder = Path(scratch) / "snapshot"
        what = _write(store, folder, model, version, dtype, lora_alpha)
        say(what + f" to {upload(folder, repository, what, private=private)}")


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
    from composer_prime.export.bits import dtype_of
    from composer_prime.export.reading import MasterReader
    from composer_prime.export.snapshot import card_of, describe, fill_from_masters, open_model, write_folder
    from composer_prime.sites.embedded.model import resolve_model
    from composer_prime.store import open_store

    dtype_of(dtype)
    with closing(open_store(store)) as opened, closing(MasterReader(opened)) as reader:
        chosen = reader.newest_version() if version is None else version
        reader.check_version(chosen)
        target = open_model(reader, resolve_model(model, 0, models_cache()), model, dtype, lora_alpha=lora_alpha)
        record = describe(reader, target, fill_from_masters(reader, target, chosen))
        write_folder(target, record, folder, card_of(reader, target, record, model))
    return f"exported {record.run} version {record.version} in {record.dtype}"
