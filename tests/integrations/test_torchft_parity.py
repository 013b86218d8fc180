"""Our outer loop against torchft's DiLoCo: the same weights after every inner step, whole sites on either side.

How the schedules map. With T = H / P inner steps from one turn to the next, and delay tau:

                    captures after inner step         adopts after inner step
    torchft         k T - tau                         k T
    ours            k T                               k T + tau

So our clock runs tau steps behind: torchft is entered tau inner steps late (its round 0 still starts from the weights
it was made with), and from then on both capture and adopt after the same steps. Both take fragments in turn.

What the parameters become at the adoption is the same for alpha > 0: (1 - alpha) * master + alpha * local. At alpha = 0
it is not, when tau > 0: torchft sets them to the master and so forgets the tau steps made since the capture; ours keeps
them (`settle`). torchft can't do that; ours does what torchft does with an alpha too small to matter (FORGET).

Not comparable: the end of a run (ours closes with one more round of every fragment, torchft just stops), weights by
tokens (torchft weighs all replicas alike), codecs, and rounds in which a site is missing.
"""

import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from composer_prime.store import open_store
from composer_prime.sync.site_clock import OuterLoop
from tests.integrations.replicas import (
    INNER_LR,
    OUTER_LR,
    OUTER_MOMENTUM,
    Lockstep,
    LockstepManager,
    batches,
    flat,
    inner_step,
    make_net,
    run_together,
    train_with_torchft,
)
from tests.sync.harness import make_terms

pytest.importorskip("torchft")

H = 12
FORGET = 1e-12
"""Our merge_alpha that means what alpha = 0 means to torchft: nothing of the local values survives rounding."""

TOLERANCE = 1e-6
"""Both train in fp64, so that inner steps don't amplify rounding; our masters are fp32. Weights are around 0.4."""


def ours(
    num_sites: int, fragments: int, delay: int, alpha: float, steps: int
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Each site's parameters after each inner step: before the outer loop had its say, and after."""
    uri = f"memory://{secrets.token_hex(8)}"
    terms = make_terms(
        inner_steps=H,
        fragments=fragments,
        sync_delay=delay,
        merge_alpha=alpha,
        lr=OUTER_LR,
        momentum=OUTER_MOMENTUM,
        weighting="equal",
        quorum=num_sites,
        rounds=100,
    )

    def site(place: int) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        def train() -> tuple[list[Tensor], list[Tensor]]:
            net = make_net(torch.float64)
            optimizer = torch.optim.SGD(net.parameters(), lr=INNER_LR)
            outer = OuterLoop(open_store(uri), terms, run="run", site="abc"[place])
            outer.join(net.named_parameters())
            data, before, after = batches(place, torch.float64), [], []
            try:
                for _ in range(steps):
                    inner_step(net, next(data), optimizer)
                    before.append(flat(net))
                    outer.after_inner_step(tokens=10, samples=2)
                    after.append(flat(net))
                assert not outer.finished
            finally:
                outer.close()
            return before, after

        return train

    results = run_together(*(site(place) for place in range(num_sites)))
    return [before for before, _ in results], [after for _, after in results]


def theirs(
    num_sites: int, fragments: int, delay: int, alpha: float, steps: int, free_steps: int | None = None
) -> list[list[Tensor]]:
    """Each replica's parameters after each inner step, by torchft in fp64."""
    lockstep = Lockstep(num_sites)

    def replica(place: int) -> Callable[[], list[Tensor]]:
        return lambda: train_with_torchft(
            LockstepManager(lockstep, place),
            inner_steps=H,
            num_fragments=fragments,
            steps=steps,
            delay=delay,
            alpha=alpha,
            data_seed=place,
            dtype=torch.float64,
            free_steps=delay if free_steps is None else free_steps,
        )

    return run_together(*(replica(place) for place in range(num_sites)))


def distance(first: list[list[Tensor]], second: list[list[Tensor]]) -> float:
    """The largest difference of any parameter at any site after any inner step."""
    gaps = [
        (x.double() - y.double()).abs().max().item()
        for one, other in zip(first, second, strict=True)
        for x, y in zip(one, other, strict=True)
    ]
    return max(gaps)


@pytest.mark.parametrize("alpha", [FORGET, 0.5], ids=["alpha0", "alpha0.5"])
@pytest.mark.parametrize("delay", [0, 2], ids=["tau0", "tau2"])
@pytest.mark.parametrize("fragments", [1, 2, 4], ids=["P1", "P2", "P4"])
@pytest.mark.parametrize("num_sites", [2, 3], ids=["two", "three"])
def test_weights_equal_torchfts_after_every_inner_step(
    num_sites: int, fragments: int, delay: int, alpha: float
) -> None:
    steps = 4 * H + delay  # four rounds of every fragment, the last one adopted
    our_alpha = 0.0 if delay == 0 and alpha == FORGET else alpha
    _, mine = ours(num_sites, fragments, delay, our_alpha, steps)
    reference = theirs(num_sites, fragments, delay, 0.0 if alpha == FORGET else alpha, steps)
    gap = distance(mine, reference)
    moved = (reference[0][-1] - reference[0][0]).abs().max().item()
    assert gap < TOLERANCE < moved / 1e4


def test_the_exact_rule_differs_from_torchft_by_the_steps_since_the_capture() -> None:
    delay, turn = 3, H
    before, after = ours(2, 1, delay, 0.0, turn + delay)
    reference = theirs(2, 1, delay, 0.0, turn + delay)
    for site in range(2):
        captured, moved = after[site][turn - 1], before[site][-1]
        kept = after[site][-1] - reference[site][-1]
        assert (kept - (moved - captured)).abs().max().item() < TOLERANCE
        assert (moved - captured).abs().max().item() > 1e-3


def test_torchft_entered_at_the_first_step_is_on_another_schedule() -> None:
    _, mine = ours(2, 2, 2, 0.5, 2 * H)
    assert distance(mine, theirs(2, 2, 2, 0.5, 2 * H, free_steps=0)) > 1e-3
