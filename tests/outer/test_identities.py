"""The outer loop where its outcome is known: alone it is plain training, and at H = 1 it is data-parallel SGD.

Real (tiny) transformers; what a site's driver does is spelled out in `Site`, with no store and no clock.
"""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.fragments import Fragment, plan_fragments, trainable
from composer_prime.outer.masters import master_sha256
from composer_prime.outer.merge import carry, settle
from composer_prime.outer.outer_optimizer import nesterov_step
from composer_prime.outer.pseudograd import flatten, pseudograd, write_back
from composer_prime.outer.shares import multipliers

VOCABULARY, LENGTH, INNER_LR = 32, 12, 0.05


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def batch(step: int, size: int = 8) -> torch.Tensor:
    return torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(step))


def inner_step(policy: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    policy(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


class Site:
    """One site's model, its adopted masters, and what it captured for the offers it has out, by fragment index."""

    def __init__(self, num_fragments: int, codec: str = "fp32", momentum: float = 0.0) -> None:
        self.policy = model()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=INNER_LR, momentum=momentum)
        named = trainable(self.policy.named_parameters())
        self.params = dict(named)
        self.fragments = plan_fragments([(name, tuple(p.shape)) for name, p in named], num_fragments)
        self.codec = get_codec(codec)
        self.masters = [flatten(self.params, f) for f in self.fragments]
        self.momenta = [torch.zeros(f.numel) for f in self.fragments]
        self.bases = [master.clone() for master in self.masters]
        self.captures: dict[int, torch.Tensor] = {}

    def offer(self, fragment: Fragment) -> bytes:
        captured = flatten(self.params, fragment)
        self.captures[fragment.index] = captured
        return self.codec.encode(pseudograd(self.bases[fragment.index], captured))

    def adopt(
        self, fragment: Fragment, payloads: dict[str, bytes], *, lr: float, mu: float, taken: bool = True
    ) -> None:
        place, shares = fragment.index, multipliers(dict.fromkeys(payloads, 100), "equal")
        parts = [(share, self.codec.decode(payloads[site], fragment.numel)) for site, share in shares.items()]
        nesterov_step(self.masters[place], weighted_mean(parts), self.momenta[place], lr=lr, mu=mu)
        local, new_base, captured = (
            flatten(self.params, fragment),
            self.masters[place].clone(),
            self.captures.pop(place),
        )
        merged = settle(local, captured, new_base) if taken else carry(local, self.bases[place], new_base)
        write_back(merged, self.params, fragment)
        self.bases[place] = new_base

    def hashes(self) -> list[str]:
        return [master_sha256(m, v) for m, v in zip(self.masters, self.momenta, strict=True)]


def assert_same_weights(left: nn.Module, right: nn.Module, tolerance: float = 2e-6) -> None:
    for (name, ours), (_, theirs) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(("inner_steps", "num_fragments", "sync_delay"), [(1, 1, 0), (4, 1, 0), (6, 3, 0), (6, 3, 1)])
def test_one_site_with_outer_lr_1_and_no_momentum_is_plain_training(inner_steps, num_fragments, sync_delay):
    site, plain = Site(num_fragments, momentum=0.9), Site(1, momentum=0.9)
    stride, pending = inner_steps // num_fragments, {}
    start = [p.detach().clone() for p in plain.policy.parameters()]
    for step in range(1, 13):
        inner_step(site.policy, site.optimizer, batch(step))
        inner_step(plain.policy, plain.optimizer, batch(step))
        if step % stride == 0:
            fragment = site.fragments[step // stride % num_fragments]
            pending[step + sync_delay] = (fragment, site.offer(fragment))
        if step in pending:
            fragment, payload = pending.pop(step)
            site.adopt(fragment, {"a": payload}, lr=1.0, mu=0.0)
    assert_same_weights(site.policy, plain.policy)
    moved = max((p.detach() - s).abs().max().item() for p, s in zip(plain.policy.parameters(), start, strict=True))
    assert moved > 1e-2  # what is equal is training, not standing still


@pytest.mark.parametrize("num_sites", [2, 3])
def test_sites_at_h_1_with_inner_sgd_are_data_parallel_sgd(num_sites):
    sites = {name: Site(2) for name in "abc"[:num_sites]}
    parallel = Site(1)
    for step in range(10):
        whole = batch(step, size=6)
        for site, share in zip(sites.values(), whole.chunk(num_sites), strict=True):
            inner_step(site.policy, site.optimizer, share)
        inner_step(parallel.policy, parallel.optimizer, whole)
        for place in range(2):
            payloads = {name: site.offer(site.fragments[place]) for name, site in sites.items()}
            for site in sites.values():
                site.adopt(site.fragments[place], payloads, lr=1.0, mu=0.0)
    for site in sites.values():
        assert_same_weights(site.policy, parallel.policy)
    assert len({tuple(site.hashes()) for site in sites.values()}) == 1


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_sites_that_trained_apart_hold_the_same_masters_whatever_the_codec(codec):
    sites = {name: Site(2, codec, momentum=0.9) for name in "ab"}
    start = next(iter(sites.values())).hashes()
    for step in range(6):
        for place, site in enumerate(sites.values()):
            inner_step(site.policy, site.optimizer, batch(100 * place + step))
        if step % 2:
            place = step // 2 % 2
            payloads = {name: site.offer(site.fragments[place]) for name, site in sites.items()}
            for site in sites.values():
                site.adopt(site.fragments[place], dict(reversed(payloads.items())), lr=0.7, mu=0.9)
    assert sites["a"].hashes() == sites["b"].hashes() != start


def test_work_that_no_commit_took_is_carried_and_offered_again():
    """Site b's offer misses a round; the next one takes both rounds' movement, and nothing is lost or doubled."""
    a, b = Site(1), Site(1)
    fragment = a.fragments[0]
    for step in range(2):
        inner_step(a.policy, a.optimizer, batch(step))
        inner_step(b.policy, b.optimizer, batch(100 + step))
        if step == 0:
            moved = pseudograd(b.bases[0], flatten(b.params, fragment))
            payload = a.offer(fragment)
            b.offer(fragment)
            a.adopt(fragment, {"a": payload}, lr=1.0, mu=0.0)
            b.adopt(fragment, {"a": payload}, lr=1.0, mu=0.0, taken=False)
            assert torch.allclose(pseudograd(b.bases[0], flatten(b.params, fragment)), moved, atol=1e-6)
    work = [pseudograd(site.bases[0], flatten(site.params, fragment)) for site in (a, b)]
    before = a.masters[0].clone()
    payloads = {"a": a.offer(fragment), "b": b.offer(fragment)}
    for site in (a, b):
        site.adopt(fragment, payloads, lr=1.0, mu=0.0)
    assert a.hashes() == b.hashes()
    assert torch.allclose(before - a.masters[0], (work[0] + work[1]) / 2, atol=1e-6)
    assert work[1].norm() > 1.2 * moved.norm()  # two rounds of work against one
