"""Upstream's unmodified trainer on a CPU, a process a rank: `python -m tests.sites.prime_rl.cpu_trainer @ FILE.json`.

What it imports for GPUs alone is replaced by empty modules, "cuda" means "cpu", and NCCL means gloo; nothing else of
upstream is touched. Its module runs as `__main__`, as under torchrun.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling would take longer than training

import torch
import torch.distributed as dist
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
        def attribute(name: str) -> type[_Anything]:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Anything

        vars(module)["__getattr__"] = attribute


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class CudaIsCpu(TorchFunctionMode):
    """Every call that names a CUDA device gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
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


def plain_attention() -> None:
    """Models are made with torch's own attention, whatever kernel the configuration names."""
    from transformers import AutoConfig

    from_pretrained = AutoConfig.from_pretrained

    def with_sdpa(*args: Any, **kwargs: Any) -> Any:
        return from_pretrained(*args, **kwargs | {"attn_implementation": "sdpa"})

    AutoConfig.from_pretrained = with_sdpa


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
    PerfCounter.__init__ = _with_a_speed(PerfCounter.__init__)
    with CudaIsCpu():
        runpy.run_module("prime_rl.trainer.rl.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
