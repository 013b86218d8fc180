"""Our outer loop against torchft's DiLoCo: the same weights after every inner step, whole sites on either side.

How the schedules map. With T = H / P inner steps from one turn to the next, and delay tau:

                    captures after inner step         adopts after inner step
    torchft         k T - tau                         k T
    ours            k T                               k T + tau

So our clock runs tau steps behind: torchft is entered tau inner steps late (its round 0 still starts from the weights
it was made with), and from then on both capture and adopt after the same steps. Both take fragments in turn.

What the parameters become at the adoption is the same when tau = 0: the master. When tau > 0 it is not: torchft sets
them to the master and so forgets the tau steps made since the capture; ours keeps them (`settle`).

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
TOLERANCE = 1e-6
"""Both train in fp64, so that inner steps don't amplify rounding; our masters are fp32. Weights are around 0.4."""


def ours(num_sites: int, fragments: int, delay: int, steps: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Each site's parameters after each inner step: before the outer loop had its say, and after."""
    uri = f"memory://{secrets.token_hex(8)}"
    terms = make_terms(
        inner_steps=H,
        fragments=fragments,
        sync_delay=delay,
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


def theirs(num_sites: int, fragments: int, delay: int, steps: int) -> list[list[Tensor]]:
    """Each replica's parameters after each inner step, by torchft in fp64."""
    lockstep = Lockstep(num_sites)

    def replica(place: int) -> Callable[[], list[Tensor]]:
        return lambda: train_with_torchft(
            LockstepManager(lockstep, place),
            inner_steps=H,
            num_fragments=fragments,
            steps=steps,
            delay=delay,
            alpha=0.0,
            data_seed=place,
            dtype=torch.float64,
            free_steps=delay,
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


@pytest.mark.parametrize("fragments", [1, 2, 4], ids=["P1", "P2", "P4"])
@pytest.mark.parametrize("num_sites", [2, 3], ids=["two", "three"])
def test_without_a_delay_weights_equal_torchfts_after_every_inner_step(num_sites: int, fragments: int) -> None:
    steps = 4 * H  # four rounds of every fragment, the last one adopted
    _, mine = ours(num_sites, fragments, 0, steps)
    reference = theirs(num_sites, fragments, 0, steps)
    gap = distance(mine, reference)
    moved = (reference[0][-1] - reference[0][0]).abs().max().item()
    assert gap < TOLERANCE < moved / 1e4


def test_the_exact_rule_differs_from_torchft_by_the_steps_since_the_capture() -> None:
    delay, turn = 3, H
    before, after = ours(2, 1, delay, turn + delay)
    reference = theirs(2, 1, delay, turn + delay)
    for site in range(2):
        captured, moved = after[site][turn - 1], before[site][-1]
        kept = after[site][-1] - reference[site][-1]
        assert (kept - (moved - captured)).abs().max().item() < TOLERANCE
        assert (moved - captured).abs().max().item() > 1e-3
