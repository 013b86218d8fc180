"""The logits at k ids and their log-probabilities, beside the whole log-softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.sites.prime_rl.topk import head
from composer_prime.sites.prime_rl.topk.head import Lookup, logits_at, logprobs_of
from tests.sites.prime_rl.topk.forward_kl import forward_kl

N, H, V, K = 40, 12, 60, 8
TOLERANCE = 1e-6


def problem(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, a head with a bias, and a teacher of some tokens; an id stands in many rows, a row comes twice."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.arange(0, N, 2), torch.tensor([4, 10])])
    logprobs = torch.randn(len(rows), K + 4, generator=generator, dtype=torch.float64).log_softmax(-1)[:, :K]
    ids = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in rows])
    ids[:, 0] = 3
    return {
        "hidden": torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype),
        "weight": (torch.randn(V, H, generator=generator, dtype=torch.float64) / H**0.5).to(dtype),
        "bias": torch.randn(V, generator=generator, dtype=torch.float64).to(dtype),
        "temperature": (0.5 + torch.rand(N, generator=generator, dtype=torch.float64)).to(dtype),
        "rows": rows,
        "labels": torch.randint(V, (N,), generator=generator),
        "ids": ids,
        "teacher": logprobs.to(dtype),
    }


def whole(given: dict[str, Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: Any) -> Tensor:
    """(N, V): all log-probabilities, by the definition."""
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / given["temperature"].unsqueeze(1)).log_softmax(-1)


def by_whole(given: dict[str, Tensor], hidden: Tensor, weight: Tensor, bias: Any, softcap: Any) -> Tensor:
    """The candidates' log-probabilities, of the full vocabulary's."""
    return whole(given, hidden, weight, bias, softcap)[given["rows"].unsqueeze(1), given["ids"]]


def by_lookup(given: dict[str, Tensor], hidden: Tensor, weight: Tensor, bias: Any, softcap: Any) -> Tensor:
    """The same by ours, which is given the labels' alone."""
    everywhere = whole(given, hidden, weight, bias, softcap)
    rows = given["rows"]
    tokens = given["labels"][rows]
    lookup = Lookup.of(rows, torch.cat([tokens.unsqueeze(1), given["ids"]], dim=1))
    temperature = given["temperature"]
    logits = logits_at(hidden, weight, lookup, bias=bias, softcap=softcap, temperature=temperature)
    return logprobs_of(logits, everywhere[rows, tokens])


def graded(way: Callable[..., Tensor], given: dict[str, Tensor], biased: bool, softcap: float | None) -> list[Tensor]:
    """Value of the forward KL, and its gradients to hidden, weight and bias."""
    leaves = [given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    value = forward_kl(way(given, *leaves[:2], leaves[2] if biased else None, softcap), given["teacher"]).sum()
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [5, 512])
def test_fp32_logprobs_and_gradients_are_within_1e_6_of_the_whole_fp64_softmax(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, biased: bool, chunk: int
) -> None:
    monkeypatch.setattr(head, "CHUNK_ROWS", chunk)
    drawn = problem(torch.float32)
    ours = graded(by_lookup, drawn, biased, softcap)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in drawn.items()}
    reference = graded(by_whole, exact, biased, softcap)
    assert len(ours) == len(reference) == (4 if biased else 3)
    for mine, theirs in zip(ours, reference, strict=True):
        assert (mine.double() - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_a_tied_weight_gets_the_embeddings_and_the_heads_gradient() -> None:
    given = problem(torch.float64)
    tokens = torch.arange(N) % V

    def gradient(way: Callable[..., Tensor]) -> Tensor:
        weight = given["weight"].clone().requires_grad_()
        forward_kl(way(given, torch.tanh(weight[tokens]), weight, None, None), given["teacher"]).sum().backward()
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(gradient(by_lookup), gradient(by_whole), rtol=1e-9, atol=1e-9)


def test_logits_that_the_head_has_made_are_read_to_the_bit_and_gradients_still_reach_the_weight() -> None:
    given = problem(torch.bfloat16)
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    known = hidden @ weight.t()
    lookup = Lookup.of(given["rows"], given["ids"])
    logits = logits_at(hidden, weight, lookup, known=known)
    assert torch.equal(logits, known[given["rows"].unsqueeze(1), given["ids"]].float())
    logits.sum().backward()
    assert weight.grad is not None and hidden.grad is not None
    dense = torch.zeros(N, V).index_put_((given["rows"].unsqueeze(1), given["ids"]), torch.tensor(1.0), accumulate=True)
    torch.testing.assert_close(weight.grad, (dense.t() @ hidden.float()).bfloat16(), rtol=0.01, atol=1e-6)


def test_a_frequent_ids_gradient_is_summed_in_fp32() -> None:
    # 4096 rows of 1.0: bf16 stops counting at 256.
    hidden = torch.ones(4096, 2, dtype=torch.bfloat16)
    weight = torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True)
    lookup = Lookup.of(torch.arange(4096), torch.full((4096, 1), 3))
    logits_at(hidden, weight, lookup).sum().backward()
    assert weight.grad is not None
    assert weight.grad[3].tolist() == [4096.0, 4096.0] and weight.grad.count_nonzero() == 2


def test_nothing_that_is_kept_for_backward_is_as_wide_as_the_columns_of_all_rows() -> None:
    given = problem(torch.float32)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    lookup = Lookup.of(given["rows"], given["ids"])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits_at(given["hidden"].requires_grad_(), given["weight"].requires_grad_(), lookup)
    assert kept and max(tensor.numel() for tensor in kept) <= max(N * H, V * H, lookup.slots.numel())
