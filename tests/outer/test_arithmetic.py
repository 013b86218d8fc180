"""The test vector: one value for every process and thread count, another one for arithmetic that may not take part."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from composer_prime.outer import arithmetic

EXPECTED = "d65edf95e48fb6cf8f8ad24214476099771180c6d0ae39db2103d32df81797e9"
"""A change of this value means that no site of this version can join a run of the last: raise the protocol version."""


def test_the_value_is_the_known_one_for_one_and_two_threads():
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert arithmetic.test_vector() == EXPECTED
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_value_is_the_same_in_a_process_with_other_vector_instructions(capability):
    code = "from composer_prime.outer import arithmetic; print(arithmetic.test_vector())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.strip() == EXPECTED, run.stderr


def test_it_betrays_flushed_denormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush denormals")
    try:
        assert arithmetic.test_vector() != EXPECTED
    finally:
        torch.set_flush_denormal(False)


def test_it_betrays_a_fused_outer_step(monkeypatch):
    def fused(params, pseudograd, momentum, *, lr, mu):
        momentum.mul_(mu).add_(pseudograd)
        step = (pseudograd.double() + mu * momentum.double()).float()
        params.copy_((params.double() - lr * step.double()).float())

    monkeypatch.setattr(arithmetic, "nesterov_step", fused)
    assert arithmetic.test_vector() != EXPECTED


def test_it_betrays_a_fused_mean(monkeypatch):
    def fused(parts):
        total = parts[0][1] * parts[0][0]
        for multiplier, x in parts[1:]:
            total = (total.double() + multiplier * x.double()).float()
        return total

    monkeypatch.setattr(arithmetic, "weighted_mean", fused)
    assert arithmetic.test_vector() != EXPECTED


def test_the_inputs_hold_normal_numbers_and_denormals():
    values = arithmetic._values(seed=3).numpy()
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    assert np.isfinite(values).all() and 0.005 < tiny.mean() < 0.1
    assert 0.4 < (values < 0).mean() < 0.6
