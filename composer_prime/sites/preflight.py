"""Everything that can be known to be wrong with a recipe before anything starts or is made, said at once.

First what needs no import, here. Then a process of its own sets up the environments and plays one rollout of each, with
an answer that is made up: it makes no model and listens nowhere. Nothing is left behind.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from composer_prime.config.paths import RunPaths, run_uri
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.settings import SiteSettings, settle_site
from composer_prime.errors import (
    BadInput,
    ConfigError,
    EnvError,
    FingerprintMismatch,
    ModelError,
    Problems,
    StoreUnusable,
    SystemRefused,
)
from composer_prime.sites.embedded.folder import Claim, claim_run_folder, claim_site_folder
from composer_prime.sites.embedded.installed import check_device, package_checks
from composer_prime.sites.embedded.model import check_name, describe_model
from composer_prime.sites.embedded.ports import claim_ports
from composer_prime.sites.embedded.processes import QUIET_ENV
from composer_prime.sites.embedded.renderer_choice import check_renderer
from composer_prime.sites.embedded.start import import_tokenizers
from composer_prime.sites.embedded.supervisor import lock_site
from composer_prime.store import keys, open_store, probe_store
from composer_prime.store.file import FileStore
from composer_prime.sync.deleting import check_whole
from composer_prime.sync.founding import another_run, changed_terms
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.terms import terms_of
from composer_prime.traces.pairs.encoding import num_equal

PATIENCE_S = 60.0
"""For a rollout whose answer takes no time, and for the engine's Python."""
ROOM_BYTES = 16 * 2**20
"""What must fit into a folder that a run writes to."""
REPLY = "no"
NOWHERE = "http://127.0.0.1:1"
_FIND_VLLM = "import importlib.util as u; u.find_spec('vllm') or exit('No module named vllm')"
_ASKED = {"role": "user", "content": "a"}


class Found(NamedTuple):
    """What a rehearsal finds: what is wrong, what it took, and what can't work well."""

    problems: list[str]
    took: list[str]
    warnings: list[str]


def check(
    recipe: RecipeBase,
    sites: Sequence[str],
    resume: bool = False,
    *,
    joins: bool = False,
    rehearse: Callable[[Recipe, str], Found] | None = None,
) -> tuple[Claim, str]:
    """The run's folder, which nothing was done to yet, and a line on what the checks took, with warnings below it.

    sites      those that start here
    joins      it is one site of a run that may be there already, not a whole new one
    rehearse   what is done after the checks that need no import; None: `rehearsed`

    Raises BadInput, or BadInputs with a line each, for all that is wrong.
    """
    mark, problems, claims = time.monotonic(), Problems(), list[Claim]()
    with problems.noted():
        claims.append((partial(claim_site_folder, site=sites[0]) if joins else claim_run_folder)(recipe, resume=resume))
    for site in sites if resume else ():
        with problems.noted():
            if RunPaths.of(recipe).site(site).root.exists():
                lock_site(RunPaths.of(recipe).site(site)).close()
    is_new = isinstance(recipe, Recipe) and not (joins or resume)
    replaced = any(claim.beats is not None for claim in claims)
    room = partial(check_room, "output_dir", RunPaths.of(recipe).root)
    bucket = partial(check_bucket, recipe, sites[0], new_run=is_new, replaced=replaced)
    lies_below = recipe.outer is not None and recipe.outer.store is None
    problems.gather(
        partial(check_name, recipe.model.name),
        partial(check_key, recipe, sites[0]),
        *([lambda: (room(), bucket())] if lies_below else [room, bucket]),
    )
    if isinstance(recipe, Recipe):
        problems.gather(
            partial(check_shared, recipe),
            *package_checks(recipe),
            partial(check_device, recipe.site.device),
            partial(claim_ports, recipe, sites),
        )
    found, here = Found([], [], []), f"checked: what needs no import in {time.monotonic() - mark:.1f} s"
    if isinstance(recipe, Recipe):
        problems.gather(partial(check_engine, recipe))
        found = (rehearse or rehearsed)(recipe, sites[-1])
        for problem in found.problems:
            problems.note(problem)
    problems.check()
    return claims[0], "\n".join([", ".join([here, *found.took]), *found.warnings])


