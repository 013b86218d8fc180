"""The record that travels from the orchestrator to the trainer, and the one folder per step that it travels in.

Both roles read this module, so the format stands once: rollouts/step_N/{batch.safetensors, meta.json}, made under
another name and renamed into place, so that a reader sees a whole batch or none. Field names are PRIME-RL's. No torch.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from composer_prime.errors import CorruptObject, SiteError
from composer_prime.sites.embedded.whole_folder import numbered_steps, whole_folder

_STREAMS = {
    "token_ids": np.int64,
    "mask": np.bool_,
    "logprobs": np.float32,
    "temperatures": np.float32,
    "advantages": np.float32,
}


@dataclass(frozen=True)
class TrainingSample:
    """One branch of a rollout as a flat token sequence; every list has the length of `token_ids`.

    token_ids       prompt and sampled tokens in order
    mask            True where the policy sampled the token: these are trained on
    logprobs        nats, of the sampling policy after temperature; 0.0 where `mask` is False
    temperatures    of the sampling distribution, greater than 0
    advantages      0.0 where `mask` is False
    env_name        name of the source the task came from
    reward          of the whole rollout
    policy_version  number of training steps behind the weights that sampled it (the oldest, if it spans several)
    ref_logprobs    teacher's logprobs of the same tokens; 0.0 says "none here", as on the wire; None: no teacher
    candidates      int32 (tokens, 2 or 4, k), teachers' distributions as teachers/carrier.py packs them; None: none

    Raises SiteError when the lengths differ or the sample is empty.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    advantages: list[float]
    env_name: str
    reward: float
    policy_version: int
    ref_logprobs: list[float] | None = None
    candidates: np.ndarray | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in _STREAMS}
        if self.ref_logprobs is not None:
            lengths["ref_logprobs"] = len(self.ref_logprobs)
        if self.candidates is not None:
            lengths["candidates"] = len(self.candidates)
        if len(self.token_ids) == 0 or len(set(lengths.values())) != 1:
            raise SiteError(
                f"a sample of {self.env_name} has lengths {lengths}: every stream must have one number per token, "
                "and at least one token"
            )


def batch_folder(rollouts_dir: Path, step: int) -> Path:
    """Where the batch of training step `step` (counted from 0) stands once it is whole."""
    return Path(rollouts_dir) / f"step_{step}"


def write_batch(rollouts_dir: Path, step: int, samples: Sequence[TrainingSample], num_drawn: int = 0) -> Path:
    """Put the batch of one training step in place, atomically; a batch already there is replaced. Returns its folder.

    num_drawn  tasks that the site had drawn when it stood, since its first start

    Floats are kept as fp32. An empty batch is legal: that training step moves no weight.
    """
    folder = batch_folder(rollouts_dir, step)
    with whole_folder(folder) as making:
        save_file(_join_streams(samples), making / "batch.safetensors")
        meta = {"step": step, "num_drawn": num_drawn, "samples": [_describe(s) for s in samples]}
        (making / "meta.json").write_text(json.dumps(meta))
    return folder


def read_batch(rollouts_dir: Path, step: int) -> list[TrainingSample] | None:
    """The samples of one training step, or None while there is no such batch.

    Raises CorruptObject when a folder stands there whose two files can't be read or disagree.
    """
    folder = batch_folder(rollouts_dir, step)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        streams = load_file(folder / "batch.safetensors")
    except FileNotFoundError:
        return None
    except (SafetensorError, ValueError) as error:
        raise CorruptObject(f"{folder} can't be read ({error}): delete it, the orchestrator makes it anew") from error
    num_tokens = sum(described["num_tokens"] for described in meta["samples"])
    lengths = {name: len(stream) for name, stream in streams.items()}
    num_taught = sum(described["num_tokens"] for described in meta["samples"] if described["has_candidates"])
    if meta["step"] != step or lengths.pop("candidates", 0) != num_taught or set(lengths.values()) != {num_tokens}:
        raise CorruptObject(
            f"{folder} describes step {meta['step']} with {num_tokens} tokens and holds "
            f"{len(streams['token_ids'])}: delete it, the orchestrator makes it anew"
        )
    return _cut_streams(streams, meta["samples"])


def read_num_drawn(rollouts_dir: Path, step: int) -> int:
    """What `write_batch` was given with a step's batch, which stands."""
    return json.loads((batch_folder(rollouts_dir, step) / "meta.json").read_text())["num_drawn"]


KEEP = 2
"""Batches that stay once they are trained, for people: no start reads them again."""


def drop_trained(rollouts_dir: Path, step: int) -> None:
    """Delete the batches that were trained before `step`, less the newest KEEP; called after every step."""
    shutil.rmtree(batch_folder(rollouts_dir, step - KEEP - 1), ignore_errors=True)


def drop_batches(rollouts_dir: Path, from_step: int) -> None:
    """Delete what an earlier start of the site left for steps that are still to be trained: an older policy made it."""
    for step in numbered_steps(rollouts_dir):
        if step >= from_step:
            shutil.rmtree(batch_folder(rollouts_dir, step), ignore_errors=True)


def _describe(sample: TrainingSample) -> dict[str, object]:
    return {
        "num_tokens": len(sample.token_ids),
        "env_name": sample.env_name,
        "reward": float(sample.reward),
        "policy_version": int(sample.policy_version),
        "has_ref": sample.ref_logprobs is not None,
        "has_candidates": sample.candidates is not None,
    }


def _join_streams(samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    """All samples end to end, one array a stream; 0.0 stands for a teacher that a sample doesn't have, and candidates
    are of those alone that have some."""
    streams = {
        name: np.array([value for sample in samples for value in getattr(sample, name)], dtype=dtype)
        for name, dtype in _STREAMS.items()
    }
    if any(sample.ref_logprobs is not None for sample in samples):
        refs = [sample.ref_logprobs or [0.0] * len(sample.token_ids) for sample in samples]
        streams["ref_logprobs"] = np.array([value for ref in refs for value in ref], dtype=np.float32)
    if taught := [sample.candidates for sample in samples if sample.candidates is not None]:
        streams["candidates"] = np.concatenate(taught)
    return streams


def _cut_streams(streams: dict[str, np.ndarray], described: list[dict]) -> list[TrainingSample]:
    samples, start, taught = [], 0, 0
    for one in described:
        stop = start + one["num_tokens"]
        candidates = None
        if one["has_candidates"]:
            candidates = streams["candidates"][taught : taught + one["num_tokens"]]
            taught += one["num_tokens"]
        samples.append(
            TrainingSample(
                **{name: streams[name][start:stop].tolist() for name in _STREAMS},
                env_name=one["env_name"],
                reward=one["reward"],
                policy_version=one["policy_version"],
                ref_logprobs=streams["ref_logprobs"][start:stop].tolist() if one["has_ref"] else None,
                candidates=candidates,
            )
        )
        start = stop
    return samples
