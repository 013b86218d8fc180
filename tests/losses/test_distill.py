"""distill_loss against its formulas in plain Python (fp64), and TAID's schedule against the reference's arithmetic."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from composer_prime.errors import ConfigError
from composer_prime.losses.distill import DistillInputs, distill_loss
from composer_prime.losses.taid import TaidSchedule

ALL: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"jsd_alpha": 0.3},
    "taid": {"taid_t": 0.6},
    "entropy_aware": {"entropy_threshold": 1.2},
}
SUMS = {"teacher_entropy", "student_entropy", "overlap", "student_tail"}
LEAST = 1e-7


def draw(seed=0, num_tokens=12, vocab=30, k=6, sharp=1.5) -> tuple[Any, Any, Any]:
    """Log-probs fp64 (n, V) of policy and teacher, and inputs with the teacher's top k; some slots are empty."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, sharp, (2, num_tokens, vocab)))
    logits[1, ::2] *= 3  # certain teachers beside uncertain ones
    student, teacher = logits.log_softmax(-1)
    top, ids = teacher.topk(k)
    chosen = student.gather(1, ids)
    if num_tokens and k > 2:
        top[0, k - 2 :] = -math.inf
    mask = torch.tensor(rng.random(num_tokens) < 0.7)
    weights = torch.tensor(rng.uniform(0, 2, num_tokens))
    return student, teacher, DistillInputs(student_logprobs=chosen, teacher_logprobs=top, mask=mask, weights=weights)


def run(inputs, **settings):
    """(outputs, gradient) of distill_loss."""
    student = inputs.student_logprobs.clone().requires_grad_()
    fields = {**vars(inputs), "student_logprobs": student}
    outputs = distill_loss(DistillInputs(**fields), **settings)
    (gradient,) = torch.autograd.grad(outputs.loss, student)
    return outputs, gradient


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def entropy(p):
    return -sum(a * math.log(a) for a in p)


def reference_divergence(s, t, divergence, *, jsd_alpha=0.5, taid_t=0.0, entropy_threshold=0.8):
    """One token: s and t are probabilities over the support."""
    if divergence == "jsd":
        m = [(1 - jsd_alpha) * a + jsd_alpha * b for a, b in zip(s, t, strict=True)]
        return (1 - jsd_alpha) * kl(s, m) + jsd_alpha * kl(t, m)
    if divergence == "taid":
        q = [a ** (1 - taid_t) * b**taid_t for a, b in zip(s, t, strict=True)]
        return kl([a / sum(q) for a in q], s)
    if divergence == "entropy_aware":
        return kl(s, t) + (kl(t, s) if entropy(t) > entropy_threshold else 0.0)
    return kl(t, s) if divergence == "forward_kl" else kl(s, t)


def support(logprobs, filled):
    """Probabilities of the filled slots and the tail."""
    p = [math.exp(one) for one, there in zip(logprobs, filled, strict=True) if there]
    return [*p, max(1 - sum(p), LEAST)]


def reference(inputs, tau, divergence, **settings):
    loss, sums = 0.0, dict.fromkeys(SUMS, 0.0)
    for token in range(len(inputs.mask)):
        if not inputs.mask[token]:
            continue
        teacher = inputs.teacher_logprobs[token].tolist()
        filled = [one != -math.inf for one in teacher]
        s = support(inputs.student_logprobs[token].tolist(), filled)
        t = support(teacher, filled)
        weight = 1.0 if inputs.weights is None else inputs.weights[token].item()
        loss += tau * weight * reference_divergence(s, t, divergence, **settings)
        sums["teacher_entropy"] += entropy(t)
        sums["student_entropy"] += entropy(s)
        sums["overlap"] += sum(map(min, s, t))
        sums["student_tail"] += s[-1]
    return loss, sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_value_and_metrics_equal_the_formulas(name, dtype):
    for seed in range(20):
        _, _, inputs = draw(seed, k=1 + seed % 7)
        for field in ("student_logprobs", "teacher_logprobs", "weights"):
            setattr(inputs, field, getattr(inputs, field).to(dtype))
        if seed % 3 == 0:
            inputs.weights = None
        outputs, _ = run(inputs, tau=0.7, divergence=name, **ALL[name])
        loss, sums = reference(inputs, 0.7, name, **ALL[name])
        assert outputs.loss.dtype == dtype
        assert outputs.loss.item() == pytest.approx(loss, rel=1e-6, abs=1e-6)
        assert outputs.metrics.keys() == SUMS | {"loss", "num_tokens"}
        assert all(one.ndim == 0 and not one.requires_grad for one in outputs.metrics.values())
        assert outputs.metrics["num_tokens"].item() == inputs.mask.sum().item()
        assert outputs.metrics["loss"].item() == outputs.loss.item()
        for metric, value in sums.items():
            assert outputs.metrics[metric].item() == pytest.approx(value, rel=1e-6, abs=1e-6), metric