def check_shared(recipe: Recipe) -> None:
    """Raise ConfigError for a store that another process doesn't see."""
    uri = run_uri(recipe)
    if uri is not None and uri.startswith("memory://"):
        raise ConfigError(
            f"outer.store ({uri}) lives in one process, and a site's trainer is a process of its own: name a folder or "
            "an s3:// bucket, or leave the key out"
        )


def check_room(what: str, folder: Path) -> None:
    """Raise StoreUnusable, with the cause, unless files of a run fit into a folder, which need not be there yet."""
    at = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=at) as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        error.filename = None  # a name of no interest
        why = SystemRefused.of(error, at, then="") or f"{error.strerror}: name a folder that can be written"
        raise StoreUnusable(f"{what} ({folder}) can't hold files of {ROOM_BYTES >> 20} MiB: {why}") from error


def check_bucket(recipe: RecipeBase, site: str | None, *, new_run: bool, replaced: bool = False) -> None:
    """Probe the bucket as this site, where there is an outer loop; a folder in one beside it, which is gone after.

    Raises StoreUnusable, or BadInput when a new run would find another of its name there; FingerprintMismatch when the
    run that is there has other settings.
    """
    uri = run_uri(recipe)
    if uri is None or uri.startswith("memory://"):
        return
    probe = partial(probe_store, site=site)
    store = open_store(uri, recipe.site.key_file)
    try:
        if isinstance(store, FileStore):
            check_room("outer.store", store.root)
            standing = next(each for each in (store.root, *store.root.parents) if each.exists())
            with tempfile.TemporaryDirectory(prefix=".composer-prime-", dir=standing) as beside:
                probe(FileStore(beside))
        else:
            probe(store)
        if replaced:
            return  # what is there goes
        if new_run:
            check_whole(store)
        is_there = bool(store.list(keys.manifest()))
        if new_run and is_there:
            raise BadInput(
                f"bucket {store.uri} already holds the run {recipe.run.name}: continue it with --resume, join it with "
                "`composer-prime site`, replace it with --clean if it made no round, or give this run another "
                "--run.name"
            )
        if is_there:
            manifest, terms = find_manifest(store)[0], terms_of(recipe)
            if change := changed_terms(manifest.terms, terms):
                raise FingerprintMismatch(
                    f"this recipe differs from the run {manifest.run!r} in the bucket: {change}. "
                    f"{another_run(manifest.run, uri)}"
                )
    finally:
        store.close()


def check_key(recipe: RecipeBase, site: str) -> None:
    """Raise BadInput when a site has no key file that can be read, and needs one."""
    if recipe.site.key_file is not None:
        SigningKey.load(recipe.site.key_file)
    elif recipe.outer is not None and recipe.outer.owner:
        raise ConfigError(f"this run admits keys, and site {site} has none: set site.key_file to its key file")


def check_engine(recipe: Recipe) -> None:
    """Raise ConfigError when the Python of a vLLM engine doesn't run, or finds no vLLM."""
    if recipe.inference.engine != "vllm":
        return
    python = str(recipe.inference.python or sys.executable)
    try:
        done = subprocess.run([python, "-c", _FIND_VLLM], capture_output=True, text=True, timeout=PATIENCE_S)
        said = done.stderr.strip().rpartition("\n")[2] or f"it ends with {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise ConfigError(f"inference.python ({python}) can't import vLLM: {said}: name one of an environment with it")


def rehearsed(recipe: Recipe, site: str) -> Found:
    """What a process of its own finds wrong with a site's environments and tokenizer, and what that took."""
    replay = recipe.replay.model_copy(update={"teachers": ()})
    untaught = recipe.model_copy(update={"replay": replay, "hints": None})
    with tempfile.TemporaryDirectory() as scratch:
        settings = settle_site(untaught, site, inference_port=1, model_dir=Path(scratch), resume=False)
        command, asked = [sys.executable, "-m", "composer_prime.sites.preflight"], settings.model_dump_json()
        done = subprocess.run(command, input=asked, capture_output=True, text=True, env={**os.environ, **QUIET_ENV})
    if done.returncode == 0:
        return Found(*json.loads(done.stdout))
    said = done.stderr.strip().rpartition("\n")[2]
    what = "the process that tries the environments ended with"
    return Found([f"{what} {done.returncode} ({said}): try their imports"], [], [])


