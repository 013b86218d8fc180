"""Runs of a real, tiny language model for tests of what leaves a run: sites on threads, a bucket in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from composer_prime.store import open_store
from composer_prime.store.base import Store
from composer_prime.sync.terms import Terms
from tests.sync.harness import ThreadSite, make_terms, run_sites

VOCABULARY = 256
LR = 1e-5
"""A usual rate of RL with AdamW: what share of bf16 weights a round changes depends on it."""


class PolicySite(ThreadSite):
    """A site that trains the model of a folder by AdamW on random tokens."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        name: str,
        base: Path,
        prepare: Callable[[PreTrainedModel], object] = lambda model: None,
        **more: Any,
    ) -> None:
        super().__init__(store, terms, name, **more)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        prepare(model)
        self.net = model
        self._optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=LR)

    def step(self) -> None:
        tokens = torch.randint(VOCABULARY, (2, 12), generator=self._data)
        loss = self.net(input_ids=tokens, labels=tokens).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1


def make_run(
    where: Path | str,
    base: Path,
    *,
    names: str = "ab",
    prepare: Callable[[PreTrainedModel], object] = lambda model: None,
    **terms: Any,
) -> Store:
    """A run that ended, of sites with names of one letter, created from the model in `base`."""
    store = open_store(str(where))
    chosen = make_terms(**{"quorum": len(names), "codec": "int8", "snapshot_rounds": 1} | terms)
    sites = [PolicySite(store, chosen, name, base, prepare, data_seed=place) for place, name in enumerate(names)]
    run_sites(*sites)
    return store
