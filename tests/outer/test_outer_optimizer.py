"""The outer step: numpy's bits, torch.optim.SGD to the last places, and nothing that threads or chunks can change."""

import numpy as np
import pytest
import torch

from composer_prime.outer import outer_optimizer
from composer_prime.outer.outer_optimizer import nesterov_step
from tests.outer import reference

SETTINGS = [(0.7, 0.9), (1.0, 0.0), (1.0, 0.9), (0.1, 0.5), (1e-30, 0.99)]


@pytest.mark.parametrize(("lr", "mu"), SETTINGS)
def test_bits_equal_numpy_over_every_kind_of_float(lr, mu):
    rng = np.random.default_rng(0)
    params, momentum = reference.random_fp32(rng, 700_001), np.zeros(700_001, dtype=np.float32)
    ours, ours_momentum = torch.from_numpy(params.copy()), torch.zeros(700_001)
    for _ in range(3):
        gradient = reference.random_fp32(rng, 700_001)
        params, momentum = reference.nesterov(params, gradient, momentum, lr, mu)
        nesterov_step(ours, torch.from_numpy(gradient), ours_momentum, lr=lr, mu=mu)
        assert reference.same_bits(ours.numpy(), params)
        assert reference.same_bits(ours_momentum.numpy(), momentum)


def sgd(params: torch.Tensor, lr: float, mu: float) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    parameter = torch.nn.Parameter(params.clone())
    return parameter, torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)


@pytest.mark.parametrize(("lr", "mu", "limit"), [*((lr, mu, 2) for lr, mu in SETTINGS), (0.9, 0.99, 4)])
def test_within_two_ulp_of_torch_sgd_at_every_step(lr, mu, limit):
    """In ulp of max(|p|, lr |d|, lr mu |m|), d the step's direction; lr near 1 from below is the worst case: 4."""
    generator = torch.Generator().manual_seed(0)
    numel, scales = 1_000_003, torch.tensor([1e-20, 1e-6, 1e-3, 1.0, 1e3, 1e15])

    def draw() -> torch.Tensor:
        scale = scales[torch.randint(len(scales), (numel,), generator=generator)]
        return torch.randn(numel, generator=generator) * scale

    params, momentum = draw(), torch.zeros(numel)
    theirs, optimizer = sgd(params, lr, mu)
    for _ in range(5):
        theirs.grad = draw()
        before = params.abs()
        nesterov_step(params, theirs.grad, momentum, lr=lr, mu=mu)
        optimizer.step()
        direction = (theirs.grad.double() + mu * momentum.double()).abs()
        largest = torch.maximum(before, torch.maximum(lr * direction, lr * mu * momentum.abs())).float()
        difference = (params - theirs.detach()).abs().numpy()
        assert (difference <= limit * np.spacing(largest.numpy())).all()
        with torch.no_grad():  # each step starts from the same bits, so that one step's difference is what is measured
            theirs.copy_(params)
            if mu:
                optimizer.state[theirs]["momentum_buffer"].copy_(momentum)


def test_any_shape_is_updated_in_place_and_the_pseudograd_stays():
    generator = torch.Generator().manual_seed(3)
    params, gradient, momentum = (torch.randn(3, 5, 7, generator=generator) for _ in range(3))
    flat, flat_momentum, before = params.flatten().clone(), momentum.flatten().clone(), gradient.clone()
    nesterov_step(params, gradient, momentum, lr=0.7, mu=0.9)
    nesterov_step(flat, gradient.flatten(), flat_momentum, lr=0.7, mu=0.9)
    assert torch.equal(params.flatten(), flat) and torch.equal(momentum.flatten(), flat_momentum)
    assert torch.equal(gradient, before)


def test_threads_and_span_length_change_no_bit(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    start, gradient, velocity = (torch.randn(1_000_003, generator=generator) for _ in range(3))
    threads, results = torch.get_num_threads(), set()
    try:
        for num_threads, elements in [(1, 1 << 18), (2, 1 << 18), (2, 1 << 22), (1, 256)]:
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(outer_optimizer, "STEP_ELEMENTS", elements)
            params, momentum = start.clone(), velocity.clone()
            nesterov_step(params, gradient, momentum, lr=0.7, mu=0.9)
            results.add((params.numpy().tobytes(), momentum.numpy().tobytes()))
    finally:
        torch.set_num_threads(threads)
    assert len(results) == 1
