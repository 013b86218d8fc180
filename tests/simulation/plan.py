"""A seed's schedule: terms, sites, and the faults that will happen when. Drawn from the seed alone, and then fixed.

A plan with faults or sites left out is a plan too, which is how a failing one is shrunk.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from composer_prime.outer.codecs import get_codec
from composer_prime.sync.run import MERGED_CODEC
from composer_prime.sync.terms import Terms

STRIKES = (
    *("crash", "crash", "crash_old", "crash_old", "crash_empty", "pause", "twin", "replace"),
    *("cut", "slow", "loss", "loss", "leave", "lost", "both", "unreadable", "unreadable", "corrupt", "corrupt"),
)
"""Kinds that befall a running site, as often as they are drawn; "late", "phase", "skew", "slow_upload" and "race" are
there from the start, and "absent" is a pause in which the log before a site is collected."""
LONGER = 4
"""Rounds of every fragment that each third seed has more: so that a seed makes over 2,000 requests on average."""
EVERYONE = -1
"""The site of a fault that befalls all: the store is away ("outage"), all processes are killed and started again
("restart")."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    at_s, for_s   virtual seconds
    amount        what the kind makes of it: a factor, a probability, an age
    """

    kind: str
    site: int
    at_s: float = 0.0
    for_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that decides a simulated run."""

    seed: int
    terms: Terms
    num_sites: int
    layers: int
    numel: int
    step_s: float
    noise: float
    """How much farther than its own coordinate a site moves one that all move; much, so that lossy codecs lose some."""
    checkpoint_steps: int
    signed: bool
    faults: tuple[Fault, ...]
    hasty: bool = False
    """Whether all sites bring the model's weights and take long to read masters, so that who joins is a learner."""
    guests: tuple[int, ...] = ()
    """Sites that the owner lets offer and nothing else; in a signed run."""

    def keep(self, places: list[int]) -> "Plan":
        """The plan with only those of its faults."""
        return replace(self, faults=tuple(self.faults[place] for place in places))

    def with_sites(self, num_sites: int) -> "Plan":
        """The plan with the first `num_sites` sites only."""
        terms = self.terms.model_copy(update={"quorum": min(self.terms.quorum, num_sites)})
        faults = tuple(fault for fault in self.faults if fault.site < num_sites)
        if not _may_damage(terms):
            faults = tuple(fault for fault in faults if fault.kind != "damage")
        guests = tuple(site for site in self.guests if site < num_sites)
        guests = guests if len(guests) < num_sites else ()
        return replace(self, num_sites=num_sites, terms=terms, faults=faults, guests=guests)

    @property
    def turn_s(self) -> float:
        """About how long one fragment's round takes when nothing goes wrong."""
        return self.terms.steps_per_turn * self.step_s

    @property
    def length_s(self) -> float:
        """About how long the run takes when nothing goes wrong."""
        return (self.terms.rounds + 1) * self.terms.fragments * (self.turn_s + 1.0)


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    num_sites = _num_sites(rng)
    terms = _terms(rng, num_sites)
    if seed % 3 == 0:
        terms = terms.model_copy(update={"rounds": terms.rounds + LONGER})
    plan = Plan(
        seed=seed,
        terms=terms,
        num_sites=num_sites,
        layers=0,
        numel=_numel(terms, num_sites),
        step_s=rng.choice((0.2, 0.4, 0.7)) if num_sites < 7 else 0.2,
        noise=rng.choice((0.0, 0.0, 1.0)),
        checkpoint_steps=rng.choice((1, 2, 5)),
        signed=rng.random() < 0.03,
        faults=(),
        hasty=random.Random(seed + 3).random() < 0.3,
    )
    plan = replace(plan, layers=plan.terms.fragments + rng.choice((0, 1)))
    if plan.terms.codec != "fp32":
        plan = replace(plan, noise=16.0)
    plan = replace(plan, faults=tuple(_faults(rng, plan)))
    return replace(plan, guests=_guests(random.Random(seed + 2), plan)) if plan.signed else plan


