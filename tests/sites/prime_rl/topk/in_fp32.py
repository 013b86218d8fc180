"""Runs a module with FSDP2 in fp32: `python -m tests.sites.prime_rl.topk.in_fp32 MODULE ARGUMENTS`.

Upstream multiplies in bf16; in fp32 a gradient can be compared to 1e-6.
"""

import runpy
import sys
from typing import Any

import torch
import torch.distributed.fsdp as fsdp


def main() -> None:
    """Run the module that the arguments name, as `__main__`."""
    policy = fsdp.MixedPrecisionPolicy

    def in_fp32(**given: Any) -> Any:
        fp32: dict[str, Any] = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
        return policy(**given | fp32)

    fsdp.MixedPrecisionPolicy = in_fp32  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
