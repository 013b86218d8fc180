"""Runs a module with FSDP2 in fp32, and with the tests' term where ours isn't: `python -m ...in_fp32 MODULE ARGUMENTS`.

Upstream multiplies in bf16; in fp32 a gradient can be compared to 1e-6.
"""

import importlib.util
import runpy
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as fsdp

from tests.sites.prime_rl.topk import forward_kl


def stand_in() -> None:
    """Let the tests' forward KL be the term where the package has none."""
    name = "composer_prime.losses.distill"
    if importlib.util.find_spec(name) is None:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(DistillInputs=forward_kl.DistillInputs, distill_loss=forward_kl.distill_loss)


def main() -> None:
    """Run the module that the arguments name, as `__main__`."""
    policy = fsdp.MixedPrecisionPolicy

    def in_fp32(**given: Any) -> Any:
        return policy(**given | {"param_dtype": torch.float32, "reduce_dtype": torch.float32})

    fsdp.MixedPrecisionPolicy = in_fp32  # pyright: ignore[reportAttributeAccessIssue]
    stand_in()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