def _guests(rng: random.Random, plan: Plan) -> tuple[int, ...]:
    """Some sites, but not all that stay to the end: a round waits for one that is no guest."""
    gone = {fault.site for fault in plan.faults if fault.kind in ("leave", "lost", "late", "absent")}
    staying = [site for site in range(plan.num_sites) if site not in gone]
    if not staying or rng.random() < 0.3:
        return ()
    host = rng.choice(staying)
    return tuple(site for site in range(plan.num_sites) if site != host and rng.random() < 0.6)


def _num_sites(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.03:
        return 1
    if kind < 0.13:
        return rng.choice((2, 2, 3))
    if kind < 0.95:
        return rng.choice((4, 5, 6, 6, 7, 7, 8, 8))
    return rng.randint(9, 12) if kind < 0.995 else rng.randint(13, 32)


def _numel(terms: Terms, num_sites: int) -> int:
    """Values of a layer: a coordinate for each site, four more, and as many as the slices of a cut payload need."""
    codec, merged = get_codec(terms.codec), get_codec(MERGED_CODEC)
    block = max(codec.block, merged.block)
    if not codec.sliceable or block == 1 or terms.gather_sites >= num_sites:
        return num_sites + 4
    return num_sites + 4 + (terms.slices - 1) * block


def _terms(rng: random.Random, num_sites: int) -> Terms:
    fragments = rng.choice((1, 2, 2, 3) if num_sites < 6 else (1, 1, 1, 2))
    steps = rng.choice((1, 2, 2, 3))
    grace_s = rng.choice((1.0, 2.0, 3.0))
    quorum = rng.randint(1, max(1, (num_sites + 1) // 2))
    liveness_s = rng.choice((8.0, 12.0, 20.0)) * (1 if num_sites < 6 else 2)
    max_stale = rng.choice((1, 2, 4))
    values: dict[str, Any] = {
        "inner_steps": steps * fragments,
        "fragments": fragments,
        "sync_delay": rng.choice((0, 0, 1, 2, 3)),
        "lr": rng.choice((0.7, 1.0)),
        "momentum": rng.choice((0.0, 0.5)),
        "codec": "fp32",
        "slices": rng.choice((1, 1, 2)),
        "quorum": quorum,
        "grace_s": grace_s,
        "liveness_s": liveness_s,
        "max_stale_rounds": max_stale,
        "snapshot_rounds": rng.choice((1, 2, 3)),
        "keep_log": rng.random() < 0.5,
        "rounds": _rounds(rng, num_sites, fragments),
    }
    kind = rng.random()
    if kind < 0.2:
        values |= {"codec": rng.choice(LOSSY), "error_feedback": rng.random() < 0.75}
    elif kind < 0.45 and num_sites > 2:
        values |= {"gather_sites": rng.randint(1, max(1, num_sites // 2)), "slices": rng.randint(2, 4)}
        if rng.random() < 0.3:
            values |= {"codec": rng.choice(LOSSY), "error_feedback": rng.random() < 0.75}
    elif kind < 0.55:
        values |= {"aggregate": "clipped", "weighting": rng.choice(("equal", "steps"))}
    if rng.random() < 0.15 and 1 < num_sites < 9:
        values |= FORGETFUL | {
            "inner_steps": steps,
            "quorum": min(quorum, num_sites - 1),
            "rounds": rng.randint(5, 7 if num_sites < 7 else 5),
        }
    return Terms(**values)


LOSSY = ("bf16", "int8", "int4", "topk")

FORGETFUL = {"fragments": 1, "keep_log": False, "snapshot_rounds": 1, "max_stale_rounds": 1, "liveness_s": 5.0}
"""Terms under which the log goes soon after a site was given up."""


def _rounds(rng: random.Random, num_sites: int, fragments: int) -> int:
    """Fewer where many sites make many events in each."""
    most = 6 if num_sites < 5 else 4 if num_sites < 6 else 3
    return max(2, rng.randint(3, most) // fragments)


def _faults(rng: random.Random, plan: Plan) -> list[Fault]:
    faults: list[Fault] = []
    num_sites, length_s, turn_s = plan.num_sites, plan.length_s, plan.turn_s
    may_go = list(range(num_sites))
    rng.shuffle(may_go)
    may_go = may_go[: num_sites - plan.terms.quorum]  # so many may leave for good
    if rng.random() < 0.3:
        faults.append(Fault("race", -1))
    out_of_phase, skewed = rng.choice((0.0, 0.0, 0.2, 0.6)), rng.choice((0.0, 0.0, 0.4))
    for site in range(num_sites):
        if rng.random() < out_of_phase:
            faults.append(Fault("phase", site, amount=rng.choice((0.5, 1.3, 1.7, 2.5))))
        if rng.random() < skewed:
            faults.append(Fault("skew", site, amount=rng.choice((0.7, 0.9, 0.99, 1.01, 1.1, 1.5))))
    if rng.random() < 0.3:
        faults.append(Fault("slow_upload", rng.randrange(num_sites), amount=turn_s * rng.choice((0.7, 1.5, 3.0))))
    for site in may_go:
        if rng.random() < 0.15:
            faults.append(Fault("late", site, at_s=rng.random() * length_s * 1.2))
    if may_go and FORGETFUL.items() <= plan.terms.model_dump().items():
        faults.append(Fault("absent", may_go[0], at_s=rng.random() * 0.3 * length_s, for_s=5.0 + length_s))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 6))):
        faults.append(_fault(rng, plan, may_go))
    return faults + _faults_of_all(rng, plan) + _damage(rng, plan)


def _faults_of_all(rng: random.Random, plan: Plan) -> list[Fault]:
    faults: list[Fault] = []
    for kind in ("outage", "restart"):
        if rng.random() < 0.06:
            for_s = rng.choice((0.3, 1.0, 3.0, 6.0)) * plan.turn_s + rng.random()
            faults.append(Fault(kind, EVERYONE, rng.random() * plan.length_s, for_s))
    return faults


def _damage(rng: random.Random, plan: Plan) -> list[Fault]:
    """A site whose payloads arrive damaged for a while, where no commit can name one that everyone must read."""
    if not _may_damage(plan.terms) or plan.num_sites < 2 or rng.random() < 0.5:
        return []
    site, at_s = rng.randrange(1, plan.num_sites), rng.random() * 0.7 * plan.length_s
    faults = [Fault("damage", site, at_s, 4 * plan.turn_s, amount=float(rng.randrange(1000)))]
    if rng.random() < 0.5:  # and it returns while its own damaged offer is out
        faults.append(Fault("crash", site, at_s + plan.turn_s * (1 + 2 * rng.random()), rng.random() * plan.turn_s))
    return faults


def _may_damage(terms: Terms) -> bool:
    """Whether a run gets over damaged payloads of any site but the first.

    A site doesn't read its own payload before it commits it, so it may commit one that is damaged. Cut into parts, the
    round excludes it; gathered, everyone would wait for it for ever. So here all rounds are cut.
    """
    codec = get_codec(terms.codec)
    return codec.sliceable and terms.slices > 1 and terms.quorum > terms.gather_sites


def _fault(rng: random.Random, plan: Plan, may_go: list[int]) -> Fault:
    kind = rng.choice(STRIKES)
    site, at_s = rng.randrange(plan.num_sites), rng.random() * plan.length_s
    for_s = rng.choice((0.3, 1.0, 3.0, 6.0, 20.0)) * plan.turn_s + rng.random()
    if kind == "loss":
        for_s *= 5
    if kind in ("leave", "lost"):
        if not may_go:
            return Fault("crash", site, at_s, for_s)
        return Fault(kind, may_go.pop(), at_s, for_s)
    if kind == "corrupt" and (plan.terms.quorum < 2 or plan.num_sites < 3):
        return Fault("crash", site, at_s, for_s)  # alone, a site with a wrong master could merge its own offer
    amount = {
        "corrupt": rng.randrange(1, 1000),
        "unreadable": rng.choice((0.5, 0.9, 1.0)),
        "crash_old": rng.randint(1, 3),
        "slow": rng.choice((3.0, 10.0, 30.0)),
        "loss": rng.choice((0.05, 0.2, 0.5)),
    }
    return Fault(kind, site, at_s, for_s, float(amount.get(kind, 0.0)))
