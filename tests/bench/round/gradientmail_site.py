"""One site of GradientMail (PyPI), for `python -m tests.bench peers`: run by an interpreter that has it, not by ours.

Says "ready" on stdout when it has moved its parameters, waits for a line on stdin, lets GradientMail exchange one
round, and says how many seconds that took. It imports nothing of composer-prime, which that interpreter needn't have.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def run_site(orders: dict[str, Any]) -> None:
    """Exchange `orders["rounds"]` rounds of a model of one parameter; standard DiLoCo, which waits for every round.

    orders   bucket, prefix, site, index, params, rounds, delta_dtype (of GradientMail), poll_s, lr, momentum
    """
    import gradientmail  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    model = nn.ParameterDict({"w": torch.zeros(orders["params"])})
    movement = torch.randn(orders["params"], generator=torch.Generator().manual_seed(orders["index"])) * 1e-3
    algorithm = gradientmail.DiLoCo(
        sync_every=1,
        fragments=1,
        in_flight=1,
        overlap_steps=0,
        follow=0,
        quorum_size=2,
        grace_seconds=0.0,
        outer_lr=orders["lr"],
        outer_momentum=orders["momentum"],
        merge=gradientmail.WeightedMean(),
        delta_dtype=orders["delta_dtype"],
    )
    mailbox = gradientmail.S3Mailbox(orders["bucket"], orders["prefix"], request_checksums="when_required")
    session = gradientmail.Session(
        model, algorithm=algorithm, mailbox=mailbox, node_id=orders["site"], poll_interval=orders["poll_s"]
    )
    started = 0.0

    def step(number: int) -> int:
        nonlocal started
        with torch.no_grad():
            model["w"].add_(movement, alpha=number + 1)
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        return 10

    def rounds() -> Iterator[int]:
        for number in range(orders["rounds"]):
            yield number
            elapsed = time.perf_counter() - started  # the session asks for more once the model holds the round
            if session.rounds_seen != number:
                raise RuntimeError(f"the model holds round {session.rounds_seen}, not {number}")
            print(elapsed, flush=True)

    session.run(step, rounds())


if __name__ == "__main__":
    run_site(json.loads(sys.argv[1]))
