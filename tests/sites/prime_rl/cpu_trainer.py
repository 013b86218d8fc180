"""Upstream's unmodified trainer on a CPU, a process a rank: `python -m tests.sites.prime_rl.cpu_trainer @ FILE.json`.

What it imports for GPUs alone is replaced by empty modules, "cuda" means "cpu", NCCL means gloo, and flash attention's
one kernel is torch's; nothing else of upstream is touched. Its module runs as `__main__`, as under torchrun.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling would take longer than training

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ABSENT = (
    "dion",
    "ring_flash_attn",
    "tilelang",
    "modelexpress",
    "vllm",
    "wandb_gql",
    "wandb_workspaces",
    "torchtitan.experiments",
    "torchtitan.distributed.expert_parallel",
    "mooncake",
    "deep_ep",
)
"""Packages for GPUs or the web. `flash_attn` isn't among them: whoever looks for it must not find it."""


def _itself(function: Any) -> Any:
    return function


STAND_INS = {("torchtitan.distributed.expert_parallel", "expert_parallel"): _itself}
"""What such a package holds and is used without expert parallelism too: a decorator that then does nothing."""


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Anything(metaclass=_Kind):
    """Stands for whatever such a package holds: a base class, a decorator, a constant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules under the names of `ABSENT`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return STAND_INS.get((module.__name__, name), _Anything)

        vars(module)["__getattr__"] = attribute


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class CudaIsCpu(TorchFunctionMode):
    """Every call that names a CUDA device gets the CPU, and `histc` takes integers, as it does on CUDA alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.histc and not args[0].is_floating_point():
            return func(args[0].float(), *args[1:], **kwargs or {}).to(args[0].dtype)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **kwargs)


def _gloo(init: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init("gloo", timeout=kwargs.get("timeout"))

    return init_process_group


def _with_a_speed(init: Callable[..., None]) -> Callable[..., None]:
    """A CPU has no peak speed that upstream knows, and it divides by it."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.gpu_peak_flops = 1e12

    return __init__


def pretend_cuda() -> None:
    """Let upstream find what it expects of CUDA."""
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.max_memory_reserved = lambda *args, **kwargs: 0
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)
    dist.init_process_group = _gloo(dist.init_process_group)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *rest: Any, causal: bool, **windows: Any
) -> Tensor:
    """flash_attn_varlen_func by torch's own attention, packed sequence by sequence.

    query, key, value   [tokens, heads, head_dim]; a head of keys may serve several of queries
    cu_seqlens          where each sequence begins, and the last ends
    """
    assert causal and not windows, "only plain causal attention is stood in for"
    answers = []
    for start, end in pairwise(cu_seqlens.tolist()):
        q, k, v = (one[None, start:end].transpose(1, 2) for one in (query, key, value))
        answers.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(answers)


def plain_attention() -> None:
    """Models are made with attention that needs no kernel, whatever the configuration names."""
    from transformers import AutoConfig

    from_pretrained = AutoConfig.from_pretrained

    def with_eager(*args: Any, **kwargs: Any) -> Any:
        # The one name that transformers takes for upstream's model classes, too, where flash_attn isn't installed.
        return from_pretrained(*args, **kwargs | {"attn_implementation": "eager"})

    AutoConfig.from_pretrained = with_eager


def stand_in_for_flash_attention() -> None:
    """Upstream's own model classes call its kernel: ours takes its place, under the name that models are made with."""
    import prime_rl.trainer.models.layers.attn as attn  # pyright: ignore[reportMissingImports]

    attn.FlashAttention._funcs[2] = varlen_attention
    attn.ATTN_IMPL2CLASS["eager"] = attn.ATTN_IMPL2CLASS["flash_attention_2"]


def leave_out_gpu_packages() -> None:
    """Let upstream's modules be imported on a machine without CUDA."""
    sys.meta_path.insert(0, _Empty())


def main() -> None:
    """Run upstream's trainer in this process."""
    leave_out_gpu_packages()
    torch.set_num_threads(1)
    pretend_cuda()
    plain_attention()
    import prime_rl._compat  # noqa: F401  # pyright: ignore[reportMissingImports]  upstream's repairs come first
    import prime_rl.trainer.parallel_dims as parallel_dims  # pyright: ignore[reportMissingImports]
    from prime_rl.trainer.perf import PerfCounter  # pyright: ignore[reportMissingImports]

    parallel_dims.device_type = "cpu"
    stand_in_for_flash_attention()
    PerfCounter.__init__ = _with_a_speed(PerfCounter.__init__)
    with CudaIsCpu():
        runpy.run_module("prime_rl.trainer.rl.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