@pytest.mark.parametrize("name", [name for name in ALL if name != "taid"])
def test_gradcheck(name):
    _, _, inputs = draw(3)

    def loss(student):
        fields = {**vars(inputs), "student_logprobs": student}
        return distill_loss(DistillInputs(**fields), tau=0.7, divergence=name, **ALL[name]).loss

    assert torch.autograd.gradcheck(loss, inputs.student_logprobs.clone().requires_grad_())


def test_taids_gradient_holds_its_target_still():
    _, _, inputs = draw(3)
    _, gradient = run(inputs, tau=0.7, divergence="taid", taid_t=0.6)
    for index in [(0, 0), (4, 2), (7, 5)]:
        token = index[0]
        if not inputs.mask[token] or inputs.teacher_logprobs[index] == -math.inf:
            continue
        filled = (inputs.teacher_logprobs[token] != -math.inf).tolist()
        s = support(inputs.student_logprobs[token].tolist(), filled)
        t = support(inputs.teacher_logprobs[token].tolist(), filled)
        q = [a**0.4 * b**0.6 for a, b in zip(s, t, strict=True)]
        q = [a / sum(q) for a in q]
        wanted = -q[index[1]] + q[-1] * s[index[1]] / s[-1]  # d/dl of -q log s - q_tail log(1 - sum exp l)
        assert gradient[index].item() == pytest.approx(0.7 * inputs.weights[token].item() * wanted, rel=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_all_of_the_vocabulary_gives_the_full_divergence(name):
    student, teacher, inputs = draw(5)
    inputs.student_logprobs, inputs.teacher_logprobs, inputs.weights = student, teacher, None
    outputs, _ = run(inputs, tau=1.0, divergence=name, **ALL[name])
    pairs = [(student[one].exp().tolist(), teacher[one].exp().tolist()) for one in range(12) if inputs.mask[one]]
    exact = sum(reference_divergence(s, t, name, **ALL[name]) for s, t in pairs)
    assert outputs.loss.item() == pytest.approx(exact, rel=1e-6)
    assert outputs.metrics["student_tail"].item() == pytest.approx(LEAST * len(pairs), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.25, 0.5])