def main() -> None:
    """Rehearse the site whose settings are on standard input; what imports and environments print is no answer."""
    answer = os.dup(1)
    os.dup2(2, 1)
    gc.disable()  # a fifth of the imports' time
    found = asyncio.run(_play(SiteSettings.model_validate_json(sys.stdin.read())))
    os.write(answer, json.dumps(found).encode())


async def _play(settings: SiteSettings) -> Found:
    """Set up all environments that are installed, then play one rollout of each, where all is well so far."""
    mark, problems, took, warnings = time.monotonic(), Problems(), list[str](), list[str]()

    def note(part: str) -> None:
        nonlocal mark
        took.append(f"{part} in {time.monotonic() - mark:.1f} s")
        mark = time.monotonic()

    given = settings.recipe.orchestrator.train.source
    if given:
        import verifiers.v1  # noqa: F401

        note("verifiers imported")
    from composer_prime.sites.embedded import chat, rollouts
    from composer_prime.sites.embedded.environments import load_source

    chat.register()
    sources = list[Any]()
    for source in given:
        with problems.noted():
            sources.append(load_source(source, settings))
    if given:
        note("environments set up")
    import_tokenizers()
    with problems.noted():
        model_dir = describe_model(settings.recipe.model.name, settings.model_dir)
        check_sizes(model_dir, settings.recipe.seq_len)
        check_renderer(settings.recipe.orchestrator.renderer, settings.recipe.model.name, model_dir)
        settings = settings.model_copy(update={"model_dir": model_dir})
        rollouts.ROLLOUT_TIMEOUT_S = PATIENCE_S
        async with AsyncExitStack() as stack:
            for source in sources:
                with problems.noted():
                    player = rollouts.RolloutPlayer([source], settings, base_url=NOWHERE, model="none")
                    await check_rollout(source.name, await stack.enter_async_context(player), settings, warnings)
    note("first prompts and rewards" if given else "tokenizer read")
    return Found(list(map(str, problems.found)), took, warnings)


async def check_rollout(source: str, player: Any, settings: SiteSettings, warnings: list[str]) -> None:
    """Play an environment's first task. Raises EnvError when its prompt has no room, or its own code fails."""
    seq_len, room = settings.recipe.seq_len, settings.recipe.orchestrator.train.sampling.max_completion_tokens
    prompts, unreadable, hidden, refused, calls = _answer_in_place(seq_len)
    group = await player.play_group(0, 0, 1, 0)
    if prompts and prompts[0] >= seq_len:
        raise EnvError(
            f"environment {source!r}: its first prompt has {prompts[0]} tokens, and seq_len ({seq_len}) must be "
            "larger, so that an answer fits: raise seq_len, or shorten the prompt"
        )
    if unreadable:
        raise ConfigError(
            f"environment {source!r} has tools, and this model's chat template writes no calls that could be read: set "
            'orchestrator.renderer.tool_parser with the name "default", or take a model that calls tools'
        )
    if refused:
        raise ConfigError(
            f"environment {source!r} has tools, and this model's chat template refuses a call with its result "
            f"({refused[0]}): take a model that calls tools, or save a template that writes them"
        )
    if hidden:
        warnings.append(
            f"warning: this model's chat template doesn't list tools, and environment {source!r} has some: describe "
            "them in its prompts, or save a template that lists them"
        )
    if calls and min(calls) > room:
        warnings.append(
            f"warning: orchestrator.train.sampling.max_completion_tokens ({room}) cuts every tool call of environment "
            f"{source!r} short: the shortest has {min(calls)} tokens, so set it to {2 * min(calls)} or more"
        )
    failed = [failure for failure in group.failures if not failure.startswith("TimeoutError")]  # it may be slow
    if failed and (not prompts or prompts[-1] < seq_len):
        remedy = "let its reward give a number for a wrong answer, too"
        if failed[0].startswith("HarnessError"):  # before any reward
            remedy = "see what the model's chat template, or the harness, says to its prompt and tools"
        raise EnvError(f"environment {source!r}: a rollout with the answer {REPLY!r} fails: {failed[0]}: {remedy}")


