"""Flat vectors and parameters: round trips for every dtype, and that rounding isn't mistaken for movement."""

import pytest
import torch

from composer_prime.errors import SiteError
from composer_prime.outer.fragments import plan_fragments
from composer_prime.outer.pseudograd import copy_to_host, flatten, pseudograd, rounded, write_back

SHAPES = [
    ("embed.weight", (5, 3)),
    ("layers.0.w", (3, 3)),
    ("layers.0.scale", ()),
    ("layers.1.w", (2, 3, 1)),
    ("norm", (3,)),
]
(FRAGMENT,) = plan_fragments(SHAPES, 1)


def parameters(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES} | {
        "not.in.the.fragment": torch.nn.Parameter(torch.ones(2))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_flatten_is_the_values_in_fragment_order_as_fp32(dtype):
    params = parameters(dtype)
    flat = flatten(params, FRAGMENT)
    assert flat.dtype == torch.float32 and flat.shape == (FRAGMENT.numel,) and not flat.requires_grad
    expected = torch.cat([params[name].detach().reshape(-1).float() for name in FRAGMENT.names])
    assert torch.equal(flat, expected)


def test_flatten_is_a_copy_also_of_fp32_parameters():
    params = parameters(torch.float32)
    flat = flatten(params, FRAGMENT)
    before = flat.clone()
    with torch.no_grad():
        for parameter in params.values():
            parameter.add_(1)
    assert torch.equal(flat, before)


def test_flatten_reads_transposed_parameters_in_their_logical_order():
    params = dict(parameters(torch.float32))
    expected = flatten(params, FRAGMENT)
    params["embed.weight"] = torch.nn.Parameter(params["embed.weight"].detach().t().contiguous().t())
    assert not params["embed.weight"].is_contiguous()
    assert torch.equal(flatten(params, FRAGMENT), expected)
    write_back(expected + 1, params, FRAGMENT)
    assert torch.equal(flatten(params, FRAGMENT), expected + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_write_back_returns_what_the_parameters_hold_and_rounded_foretells_it(dtype):
    params = parameters(dtype)
    target = flatten(parameters(torch.float32, seed=1), FRAGMENT)
    held_before = flatten(params, FRAGMENT)
    foretold = rounded(target, params, FRAGMENT)
    assert torch.equal(flatten(params, FRAGMENT), held_before)
    held = write_back(target, params, FRAGMENT)
    assert torch.equal(held, flatten(params, FRAGMENT)) and torch.equal(held, foretold)
    assert held.data_ptr() != target.data_ptr()
    assert torch.equal(held, target) == (dtype in (torch.float32, torch.float64))
    assert all(parameter.dtype == dtype for name, parameter in params.items() if name in FRAGMENT.names)
    assert torch.equal(params["not.in.the.fragment"].detach(), torch.ones(2))


def test_write_back_keeps_the_parameter_objects_and_their_gradients():
    params = parameters(torch.bfloat16)
    objects, grad = {name: id(p) for name, p in params.items()}, torch.ones(3, dtype=torch.bfloat16)
    params["norm"].grad = grad
    write_back(torch.zeros(FRAGMENT.numel), params, FRAGMENT)
    assert {name: id(p) for name, p in params.items()} == objects
    assert params["norm"].grad is grad and params["norm"].requires_grad


def test_a_bf16_site_that_did_not_move_has_a_pseudograd_of_zero():
    params = parameters(torch.bfloat16)
    master = flatten(parameters(torch.float32, seed=2), FRAGMENT)
    base = write_back(master, params, FRAGMENT)
    assert not pseudograd(base, flatten(params, FRAGMENT)).any()
    assert pseudograd(master, flatten(params, FRAGMENT)).any()  # against the master, rounding would count as work


def test_the_sign_of_a_pseudograd_is_that_of_a_gradient():
    assert torch.equal(pseudograd(torch.tensor([3.0]), torch.tensor([1.0])), torch.tensor([2.0]))


@pytest.mark.parametrize("call", [flatten, lambda p, f: write_back(torch.zeros(f.numel), p, f)])
def test_a_missing_or_reshaped_parameter_is_named(call):
    params = parameters(torch.float32)
    with pytest.raises(SiteError, match=r"norm has shape \(1,\), fragment 0 needs shape \(3,\)"):
        call(params | {"norm": torch.zeros(1)}, FRAGMENT)
    del params["norm"]
    with pytest.raises(SiteError, match="norm is missing"):
        call(params, FRAGMENT)


def test_a_copy_to_the_host_is_whole_and_in_logical_order_for_any_strides():
    values = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).permute(2, 0, 1)
    target = torch.full((26,), -1.0)
    copy_to_host(values, target[1:25])
    assert torch.equal(target[1:25], values.reshape(-1).float()) and target[0] == target[25] == -1
