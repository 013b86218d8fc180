"""Starts upstream's own trainer, of the checkout that PRIME_RL_SRC names, and reads what it left."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from composer_prime.sites.prime_rl import versions
from tests.sites.prime_rl.feed import SEQUENCE, VOCABULARY
from tests.sites.prime_rl.launched import HOOKED, REPOSITORY, Launched, outer_env

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIMEOUT_S = 800
POLL_S = 0.1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def source_path() -> list[Path]:
    """Where the checkout's packages lie."""
    root = Path(os.environ["PRIME_RL_SRC"])
    return [root / "src", root / "packages" / "prime-rl-configs" / "src"]


@cache
def upstream() -> versions.Upstream:
    """The checkout's version."""
    sys.path[:0] = [str(path) for path in source_path() if str(path) not in sys.path]
    return versions.detect()


def save_model(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights, and a tokenizer for the versions that load one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return save_to(folder, Qwen3ForCausalLM(Qwen3Config(**SHAPE)))


def save_experts_model(folder: Path) -> Path:
    """As `save_model`, a Qwen3 of four experts, two of which see each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return save_to(folder, Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)))


def save_to(folder: Path, model: "PreTrainedModel") -> Path:
    """A model in fp32, and a tokenizer for the versions that load one."""
    from tests.servers.fake_inference import save_tokenizer

    save_tokenizer(folder)
    model.float().save_pretrained(folder)
    return folder


@dataclass
class RealTrainer(Launched):
    """Upstream's trainer of one site.

    fed   by rollouts that `feed` wrote; otherwise on upstream's fake data
    path  folders to import from before the checkout
    """

    model: Path = Path()
    fed: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    path: tuple[Path, ...] = ()

    def start(self, *, resume: int | None = None, **changes: Any) -> "RealTrainer":
        """Start every rank, with these changes to the configuration, table by table.

        resume   the step; -1: the newest that upstream finds
        """
        config: dict[str, Any] = {
            "model": {"name": str(self.model), "impl": "hf", "attn": "flash_attention_2", "seq_len": SEQUENCE}
            | {"optim_cpu_offload": False, "ac": None, "ac_offloading": None, "compile": None},
            "data": {"fake": None if self.fed else {"batch_size": 2}},
            "optim": {"type": "adamw", "lr": 0.003},
            "loss": {"type": "custom", "import_path": HOOKED, "kwargs": {}},
            "weight_broadcast": {"type": "filesystem"},
            "rollout_transport": {"type": "filesystem"},
            "ckpt": {"interval": 2},
            "max_steps": 4,
            "dist_timeout_seconds": 2400,
            "output_dir": str(self.folder),
        }
        if resume is not None and upstream() is versions.MAIN:
            config["resume"] = {} if resume == -1 else {"step": resume}
        elif resume is not None:
            config["ckpt"]["resume_step"] = resume
        for key, value in (self.config | changes).items():
            whole = not isinstance(value, dict) or key not in config or "type" in value
            config[key] = value if whole else config[key] | value
        file = self.folder / "trainer.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
        self.launch("tests.sites.prime_rl.cpu_trainer", ["@", str(file)], [*self.path, *source_path()])
        return self

    def wait_for(self, place: str) -> None:
        """Wait until a file is there, below this trainer's folder."""
        until = time.monotonic() + self.timeout_s
        while not (self.folder / place).exists():
            assert time.monotonic() < until and not self.has_ended(), self.output()
            time.sleep(POLL_S)

    def broadcast(self, step: int) -> dict[str, Tensor]:
        """The weights that went to inference after a step, in inference's bf16."""
        files = sorted((self.folder / "broadcasts" / f"step_{step}").glob("*.safetensors"))
        assert files, f"step {step} was not broadcast by {self.folder.name}"
        return {name: value for file in files for name, value in load_file(file).items()}

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """The trainer's own fp32 weights in its checkpoint, put together from all ranks."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        whole = self.folder / f"whole_{step}.pt"
        dcp_to_torch_save(self.folder / "checkpoints" / f"step_{step}" / "trainer", whole)
        return torch.load(whole, weights_only=False)["app"]["model"]

    def metrics(self) -> list[dict[str, Any]]:
        """The records of upstream's file monitor."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def masters(self) -> list[dict[str, Any]]:
        """Version and hash of each master that the trainer ended with."""
        return json.loads((self.folder / "outer" / "result.json").read_text())["masters"]


def real_site(folder: Path, name: str, model: Path, uri: str | None, ranks: int = 1, /, **config: Any) -> RealTrainer:
    """Upstream's trainer on so many ranks, as a site of the run at `uri` if there is one."""
    env = {} if uri is None else outer_env(uri, name)
    fed = upstream() is versions.MAIN
    return RealTrainer(folder / name, ranks, env, TIMEOUT_S, model=model, fed=fed, config=config)


def feed(*trainers: RealTrainer, first: int = 1, last: int = 4) -> None:
    """Send each trainer its rollouts of these steps, those of every site its own."""
    jobs = [
        {
            "folder": str(one.folder),
            "num_ranks": one.num_ranks,
            "first": first,
            "last": last,
            "seed": sum(one.folder.name.encode()) if one.env or "env_vars" in one.config else 0,
        }
        for one in trainers
        if one.fed
    ]
    if not jobs:
        return
    path = os.pathsep.join([*map(str, [*source_path(), REPOSITORY]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.sites.prime_rl.feed", json.dumps(jobs)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def exported(uri: str, model: Path, folder: Path, **options: Any) -> dict[str, Tensor]:
    """The newest masters as `composer-prime export` writes them for inference, in bf16."""
    from composer_prime.cli.export import export

    export(uri, to=str(folder), model=str(model), **options)
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
