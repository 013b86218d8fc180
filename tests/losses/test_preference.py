"""DPO and SimPO against the papers' formulas and TRL's arithmetic, and DPO's gradient through composer_loss."""

import math

import pytest
import torch
from torch import Tensor

from composer_prime.errors import ConfigError
from composer_prime.losses.composer import composer_loss
from composer_prime.losses.preference import dpo_loss, pair_advantages, simpo_loss
from composer_prime.losses.records import LossInputs

CHOSEN = [-12.0, -3.5, -40.0, -7.25]
REJECTED = [-9.0, -8.0, -41.5, -7.25]
REF_CHOSEN = [-11.0, -5.0, -38.0, -6.0]
REF_REJECTED = [-10.0, -7.0, -44.0, -6.5]
LENGTHS, OTHER_LENGTHS = [10, 4, 32, 6], [7, 9, 30, 6]
WEIGHTS = [1.0, 0.5, 0.75, 2.0]


def fp64(values, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def four() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp64(CHOSEN), fp64(REJECTED), fp64(REF_CHOSEN), fp64(REF_REJECTED)


def test_dpo_is_the_papers_formula_pair_by_pair() -> None:
    found = dpo_loss(*four(), beta=0.3, weights=fp64(WEIGHTS))
    rows = zip(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, WEIGHTS, strict=True)
    expected = [-w * math.log(sigmoid(0.3 * (c - rc) - 0.3 * (r - rr))) for c, r, rc, rr, w in rows]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_dpo_is_trls_arithmetic_with_its_rewards() -> None:
    beta = 0.1
    chosen, rejected, ref_chosen, ref_rejected = four()
    found = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
    delta = (chosen - ref_chosen) - (rejected - ref_rejected)
    torch.testing.assert_close(found.losses, -torch.nn.functional.logsigmoid(beta * delta), rtol=1e-12, atol=0)
    chosen_rewards, rejected_rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    assert found.metrics["accuracy"].item() == (chosen_rewards > rejected_rewards).double().mean().item() == 0.25
    assert found.metrics["margin"].item() == pytest.approx((chosen_rewards - rejected_rewards).mean().item())


def test_simpo_is_the_papers_formula_pair_by_pair() -> None:
    found = simpo_loss(
        fp64(CHOSEN), fp64(REJECTED), fp64(LENGTHS), fp64(OTHER_LENGTHS), beta=2.5, gamma=0.8, weights=fp64(WEIGHTS)
    )
    rows = zip(CHOSEN, REJECTED, LENGTHS, OTHER_LENGTHS, WEIGHTS, strict=True)
    expected = [-w * math.log(sigmoid(2.5 / n * c - 2.5 / m * r - 0.8)) for c, r, n, m, w in rows]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_simpo_is_trls_arithmetic_with_its_rewards() -> None:
    beta, gamma = 2.0, 0.5
    chosen, rejected = fp64(CHOSEN) / fp64(LENGTHS), fp64(REJECTED) / fp64(OTHER_LENGTHS)
    found = simpo_loss(fp64(CHOSEN), fp64(REJECTED), fp64(LENGTHS), fp64(OTHER_LENGTHS), beta=beta, gamma=gamma)
    logits = (chosen - rejected) - gamma / beta
    torch.testing.assert_close(found.losses, -torch.nn.functional.logsigmoid(beta * logits), rtol=1e-12, atol=1e-15)
    assert found.metrics["accuracy"].item() == (beta * chosen > beta * rejected).double().mean().item() == 0.75
    assert found.metrics["margin"].item() == pytest.approx((beta * chosen - beta * rejected).mean().item())


def test_the_nll_term_is_the_chosen_answers_mean_over_its_tokens() -> None:
    lengths = fp64(LENGTHS)
    nll = fp64(WEIGHTS) * 0.2 * -fp64(CHOSEN) / lengths
    for with_it, without in (
        (
            dpo_loss(*four(), weights=fp64(WEIGHTS), sft_tau=0.2, chosen_lengths=lengths),
            dpo_loss(*four(), weights=fp64(WEIGHTS)),
        ),
        (
            simpo_loss(*four()[:2], lengths, fp64(OTHER_LENGTHS), weights=fp64(WEIGHTS), sft_tau=0.2),
            simpo_loss(*four()[:2], lengths, fp64(OTHER_LENGTHS), weights=fp64(WEIGHTS)),
        ),
    ):
        torch.testing.assert_close(with_it.losses - without.losses, nll, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    lengths, others, weights = fp64(LENGTHS), fp64(OTHER_LENGTHS), fp64(WEIGHTS)

    def dpo(chosen: Tensor, rejected: Tensor) -> Tensor:
        refs = fp64(REF_CHOSEN), fp64(REF_REJECTED)
        return dpo_loss(chosen, rejected, *refs, weights=weights, sft_tau=0.3, chosen_lengths=lengths).losses

    def simpo(chosen: Tensor, rejected: Tensor) -> Tensor:
        return simpo_loss(chosen, rejected, lengths, others, weights=weights, sft_tau=0.3).losses

    for loss in (dpo, simpo):
        assert torch.autograd.gradcheck(loss, (fp64(CHOSEN, grad=True), fp64(REJECTED, grad=True)))


def test_the_reference_and_the_weights_get_no_gradient() -> None:
    leaves = [fp64(one, grad=True) for one in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, WEIGHTS)]
    dpo_loss(*leaves[:4], weights=leaves[4]).losses.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_far_apart_stay_finite_in_value_and_gradient(dtype: torch.dtype) -> None:
    chosen = torch.tensor([-1e6, -1.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-1.0, -1e6], dtype=dtype, requires_grad=True)
    zeros = torch.zeros(2, dtype=dtype)
    found = dpo_loss(chosen, rejected, zeros, zeros, beta=1.0)
    found.losses.sum().backward()
    assert found.losses.tolist() == pytest.approx([1e6 - 1, 0.0])
    assert chosen.grad is not None and chosen.grad.tolist() == [-1.0, 0.0]


def test_bf16_is_worked_on_in_fp32_and_no_pairs_are_no_loss() -> None:
    half = [one.to(torch.bfloat16) for one in four()]
    assert dpo_loss(*half).losses.dtype == torch.float32
    empty = torch.zeros(0)
    found = simpo_loss(empty, empty, empty, empty)
    assert found.losses.shape == (0,) and found.metrics["accuracy"] == 0 and found.metrics["margin"] == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"beta": 0.0}, "beta (0.0) must be above 0"),
        ({"beta": math.nan}, "beta (nan) must be above 0"),
        ({"sft_tau": -0.1}, "sft_tau (-0.1) must be at least 0"),
        ({"sft_tau": 0.1}, "sft_tau (0.1) is a weight a token: give chosen_lengths"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dpo_loss(*four(), **settings)  # type: ignore[arg-type]
    assert told in str(refused.value)
    with pytest.raises(ConfigError, match="gamma"):
        simpo_loss(*four(), gamma=-1.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_two_samples_of_the_policy_loss_have_dpos_gradient_at_the_scoring_policy(weighted: bool) -> None:
    beta, num_pairs, vocabulary = 0.2, 6, 11
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 9, (2, num_pairs), generator=generator).tolist()
    width = max(map(max, lengths))
    tokens = torch.randint(vocabulary, (2, num_pairs, width), generator=generator)
    states = torch.randn(2, num_pairs, width, 5, generator=generator, dtype=torch.float64)
    head = torch.randn(5, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    references = torch.randn(2, num_pairs, generator=generator, dtype=torch.float64) * 5 - 20
    weights = torch.rand(num_pairs, generator=generator, dtype=torch.float64) if weighted else None

    logprobs = (states @ head).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mask = torch.arange(width) < torch.tensor(lengths)[..., None]
    chosen, rejected = (logprobs * mask).sum(-1)
    found = dpo_loss(chosen, rejected, *references, beta=beta, weights=weights)
    (expected,) = torch.autograd.grad(found.losses.sum(), head, retain_graph=True)

    advantages = torch.stack(pair_advantages(found.margins, beta, weights))
    total = torch.zeros((), dtype=torch.float64)
    for answer in range(2):
        for pair in range(num_pairs):
            one = logprobs[answer, pair]
            sample = LossInputs(
                trainer_logprobs=one,
                inference_logprobs=one.detach(),
                advantages=advantages[answer, pair].expand(width),
                loss_mask=mask[answer, pair],
            )
            total = total + composer_loss(sample).loss
    (gradient,) = torch.autograd.grad(total, head)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
