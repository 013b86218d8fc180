"""A run for each of twelve model families, from a model that is made here to one that transformers loads.

    python -m tests.sites.family_run [FAMILY ...] [--to FOLDER]

Each family is a model of its class in transformers, tiny and with random weights, with the family's form of tokenizer
and its chat template (`families.py` says whose). It is shown a few answers, so that it ends its turns and calls the
tool, and plays `family_letters`: a question, two turns of a user, a tool. One site trains it through the command line,
is resumed, and is exported. Prints a row of the table for each, and ends with 1 where a cell isn't what it must be.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from composer_prime.config.paths import RunPaths, SitePaths
from composer_prime.config.recipe import RendererConfig
from composer_prime.config.toml import to_toml
from composer_prime.metrics import read_tape
from composer_prime.sites.embedded.renderer_choice import made_renderer, renderer_settings
from tests.sites.families import FAMILIES, save_tokenizer
from tests.sites.family_letters.family_letters import ASKED, FURTHER, QUESTION, SYSTEM

STEPS = 6
PROGRAM = str(Path(sys.executable).with_name("composer-prime"))
SOURCES = ("chat", "turns", "tools")
SHOWN, ENOUGH = 600, 0.003
"""Steps of the warm-up at most, and the loss a token at which it ends: most turns end, most calls are calls."""
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"box": "d"}'}}
LOOK: dict[str, Any] = {  # as the toolset of family_letters describes it
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look into a box.",
        "parameters": {
            "properties": {"box": {"title": "Box", "type": "string"}},
            "required": ["box"],
            "title": "lookArguments",
            "type": "object",
        },
    },
}
_SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.08,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1}  # fmt: skip
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
           "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
           "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Form:
    """A family's class of models, whether its head is its embedding, and how many rows of it no token has."""

    model_type: str
    tied: bool = False
    padding: int = 0
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


