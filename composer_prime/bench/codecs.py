"""`composer-prime bench codecs`: how fast, how small and how exact each codec is on one thread of this machine.

Times are CPU seconds of the process, medians over `repeats`, so that other work on the machine counts for little.
"""

import os
import statistics
import time
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from composer_prime.outer.codecs import CODECS, Codec


class Figures(NamedTuple):
    """What one codec does with one vector."""

    encode_s: float
    decode_s: float
    ratio: float
    """fp32 bytes over payload bytes."""
    error: float
    """L2 norm of the error over that of the vector."""
    cosine: float


def main(params: int = 25_000_000, repeats: int = 5) -> None:
    """Run the bench and print its table.

    params      fp32 values of each vector
    repeats     times each vector is coded, after one that warms up
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        vectors = make_vectors(params)
        figures = {
            kind: {name: measure(codec, x, repeats) for name, codec in CODECS.items()} for kind, x in vectors.items()
        }
    finally:
        torch.set_num_threads(threads)
    _print(figures, params)


def make_vectors(params: int) -> dict[str, Tensor]:
    """fp32 [params] by kind: Gaussian, and Student's t with 2 degrees of freedom, of which the variance is infinite."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(params, generator=generator)
    spread = torch.empty(params).exponential_(generator=generator).sqrt_()
    return {
        "gaussian": gaussian * 1e-3,
        "heavy-tailed": torch.randn(params, generator=generator).div_(spread).mul_(1e-3),
    }


def measure(codec: Codec, x: Tensor, repeats: int) -> Figures:
    """Code x, fp32 [n], `repeats` + 1 times."""
    encode_s, decode_s = [], []
    payload, decoded = codec.encode(x), x
    for _ in range(repeats + 1):
        started = time.process_time()
        payload = codec.encode(x)
        encoded = time.process_time()
        decoded = codec.decode(payload, x.numel())
        encode_s.append(encoded - started)
        decode_s.append(time.process_time() - encoded)
    norm, decoded_norm = x.double().norm(), decoded.double().norm()
    return Figures(
        encode_s=statistics.median(encode_s[1:]),
        decode_s=statistics.median(decode_s[1:]),
        ratio=4 * x.numel() / len(payload),
        error=float((decoded.double() - x.double()).norm() / norm),
        cosine=float(decoded.double() @ x.double() / (norm * decoded_norm)),
    )


def _print(figures: dict[str, dict[str, Figures]], params: int) -> None:
    raw_mb = params * 4 / 1e6
    console = Console()
    for kind, of_codec in figures.items():
        table = Table(title=f"codecs: {params:,} {kind} fp32 values, one thread")
        for column in ("codec", "encode MB/s", "decode MB/s", "both MB/s", "ratio", "error", "cosine"):
            table.add_column(column, justify="left" if column == "codec" else "right")
        for name, found in of_codec.items():
            seconds = (found.encode_s, found.decode_s, found.encode_s + found.decode_s)
            speeds = [f"{raw_mb / max(spent, 1e-9):,.0f}" for spent in seconds]
            table.add_row(name, *speeds, f"{found.ratio:.2f}", f"{found.error:.2g}", f"{found.cosine:.4f}")
        console.print(table)
    console.print(f"MB/s of fp32 in CPU time; load {os.getloadavg()[0]:.2f}")