def _answer_in_place(seq_len: int) -> tuple[list[int], list[str], list[str], list[str], list[int]]:
    """From now on answer what renderers would ask a server. The lists take each prompt's length, each renderer that is
    given tools and can't read calls, each that doesn't list tools, why one refuses a tool's result, and the length of
    each tool's shortest call."""
    from renderers import OverlongPromptError, client

    prompts, unreadable, hidden, refused, calls = list[int](), list[str](), list[str](), list[str](), list[int]()

    async def generate(*, renderer: Any, prompt_ids: list[int], prompt_attribution: Any, **asked: Any) -> Any:
        tools, name = asked.get("tools") or (), type(renderer).__name__
        prompts.append(len(prompt_ids))
        if tools and not getattr(renderer, "supports_tools", True):
            unreadable.append(name)
        elif tools and not calls:
            calls.extend(_shortest_call(renderer, tool, tools) for tool in tools)
            try:
                renderer.render_ids([_ASKED, *_called(tools[0])], tools=tools, add_generation_prompt=True)
            except Exception as error:  # whatever a template raises
                refused.append(" ".join(str(error).split()))
            with suppress(Exception):  # whatever a template raises
                if renderer.render_ids([_ASKED], tools=tools) == renderer.render_ids([_ASKED]):
                    hidden.append(name)
        if len(prompt_ids) >= seq_len:
            raise OverlongPromptError(prompt_len=len(prompt_ids), max_prompt_len=seq_len)
        said = {"content": REPLY, "finish_reason": "stop", "prompt_attribution": prompt_attribution}
        end = renderer.get_stop_token_ids()[:1]
        return {"prompt_ids": prompt_ids, "completion_ids": end, "completion_logprobs": [0.0], **said}

    client.generate = generate
    return prompts, unreadable, hidden, refused, calls


def _called(tool: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of a tool with what it requires alone, and a result."""
    told = tool.get("function", tool)
    arguments = json.dumps(dict.fromkeys((told.get("parameters") or {}).get("required", ()), 0))
    called = {"id": "call00001", "type": "function", "function": {"name": told["name"], "arguments": arguments}}
    result = {"role": "tool", "content": "b", "tool_call_id": called["id"], "name": told["name"]}
    return {"role": "assistant", "content": "", "tool_calls": [called]}, result


def _shortest_call(renderer: Any, tool: Any, tools: Any) -> int:
    """Tokens of a call of a tool with what it requires alone, its end included; 0 where the renderer writes none."""
    try:
        prompt = renderer.render_ids([_ASKED], tools=tools, add_generation_prompt=True)
        whole = renderer.render_ids([_ASKED, _called(tool)[0]], tools=tools)
    except Exception:  # whatever a template raises
        return 0
    answer = whole[num_equal(prompt, whole) :]
    ends = [place for place, token in enumerate(answer) if token in renderer.get_stop_token_ids()]
    return (ends or [len(answer) - 1])[0] + 1


def check_sizes(folder: Path, seq_len: int) -> None:
    """Compare a model's configuration with its tokenizer and with the samples.

    Raises ModelError when the tokenizer has token ids that the embeddings lack, ConfigError when samples may be longer
    than what the model was made for.
    """
    from composer_prime.teachers.fingerprint import load_tokenizer

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    rows, context = config.get("vocab_size"), config.get("max_position_embeddings")
    largest = max(load_tokenizer(folder).get_vocab().values())
    if rows is not None and largest >= rows:
        raise ModelError(
            f"model folder {folder}: its tokenizer has token ids up to {largest}, and its embeddings have {rows} rows "
            "(vocab_size): take the model's own tokenizer, or resize the embeddings"
        )
    if context is not None and seq_len > context:
        raise ConfigError(
            f"seq_len ({seq_len}) must be at most the model's context ({context}, max_position_embeddings of its "
            f"config.json): set it to {context}, or take a model with a longer one"
        )


if __name__ == "__main__":
    main()
