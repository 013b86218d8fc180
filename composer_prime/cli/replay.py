"""`composer-prime replay`: from stored traces to pairs, and servers that stand for a teacher."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from composer_prime.cli import replay_ask, replay_ingest, replay_pairs

app = typer.Typer(
    help="From traces to what teachers would have done; and servers that stand for a teacher.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
replay_ingest.register(app)
replay_ask.register(app)
replay_pairs.register(app)
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Loopback port to listen on.")]


@app.command("serve")
def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Traces with token ids: .jsonl, or .jsonl.zst.")],
    port: PortOption,
    model: Annotated[str, typer.Option(help="The name to serve them under.")] = "replay",
) -> None:
    """Answer PRIME-RL's `sft` source with the tokens that a teacher wrote, until Ctrl-C."""
    from composer_prime.sites.embedded.ports import HOST, listen
    from composer_prime.traces.serve import Library, serve_library
    from composer_prime.traces.turns import read_turns

    with listen(port, "--port") as listener:
        library = Library(read_turns(file))
        typer.echo(f"{library.num_turns} turns for {library.num_prompts} prompts, as {model} on http://{HOST}:{port}")
        with contextlib.suppress(KeyboardInterrupt):
            serve_library(library, model, listener)


@app.command("teacher")
def teacher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help='A folder, a Hugging Face id, or "tiny".')],
    port: PortOption,
    weights: Annotated[
        Path | None, typer.Option(help="A folder of safetensors in place of MODEL's own, such as a run's broadcast.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of a model that is made here; the run's own is its first policy.")
    ] = 0,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest sequence, and one more.")] = 4096,
    device: Annotated[str, typer.Option(help="Where it is, as site.device: cpu, cuda or mps.")] = "cpu",
    permuted: Annotated[
        bool, typer.Option("--permuted", help="Its logits permuted over the vocabulary: a control.")
    ] = False,
) -> None:
    """Serve a model on this machine as a teacher for `[[replay.teachers]]`, until Ctrl-C."""
    from composer_prime.sites.embedded.ports import HOST, listen

    with listen(port, "--port") as listener:
        from composer_prime.config.paths import models_cache
        from composer_prime.sites.embedded.inference.serve import serve_teacher
        from composer_prime.sites.embedded.model import resolve_model

        folder = resolve_model(model, seed, models_cache(), device=device)
        typer.echo(f"teacher {model} on http://{HOST}:{port}")
        with contextlib.suppress(KeyboardInterrupt):
            serve_teacher(
                folder,
                model,
                listener,
                max_model_len=max_model_len,
                weights=weights,
                device=device,
                is_permuted=permuted,
            )
