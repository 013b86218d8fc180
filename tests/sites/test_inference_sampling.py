"""Drawing tokens: the distribution, the log-probability that goes with it, and the edges of both."""

import pytest
import torch

from composer_prime.sites.embedded.inference.sampling import draw


def draw_one(logits: list[float], *, temperature: float = 1.0, top_p: float = 1.0, uniform: float = 0.5):
    tokens, logprobs = draw(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([top_p]),
        torch.tensor([uniform], dtype=torch.float64),
    )
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_scaled_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf")])
    uniform = torch.arange(20_000, dtype=torch.float64) / 20_000
    rows = len(uniform)
    tokens, logprobs = draw(logits.expand(rows, -1), torch.full((rows,), temperature), torch.ones(rows), uniform)
    expected = (logits / temperature).softmax(dim=0)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / rows, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logprobs, (logits / temperature).log_softmax(dim=0)[tokens])


def test_top_p_changes_the_choice_and_not_the_log_probability() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    chosen = {draw_one(logits, top_p=0.6, uniform=u / 100)[0] for u in range(100)}
    assert chosen == {0, 1}
    assert draw_one(logits, top_p=0.6, uniform=0.9) == (1, pytest.approx(torch.tensor(0.3).log().item()))
    assert {draw_one(logits, top_p=0.01, uniform=u / 100)[0] for u in range(100)} == {0}


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = [0.1, 2.0, 1.9]
    token, logprob = draw_one(logits, temperature=0.0, uniform=0.99)
    assert token == 1
    assert logprob == pytest.approx(torch.tensor(logits).log_softmax(dim=0)[1].item())


def test_largest_uniform_number_never_draws_an_impossible_token() -> None:
    last_below_one = 1 - 2**-53
    for logits in ([0.0, 1.0, float("-inf")], [3.0, float("-inf"), float("-inf")], [0.1] * 7 + [float("-inf")]):
        token, logprob = draw_one(logits, uniform=last_below_one)
        assert logits[token] > float("-inf") and logprob > -10
        assert draw_one([float("-inf"), *logits], uniform=0.0)[0] > 0


def test_rows_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    temperature, top_p = torch.tensor([1.0, 0.0, 0.7, 1.0, 2.0, 0.1]), torch.tensor([1.0, 1.0, 0.5, 0.9, 1.0, 1.0])
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    together = draw(logits, temperature, top_p, uniform)
    for row in range(6):
        alone = draw(*(part[row : row + 1] for part in (logits, temperature, top_p, uniform)))
        assert alone[0] == together[0][row] and alone[1] == together[1][row]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_nan_in_their_row_alone(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]])
    _, logprobs = draw(logits, torch.ones(2), torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [False, True]
