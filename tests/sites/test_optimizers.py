"""Muon beside AdamW: what moves which parameters, against the singular values of a gradient and against torch's own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.config.recipe import OptimConfig
from composer_prime.sites.embedded.learner import InnerOptimizer, inner_optimizer
from tests.sites.tiny_policy import random_policy

LR = 0.01


def moved(config: OptimConfig, steps: int = 1, *, tied: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients, movements) of a policy's parameters by name, after so many steps on the same gradients."""
    model = random_policy(tie_word_embeddings=tied)
    optimizer = inner_optimizer(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    give_gradients(model)
    for _ in range(steps):
        optimizer.step(config.lr)
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return gradients, {name: parameter.detach() - before[name] for name, parameter in named.items()}


def give_gradients(model, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def of_matrices(names) -> set[str]:
    return {name for name in names if name.endswith("proj.weight")}


def test_muon_moves_a_matrix_along_its_gradient_with_singular_values_near_one():
    gradients, movements = moved(OptimConfig(type="muon", lr=LR, weight_decay=0.0))
    assert len(of_matrices(gradients)) == 14  # of two layers: q, k, v, o, gate, up, down
    for name in of_matrices(gradients):
        left, sizes, right = torch.linalg.svd(gradients[name], full_matrices=False)
        scale = 0.2 * max(gradients[name].shape) ** 0.5 * LR
        within = -(left.T @ movements[name] @ right.T) / scale
        found = within.diagonal()[sizes > 0.02 * sizes.norm()]  # five iterations lift no smaller ones so far
        assert len(found) > 10 and found.min() > 0.6 and found.max() < 1.3
        assert (within - within.diagonal().diag()).abs().max() < 0.05  # turned in no other direction


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_no_matrix_moves_as_by_adamw_alone_bit_for_bit(tied):
    settings: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "betas1": 0.8, "betas2": 0.9}
    _, muon = moved(OptimConfig(type="muon", **settings), steps=3, tied=tied)
    _, adamw = moved(OptimConfig(**settings), steps=3, tied=tied)
    others = muon.keys() - of_matrices(muon)
    assert "model.embed_tokens.weight" in others and ("lm_head.weight" in others) == (not tied)
    assert all(torch.equal(muon[name], adamw[name]) for name in others)
    assert not any(torch.equal(muon[name], adamw[name]) for name in of_matrices(muon))


def test_mu_says_how_long_muon_remembers_a_gradient():
    """After a gradient and a twentieth of its opposite the step still goes the first one's way, unless mu is 0."""
    for mu, way in ((0.9, 1.0), (0.0, -1.0)):
        model = random_policy()
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        optimizer = inner_optimizer(model, OptimConfig(type="muon", lr=LR, weight_decay=0.0, mu=mu))
        give_gradients(model)
        assert weight.grad is not None
        first, before = weight.grad.clone(), weight.detach().clone()
        optimizer.step(0.0)
        weight.grad = -0.05 * first
        optimizer.step(LR)
        assert way * float(((before - weight.detach()) * first).sum()) > 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_bit_for_bit(kind):
    config = OptimConfig(type=kind, lr=LR)
    first, second = random_policy(), random_policy()
    optimizer = inner_optimizer(first, config)
    step(first, optimizer, seed=1)
    state = copy.deepcopy(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    restored = inner_optimizer(second, config)
    restored.load_state_dict(state)
    for seed in (2, 3):
        step(first, optimizer, seed)
        step(second, restored, seed)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def step(model, optimizer: InnerOptimizer, seed: int) -> None:
    give_gradients(model, seed)
    optimizer.step(LR)


def test_the_state_of_adamw_is_torchs_own():
    """So checkpoints from before there was another optimizer go on."""
    model, plain = random_policy(), random_policy()
    torchs = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    give_gradients(plain)
    torchs.step()
    model.load_state_dict(plain.state_dict())
    optimizer = inner_optimizer(model, OptimConfig(lr=LR))
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    step(model, optimizer, seed=2)
    give_gradients(plain, seed=2)
    torchs.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
