"""What a storm is to be, the terms its run has and why, and the record of how it went."""

import math
from dataclasses import dataclass, field

from composer_prime.sync.terms import Terms
from tests.bench.storm.faults import Fault
from tests.bench.storm.places import Place


@dataclass(frozen=True)
class StormPlan:
    """What a storm is to be.

    duration_s   from the first closed rounds on
    num_faults   within it
    kinds        of the faults, in order; None: dealt from the deck
    outage_s     length of one outage of the store in the middle; 0: none
    """

    num_sites: int
    duration_s: float
    seed: int = 0
    num_faults: int = 0
    kinds: tuple[str, ...] | None = None
    outage_s: float = 0.0
    turn_s: float = 4.0
    step_s: float = 0.2
    step_tokens: int = 100
    numel: int = 40_000
    checkpoint_steps: int = 5
    liveness_s: float = 6.0


def make_terms(plan: StormPlan, round_s: float) -> Terms:
    """The run's terms. round_s: seconds that a round is expected to take; sets how many there are."""
    num_fragments = 2
    rounds = max(2, math.ceil((plan.duration_s + 10) / round_s / num_fragments))
    return Terms(
        inner_steps=num_fragments * max(1, round(plan.turn_s / plan.step_s)),
        fragments=num_fragments,  # two, so that one travels while the other is trained; each more is more requests
        sync_delay=math.ceil(4 * plan.turn_s / plan.step_s),  # an outage shorter than some turns stops no training
        lr=0.7,
        momentum=0.9,
        codec="int8",
        weighting="tokens",
        gather_sites=4,  # more sites than that merge in parts, which is what is to be tested
        slices=4,  # so many parts at most: the machine's two cores pay for every request of every site
        quorum=max(1, plan.num_sites // 2),  # a round that half of the sites miss is worth waiting for
        grace_s=plan.turn_s,  # nobody who is late for a whole turn is waited for
        liveness_s=plan.liveness_s,
        max_stale_rounds=32,  # longer than any fault here lasts: nothing is too old to be merged
        snapshot_rounds=4,
        rounds=rounds,
    )


@dataclass
class Record:
    """A storm as it happened, beside what the bucket and the books tell. Times are the machine's monotonic clock."""

    plan: StormPlan
    terms: Terms
    uri: str
    places: dict[str, Place]
    import_s: float
    faults: list[Fault] = field(default_factory=list)
    warm_at: float = 0.0
    over_at: float = 0.0
    ended_at: float = 0.0
    requests_per_s: float = 0.0
    busy_share: float = 0.0
    load: float = 0.0