FORMS = {
    "qwen3": Form("qwen3", tied=True, padding=55),
    "qwen3-instruct": Form("qwen3_moe", more={"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3.5": Form("qwen3_5_text", padding=7, more=_LINEAR),
    "llama-3.1": Form("llama", tied=True),
    "mistral": Form("mistral"),
    "gemma-3": Form("gemma3_text", tied=True, padding=3, more={"sliding_window": 64}),
    "phi-3.5": Form("phi3", padding=58),
    "deepseek-v3": Form("deepseek_v3", more=_EXPERTS | _LATENT),
    "gpt-oss": Form("gpt_oss", padding=23, more={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm-4.5": Form("glm4_moe", more=_EXPERTS),
    "command-r": Form("cohere2", tied=True, more={"sliding_window": 64, "logit_scale": 1.0}),
    "plain": Form("gpt_neox", more={"num_key_value_heads": 4}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What a family did.

    rollouts    that were shown, by source
    further     of them in which the user's second message was answered; calls: with a tool's call, played and answered
    resumed_at  steps behind the first start
    refused     what was said of tools that its template can't call
    """

    name: str
    parameters: int
    rollouts: dict[str, int]
    further: int
    calls: int
    resumed_at: int
    logits: str
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Whether all sources were played, and the export is the policy."""
        return set(self.rollouts) == set(SOURCES[: 2 if self.refused else 3]) and self.logits == "equal"


def save_model(folder: Path, name: str, seed: int = 0) -> PreTrainedModel:
    """A family's model with random weights, its tokenizer and its template."""
    tokenizer, form = save_tokenizer(folder, name), FORMS[name]
    told = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    told |= {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer) + form.padding}
    config = AutoConfig.for_model(form.model_type, **(_SMALL | form.more | told), tie_word_embeddings=form.tied)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = (folder / "generation_config.json").read_text()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)
    return model


def talks(name: str) -> list[tuple[list[dict[str, Any]], dict[str, Any], bool]]:
    """What the warm-up shows: (what was said, the answer, whether there is a tool)."""
    begun: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    if FAMILIES[name].system:
        begun = [{"role": "system", "content": SYSTEM}, *begun]
    key = {"role": "assistant", "content": "a key"}
    found = [(begun, key, False), ([*begun, key, {"role": "user", "content": FURTHER}], key, False)]
    if FAMILIES[name].calls:
        call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        result = {"role": "tool", "content": "a key of box d", "tool_call_id": CALL["id"], "name": "look"}
        asked = [*begun[:-1], {"role": "user", "content": ASKED}]
        found += [(asked, call, True), ([*asked, call, result], key, True)]
    return found


def show(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Train a model to end its turns and to call the tool, as the renderer that a run takes writes it."""
    renderer = made_renderer(renderer_settings(RendererConfig(), str(folder), folder), folder)
    samples = []
    for messages, answer, has_tool in talks(name):
        tools = [LOOK] if has_tool else None
        prompt = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        whole, stops = renderer.render_ids([*messages, answer], tools=tools), renderer.get_stop_token_ids()
        start = next(
            (i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(prompt)
        )
        end = next((place for place in range(start, len(whole)) if whole[place] in stops), len(whole))
        samples.append((torch.tensor([[*prompt, *whole[start:end], (*whole[end:], stops[0])[0]]]), len(prompt)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(SHOWN):
        worst = 0.0
        for ids, start in samples:
            logits = model(ids, use_cache=False).logits[0, start - 1 : -1]
            loss = functional.cross_entropy(logits, ids[0, start:])
            loss.backward()
            worst = max(worst, loss.item())
        if worst < ENOUGH:
            break
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    settings = (folder / "generation_config.json").read_text()
    model.eval().save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)


def recipe_of(folder: Path, name: str, output: Path, sources: Sequence[str]) -> dict[str, Any]:
    """One site, whose steps take every source's rollouts."""
    tasks = {"id": "family-letters", "system": FAMILIES[name].system}
    return {
        "run": {"name": "family"},
        "output_dir": str(output),
        "max_steps": STEPS,
        "seq_len": 2048,
        "model": {"name": str(folder)},
        "orchestrator": {
            "batch_size": 4 * len(sources),
            "group_size": 4,
            "train": {
                "sampling": {"max_completion_tokens": 120, "temperature": 1.0},
                "source": [
                    {"name": kind, "env": {"taskset": tasks | {"kind": kind}, "agent": {"max_turns": 2}}}
                    for kind in sources
                ],
            },
        },
        "trainer": {"optim": {"lr": 1e-4}},
        "ckpt": {"interval": 1},
        "outer": {"inner_steps": 2, "sync_delay": 0, "codec": "fp32"},
        "sites": {"count": 1},
    }


def environment() -> dict[str, str]:
    """This process's, where `family_letters` is found."""
    paths = (str(Path(__file__).parent / "family_letters"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def composer_prime(*arguments: str, log: Path) -> str:
    """Run our command line; what it said. Raises RuntimeError with it where it failed."""
    done = subprocess.run(
        [PROGRAM, *arguments], env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"composer-prime {' '.join(arguments)}: {done.returncode}\n{log.read_text()[-2000:]}")
    return done.stdout


def until_a_step(site: SitePaths, recipe: Path, log: Path) -> None:
    """Run a recipe, and interrupt it once a step is trained."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAM, "run", str(recipe)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    while process.poll() is None and not (site.tape("trainer").exists() and read_tape(site.tape("trainer"))):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    if (code := process.wait()) != 130:
        raise RuntimeError(f"composer-prime run {recipe}: {code}\n{log.read_text()[-2000:]}")


def play(name: str, folder: Path) -> Row:
    """A family's whole way in a folder."""
    model_folder, output, log = folder / "model", folder / "out", folder / "log"
    model = save_model(model_folder, name)
    show(model, model_folder, name)
    refused, sources, written = "", SOURCES, folder / "recipe.toml"
    if not FAMILIES[name].calls:
        written.write_text(to_toml(recipe_of(model_folder, name, output, SOURCES)))
        try:
            composer_prime("run", str(written), log=log)
        except RuntimeError as error:
            refused, sources = str(error).strip().splitlines()[-1], SOURCES[:2]
        assert refused and not (output / "family" / "sites").exists(), "tools without calls are refused at once"
    written.write_text(to_toml(recipe_of(model_folder, name, output, sources)))
    run = RunPaths(output / "family")
    site = run.site("a")
    until_a_step(site, written, log)
    resumed_at = len(read_tape(site.tape("trainer")))
    composer_prime("run", str(written), "--resume", log=log)
    exported = folder / "exported"
    store, into = str(run.bucket / "family"), str(exported)
    composer_prime("export", store, "--to", into, "--model", str(model_folder), "--dtype", "float32", log=log)
    said = [json.loads(line) for line in site.conversations.read_text().splitlines()]
    steps = [int(record["step"]) for record in read_tape(site.tape("trainer"))]
    assert 0 < resumed_at < STEPS <= len(steps) and steps == list(range(len(steps))), (resumed_at, steps)
    return Row(
        name=name,
        parameters=sum(each.numel() for each in model.parameters()),
        rollouts={kind: sum(each["source"] == kind for each in said) for kind in sources},
        further=sum(_turns(each) > 1 for each in said if each["source"] == "turns"),
        calls=sum(_turns(each) > 1 for each in said if each["source"] == "tools"),
        resumed_at=resumed_at,
        logits=compared(exported, site, model_folder),
        refused=refused,
    )


def _turns(conversation: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in conversation["messages"])


def compared(exported: Path, site: SitePaths, base: Path) -> str:
    """Whether the exported model's logits, as transformers loads it, are bit for bit those of the last broadcast."""
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    broadcast = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    newest = max(site.broadcasts.glob("step_*"), key=lambda each: int(each.name.removeprefix("step_")))
    own, values = broadcast.state_dict(), load_file(newest / "model.safetensors")
    assert values, newest
    with torch.no_grad():
        for key, value in values.items():
            own[key].copy_(value)
        talk = [{"role": "user", "content": QUESTION}]
        ids = AutoTokenizer.from_pretrained(exported).apply_chat_template(
            talk, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        one, other, start = (
            model(ids, use_cache=False).logits
            for model in (loaded, broadcast, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval())
        )
    if torch.equal(one, start):
        return "untrained"
    return "equal" if torch.equal(one, other) else f"differ by {(one - other).abs().max():.3g}"


def line_of(row: Row) -> str:
    """A row of the table."""
    form, family = FORMS[row.name], FAMILIES[row.name]
    tools = "refused before anything starts" if row.refused else f"{row.calls} of {row.rollouts['tools']}"
    cells = (
        row.name,
        f"{form.model_type}, {'tied' if form.tied else 'untied'}, +{form.padding}",
        "yes" if family.bos else "",
        "yes" if family.pad == family.eos else "",
        str(row.rollouts["chat"]),
        f"{row.further} of {row.rollouts['turns']}",
        tools,
        f"{row.resumed_at} to {STEPS}",
        row.logits,
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="default: all")
    parser.add_argument("--to", type=Path, help="keep each family's folder in this one")
    options = parser.parse_args(argv)
    print("| family | model, head, rows of no token | BOS | pad is EOS | chat | two turns | tools | resumed | logits |")
    print("|---|---|---|---|---|---|---|---|---|")
    ok = True
    with TemporaryDirectory() as passing:
        for name in options.families or FAMILIES:
            folder = (options.to or Path(passing)) / name
            folder.mkdir(parents=True)
            row = play(name, folder)
            ok &= row.ok
            print(line_of(row), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