def test_jsd_is_that_of_sdpo_on_the_students_top_k_with_a_tail(alpha):
    student, teacher, inputs = draw(8, k=5)
    top, ids = student.topk(5)
    s, t = top, teacher.gather(1, ids)
    inputs.student_logprobs, inputs.teacher_logprobs, inputs.weights = s, t, None
    outputs, _ = run(inputs, tau=1.0, divergence="jsd", jsd_alpha=alpha)

    def with_tail(logprobs):
        mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([logprobs, (-mass.expm1()).log()], -1)

    s, t = with_tail(s), with_tail(t)
    mixture = ((1 - alpha) * s.exp() + alpha * t.exp()).log()
    to_student, to_teacher = ((one.exp() * (one - mixture)).sum(-1) for one in (s, t))
    exact = ((1 - alpha) * to_student + alpha * to_teacher)[inputs.mask].sum()
    assert outputs.loss.item() == pytest.approx(exact.item(), rel=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_equal_distributions_cost_nothing_and_pull_nowhere(name):
    inputs = draw(2)[2]
    inputs.student_logprobs = inputs.teacher_logprobs.clone()
    outputs, gradient = run(inputs, tau=1.0, divergence=name, **ALL[name])
    assert abs(outputs.loss.item()) < 1e-12 and gradient.abs().max().item() < 1e-12
    assert outputs.metrics["overlap"].item() == pytest.approx(inputs.mask.sum().item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALL)
def test_unmasked_tokens_and_empty_slots_reach_neither_value_nor_gradient(name, bad):
    _, _, clean = draw(4)
    clean.mask[0] = True
    wanted, wanted_gradient = run(clean, tau=1.0, divergence=name, **ALL[name])
    _, _, dirty = draw(4)
    dirty.mask[0] = True
    off = ~dirty.mask
    dirty.student_logprobs[dirty.teacher_logprobs == -math.inf] = bad
    dirty.student_logprobs[off], dirty.teacher_logprobs[off], dirty.weights[off] = bad, bad, bad
    outputs, gradient = run(dirty, tau=1.0, divergence=name, **ALL[name])
    assert torch.equal(outputs.loss, wanted.loss) and torch.equal(gradient, wanted_gradient)
    assert outputs.metrics == wanted.metrics and wanted.metrics["num_tokens"] > 0 < off.sum()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("student", [[0.0, -40.0], [-1e-9, -1e-9], [-math.inf, -1.0], [-1e30, -1e30], [-0.7, -0.69]])
def test_any_log_probs_give_finite_values_and_gradients(name, student):
    for dtype in (torch.float32, torch.float64):
        inputs = DistillInputs(
            student_logprobs=torch.tensor([student], dtype=dtype),
            teacher_logprobs=torch.tensor([[-1e-8, -17.0]], dtype=dtype),
            mask=torch.tensor([True]),
        )
        outputs, gradient = run(inputs, tau=1.0, divergence=name, **ALL[name])
        assert outputs.loss.isfinite() and gradient.isfinite().all()
        assert all(one.isfinite() for one in outputs.metrics.values())


@pytest.mark.parametrize("num_tokens, k", [(0, 4), (3, 0), (0, 0)])
def test_no_tokens_or_no_candidates_cost_nothing_with_a_graph(num_tokens, k):
    inputs = DistillInputs(
        student_logprobs=torch.zeros(num_tokens, k),
        teacher_logprobs=torch.zeros(num_tokens, k),
        mask=torch.ones(num_tokens, dtype=torch.bool),
    )
    outputs, gradient = run(inputs, tau=1.0)
    assert outputs.loss.item() == 0 and gradient.shape == (num_tokens, k)


def test_tau_0_gives_exactly_0_and_no_gradient_whatever_the_tokens():
    _, _, inputs = draw(1)
    inputs.student_logprobs[inputs.mask] = math.nan
    outputs, gradient = run(inputs, tau=0.0)
    assert outputs.loss.item() == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": -1.0}, "tau .-1.0. must be a finite number from 0"),
        ({"divergence": "tv"}, "must be one of forward_kl"),
        ({"divergence": "jsd", "jsd_alpha": 1.0}, "jsd_alpha .1.0. must lie between 0 and 1"),
        ({"divergence": "taid"}, "taid_t .None. must be a number from 0 to 1"),
        ({"entropy_threshold": math.nan}, "entropy_threshold .nan. must be at least 0"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(draw()[2], **{"tau": 1.0, **settings})


def taid_by_hand(losses, num_steps, t_start, t_end, alpha, beta):
    """The reference's arithmetic; its first call only stores the loss."""
    t, momentum, previous, out = t_start, 0.0, None, []
    for step, loss in enumerate(losses):
        if previous is not None:
            momentum = beta * momentum + (1 - beta) * (previous - loss) / (previous + 1e-15)
            rate = 1 / (1 + math.exp(-momentum))
            t = min(t_end, max(t_start + (t_end - t_start) * step / num_steps, t + alpha * rate * (1 - t)))
        previous = loss
        out.append(t)
    return out


@pytest.mark.parametrize("settings", [(0.4, 1.0, 5e-4, 0.99), (0.2, 0.9, 0.1, 0.5), (0.0, 1.0, 0.0, 0.9)])
def test_taids_t_is_the_references_and_goes_on_after_a_restart(settings):
    losses = np.random.default_rng(0).uniform(0.1, 3.0, 50).tolist()
    names = dict(zip(("t_start", "t_end", "alpha", "beta"), settings, strict=True))
    first, second = TaidSchedule(60, **names), TaidSchedule(60, **names)
    got = [first.update(loss, step) for step, loss in enumerate(losses[:20])]
    second.load_state_dict(first.state_dict())
    got += [second.update(loss, step + 20) for step, loss in enumerate(losses[20:])]
    assert got == pytest.approx(taid_by_hand(losses, 60, *settings), rel=1e-12)
    assert got[0] == settings[0] < got[-1] <= settings[1]


def test_taid_refuses_what_it_cannot_use_and_bears_a_loss_of_0():
    schedule = TaidSchedule(10)
    for loss in (0.0, 1.0, 0.0):
        assert 0.4 <= schedule.update(loss, 0) <= 1.0
    with pytest.raises(ValueError, match=r"TAID's loss .nan. must be finite"):
        schedule.update(math.nan, 1)
    with pytest.raises(ConfigError, match=r"t_start .1.5. must lie in"):
        TaidSchedule(10, t_start=1.5)
