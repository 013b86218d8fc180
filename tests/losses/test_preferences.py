"""A pair as two weighted samples: DPO's and SimPO's own gradients, against autograd in fp64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_prime.losses.composer import composer_loss
from composer_prime.losses.preferences import PreferenceLoss, Scored, lead, margin, pair_advantages
from composer_prime.losses.records import LossInputs

BETA, GAMMA = 0.7, 0.4
CHOSEN, REJECTED = Scored(-12.0, 10, reference=-11.0), Scored(-9.0, 4, reference=-10.0)


def formula(loss: PreferenceLoss, logprobs: Tensor, lengths: Tensor, references: Tensor) -> Tensor:
    """The papers' losses of pairs; all tensors (2, pairs), the chosen first."""
    if loss == "dpo":
        chosen, rejected = logprobs - references
        return -logsigmoid(BETA * (chosen - rejected))
    chosen, rejected = logprobs / lengths
    return -logsigmoid(BETA * (chosen - rejected) - GAMMA)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_two_samples_of_the_policy_loss_have_the_preference_losss_gradient(loss: PreferenceLoss) -> None:
    num_pairs, vocabulary = 6, 11
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 9, (2, num_pairs), generator=generator)
    tokens = torch.randint(vocabulary, (2, num_pairs, 8), generator=generator)
    states = torch.randn(2, num_pairs, 8, 5, generator=generator, dtype=torch.float64)
    head = torch.randn(5, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    references = torch.randn(2, num_pairs, generator=generator, dtype=torch.float64) * 5 - 20

    logprobs = (states @ head).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mask = torch.arange(8) < lengths[..., None]
    sums = (logprobs * mask).sum(-1)
    (expected,) = torch.autograd.grad(formula(loss, sums, lengths, references).sum(), head, retain_graph=True)

    total = torch.zeros((), dtype=torch.float64)
    for pair in range(num_pairs):
        both = [Scored(sums[one, pair].item(), int(lengths[one, pair]), references[one, pair].item()) for one in (0, 1)]
        gamma = GAMMA if loss == "simpo" else 0.0
        for answer, advantage in enumerate(pair_advantages(loss, *both, beta=BETA, gamma=gamma)):
            own = logprobs[answer, pair]
            sample = LossInputs(
                trainer_logprobs=own,
                inference_logprobs=own.detach(),
                advantages=torch.full((8,), advantage, dtype=torch.float64),
                loss_mask=mask[answer, pair],
            )
            total = total + composer_loss(sample).loss
    (gradient,) = torch.autograd.grad(total, head)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_margins_are_the_papers() -> None:
    assert margin("dpo", CHOSEN, REJECTED, beta=0.5) == pytest.approx(0.5 * (-1.0 - 1.0))
    assert margin("simpo", CHOSEN, REJECTED, beta=2.0, gamma=0.3) == pytest.approx(2.0 * (-1.2 + 2.25) - 0.3)


def test_the_lead_is_the_lesser_of_the_policys_own_and_its_distance_from_the_reference() -> None:
    assert lead(CHOSEN, REJECTED) == pytest.approx(-3.0)  # by itself; against the reference it is -2
    assert lead(Scored(-1.0, 3, reference=-2.0), Scored(-9.0, 3, reference=-8.0)) == pytest.approx(2.0)
    assert lead(Scored(-1.0, 3), Scored(-9.0, 3)) == pytest.approx(8.0)  # without one


def test_pairs_far_apart_stay_finite() -> None:
    near, far = Scored(-1.0, 1, reference=-9e5), Scored(-9e5, 1, reference=-1.0)
    assert pair_advantages("dpo", near, far, beta=0.1) == (0.0, -0.0)
    assert pair_advantages("dpo", far, near, beta=0.1) == (0.1, -0.1) and math.isfinite(
        margin("dpo", far, near, beta=9)
    )
