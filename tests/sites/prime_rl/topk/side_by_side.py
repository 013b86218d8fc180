"""Upstream's trainers, and who feeds them, forked from one process: importing takes each of them nine seconds else.

    python -m tests.sites.prime_rl.topk.side_by_side JOB

JOB is JSON: {"fp32", "feed", "trainers"}: whether FSDP2 works in fp32, which can be compared to 1e-6 (upstream
multiplies in bf16); the fields of `feed_taught.Feed`; and of each rank of each trainer {"arguments", "environment",
"log"}. Ends with 1, and what the first rank that failed printed, where one did.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as fsdp

from tests.sites.prime_rl import cpu_trainer
from tests.sites.prime_rl.topk import feed_taught

PR_SET_PDEATHSIG = 1


def in_fp32() -> None:
    """Let parameters, products and reductions of FSDP2 be in fp32."""
    policy = fsdp.MixedPrecisionPolicy
    fp32: dict[str, Any] = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    fsdp.MixedPrecisionPolicy = lambda **given: policy(**given | fp32)  # pyright: ignore[reportAttributeAccessIssue]


def import_trainer() -> None:
    """Have all modules that upstream's trainer imports; itself runs as `__main__` later."""
    cpu_trainer.leave_out_gpu_packages()
    torch.set_num_threads(1)
    cpu_trainer.pretend_cuda()
    cpu_trainer.plain_attention()
    import prime_rl._compat  # noqa: F401  # pyright: ignore[reportMissingImports]  upstream's repairs come first

    with cpu_trainer.CudaIsCpu():
        import prime_rl.trainer.rl.train as train  # pyright: ignore[reportMissingImports]
    del sys.modules[train.__name__]


def forked(program: Callable[[], None]) -> int:
    """The id of a process that runs the program and ends, with 1 after an error, and with ours at the latest."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """One rank of upstream's trainer."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    cpu_trainer.main()


def main() -> None:
    """Feed the trainers, then run all of them at once."""
    job = json.loads(sys.argv[1])
    if job["fp32"]:
        in_fp32()
    import_trainer()
    if ended(forked(lambda: feed_taught.send(feed_taught.Feed(**job["feed"])))) != 0:
        sys.exit(1)
    ranks = [(one, forked(lambda one=one: train(**one))) for one in job["trainers"]]
    codes = [(one["log"], ended(child)) for one, child in ranks]
    for log, code in codes:
        if code:
            sys.exit(f"{log} ended with {code}:\n{Path(log).read_text(errors='replace')}")


if __name__ == "__main__":
    main()
