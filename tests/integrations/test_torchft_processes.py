"""torchft's DiLoCo over a bucket, each replica a process of its own, as people run it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.integrations import torchft_keys
from composer_prime.integrations.torchft_rounds import Decision
from composer_prime.store import open_store
from tests.architecture import REPOSITORY
from tests.forked import Program
from tests.integrations.replicas import in_lockstep
from tests.patience import PATIENCE_S

pytest.importorskip("torchft")

TRAIN: dict[str, Any] = {"inner_steps": 8, "num_fragments": 2, "delay": 1, "alpha": 0.25, "steps": 40}
"""Five rounds of each fragment."""

Replica = tuple[Program, Path]


def start(folder: Path, names: str, *, die_at: dict[str, int] | None = None, **manager: Any) -> dict[str, Replica]:
    """A process for each replica, named by one letter, on the data of its place."""
    started = {}
    for place, name in enumerate(names):
        settings = {
            "manager": {"num_replicas": len(names), **manager},
            "train": {**TRAIN, "data_seed": place},
            "die_at": (die_at or {}).get(name),
        }
        out = folder / f"{name}.pt"
        arguments = [f"file://{folder / 'bucket'}", name, json.dumps(settings), str(out)]
        program = Program("tests.integrations.torchft_replica", arguments, os.environ, folder / f"{name}.log")
        started[name] = program, out
    return started


def end(replica: Replica) -> dict[str, Any]:
    """What a replica saved, once it has ended well."""
    process, out = replica
    try:
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
    assert code == 0, process.log.read_text()
    return torch.load(out)


def distance(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_processes_over_a_bucket_compute_what_replicas_in_lockstep_do(names: str, tmp_path: Path) -> None:
    replicas = start(tmp_path, names, min_replicas=len(names))
    ended = [end(replica) for replica in replicas.values()]
    assert [(replica["step"], replica["part"]) for replica in ended] == [(10, len(names))] * len(names)
    masters, weights = in_lockstep(len(names), **TRAIN)
    assert distance(ended[0]["masters"], masters) < 1e-6
    assert all(distance(replica["weights"], local) < 1e-6 for replica, local in zip(ended, weights, strict=True))


@pytest.mark.slow
def test_the_others_finish_when_a_replica_is_killed(tmp_path: Path) -> None:
    replicas = start(tmp_path, "abc", min_replicas=2, timeout_s=5.0, die_at={"c": 18})
    first, second = end(replicas["a"]), end(replicas["b"])
    process, out = replicas["c"]
    assert process.wait(PATIENCE_S) == -signal.SIGKILL and not out.exists(), process.log.read_text()
    assert (first["step"], first["part"]) == (second["step"], second["part"]) == (10, 2)
    assert torch.equal(first["masters"], second["masters"])
    store = open_store(f"file://{tmp_path / 'bucket' / 'run'}")
    decisions = [Decision.from_bytes(store.get(torchft_keys.decision(number)), "") for number in range(10)]
    assert [len(decision.taken) for decision in decisions] == [3] * 4 + [2] * 6


def test_the_example_in_the_docs_runs(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "torchft.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    program = example[1].replace("s3://my-bucket/runs", f"file://{tmp_path / 'bucket'}")
    assert program != example[1]
    script = tmp_path / "train.py"
    script.write_text(program, encoding="utf-8")
    processes = [
        subprocess.Popen([sys.executable, script, name], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    printed = []
    for process in processes:
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors.decode()
        printed.append(out)
    assert printed[0] == printed[1] and printed[0].startswith(b"step 10 ")
