"""What an outer loop will move and how much of the time it will train, before anything runs: pure arithmetic.

A turn is one fragment's: coded, sent, everybody's fetched, merged, adopted; it may take tau inner steps beside training
and holds the training thread up for the rest. `bench link` measures the same over real links and prints both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEGMENT_SHARE = 1.02
"""Bytes on the wire for a byte of payload: headers of packets, and acknowledgements the other way."""
TURN_BYTES = 5_000
SITE_BYTES = 3_000
"""Bytes each way that a turn's records and looks at the bucket take: so many, and so many for each site."""
TURN_S = 0.021
"""Seconds of a turn between one site's writing and the others' reading: offers and the commit are found by looking."""
UNHURRIED_S = 0.12
"""Seconds more while the training thread isn't waiting yet: the bucket is looked at less often then."""
UNHURRIED_SHARE = 0.5
"""At most this share of the time in which it doesn't wait: then a faster link never makes a turn longer."""
HURRY_FROM, HURRY_TO = 0.4, 0.8
"""Where the training thread's wait begins, as shares of a turn: with the first no look comes before it, with the second
all of them do."""
SYNC_NS = 3.6
"""CPU nanoseconds of a turn for each parameter of the fragment, off the training thread: error feedback, the journal,
the mean and the outer step."""
CODING_NS: Mapping[str, tuple[float, float]] = {
    "fp32": (3.3, 2.1),
    "bf16": (6.4, 4.7),
    "int8": (8.9, 4.0),
    "int4": (6.7, 3.0),
    "e3m0": (8.5, 3.8),
    "topk": (2.2, 1.0),
}
"""CPU nanoseconds to code a parameter, and to decode and add it, hashes and norms included, as fitted to what `bench
link` measured; so are the other seconds and nanoseconds here."""
MOVE_NS = 1.5
"""CPU nanoseconds for each byte sent or fetched."""
OVERLAP = 0.48
"""Where sites share cores: share of the wait for a core, or for the link, in which the other goes on."""
TRAINER_NS = 2.1
"""Nanoseconds for each parameter of the fragment that a turn takes from the training thread: capture and adoption."""
STEP_S = 0.00038
"""Seconds by which an inner step ends later, since the outer loop's threads take turns with the training thread."""

CROWDING = 1.28
"""How much longer work takes, for each site on a core, where sites (and the store) share the cores of one machine."""

FIRST_BYTES, TRAINED_BYTES = 1.35, 3.35
"""Bytes a parameter of a stored master: one that came from bf16, and one whose low bytes training has filled."""


@dataclass(frozen=True)
class HostBytes:
    """Memory that the outer loop needs: while it trains, and at most, as the run ends and right after."""

    training: int
    closing: int


def host_bytes(numel: int, largest: int, *, momentum: bool, payloads: int = 2) -> HostBytes:
    """What the outer loop needs on the machine of a PRIME-RL trainer's first rank, beside PRIME-RL's own memory.

    numel      trainable parameters; with LoRA the adapters'
    largest    those of the largest fragment
    momentum   whether masters hold any
    payloads   of a round, that each site reads

    Of all parameters there are the masters (4 bytes each, twice that with momentum), what was adopted (4), what coding
    left (4), copies of these that a round replaces, and at the end the final masters of all ranks (4) and snapshots;
    of the fragment under way its capture, movement, payload, what payloads decode to (4 each), their mean and the next
    master. The numbers were fitted from above to the peaks of `python -m tests.sync.host_memory`, two processes of 16
    and of 48 million parameters: without momentum 42 bytes a parameter in training and 54 at the end for one fragment,
    22 to 26 and 36 to 41 for four; with momentum 60 and 78, and 35 and 53.
    """
    under_way = (24 + 8 * momentum + 4 * (payloads - 2)) * largest
    return HostBytes((20 + 10 * momentum) * numel + under_way, (36 + 12 * momentum) * numel + under_way)


@dataclass(frozen=True)
class Pace:
    """How often sites meet, and how many.

    inner_steps, fragments, sync_delay   H, P, tau
    step_s         seconds of an inner step
    sites          that take part in every round
    gather_sites   up to so many sites everyone reads everyone's payload; beyond, rounds are merged in parts
    crowding       how many times longer the outer loop's own work takes, where sites share cores
    """

    inner_steps: int
    fragments: int
    sync_delay: int
    step_s: float
    sites: int
    gather_sites: int = 4
    crowding: float = 1.0


@dataclass(frozen=True)
class Payload:
    """One fragment as it travels.

    numel          its parameters
    nbytes         of its payload
    merged_nbytes  of all merged parts together, where rounds are merged in parts
    num_slices     in which its payload is cut; 1: it can't be, and everyone reads everyone's
    """

    numel: int
    nbytes: int
    merged_nbytes: int
    num_slices: int


@dataclass(frozen=True)
class Forecast:
    """A round of all fragments, at one site.

    up_bytes, down_bytes   of payloads and merged parts: exact where the codec's sizes are
    wire_up, wire_down     of everything, packets' headers and looks at the bucket too
    bound_s       seconds that nothing can beat: the training, or the more loaded way of the link
    transfer_s    seconds in which the link is what a turn waits for, over all turns
    stall_s       seconds that the training thread is held up
    round_s       seconds of the round
    utilisation   share of `round_s` that is training
    """

    up_bytes: int
    down_bytes: int
    wire_up: float
    wire_down: float
    bound_s: float
    transfer_s: float
    stall_s: float
    round_s: float
    utilisation: float


def crowding(site_cores: float) -> float:
    """How many times longer the outer loop's work takes where each site has so many cores, or such a share of one."""
    return max(1.0, CROWDING / site_cores)


def num_parts(payload: Payload, pace: Pace) -> int:
    """Parts in which a round of this fragment is merged; 0: every site reads every payload."""
    if pace.sites <= pace.gather_sites or payload.num_slices == 1:
        return 0
    return min(pace.sites, payload.num_slices)


def turn_bytes(payload: Payload, pace: Pace) -> tuple[int, int]:
    """(up, down) of a fragment's round at a site, at the one that merges most; records not counted."""
    others, parts = pace.sites - 1, num_parts(payload, pace)
    if parts == 0:
        return payload.nbytes, others * payload.nbytes
    own = math.ceil(payload.merged_nbytes / parts)
    return payload.nbytes + own, others * math.ceil(payload.nbytes / parts) + payload.merged_nbytes


@dataclass(frozen=True)
class JoinBytes:
    """What a site that joins fetches, of all fragments: of the first masters or of the newest, and of each round since.

    first_bytes is for a model that comes in bf16, and 0 for a site that has it.
    """

    first_bytes: int
    newest_bytes: int
    round_bytes: int


def join_bytes(payloads: Sequence[Payload], pace: Pace, *, momentum: bool) -> JoinBytes:
    """What a joiner chooses from (`sync.beginning`). momentum: whether masters hold any; at first it is all zeros."""
    numel = sum(payload.numel for payload in payloads)
    rounds = [
        payload.merged_nbytes if num_parts(payload, pace) else pace.sites * payload.nbytes for payload in payloads
    ]
    return JoinBytes(round(FIRST_BYTES * numel), round((1 + momentum) * TRAINED_BYTES * numel), sum(rounds))


def forecast(payloads: Sequence[Payload], pace: Pace, codec: str, link_mbit: float) -> Forecast:
    """A round of these fragments, over a link of `link_mbit` each way."""
    byte_s = 8 / (link_mbit * 1e6)
    moved = [turn_bytes(payload, pace) for payload in payloads]
    up, down = (sum(way) for way in zip(*moved, strict=True))
    transfers = [(wire(sent, pace) + wire(fetched, pace)) * byte_s for sent, fetched in moved]
    hidden_s = pace.sync_delay * pace.step_s
    stall_s = sum(
        # One after the other: what the others send is there when they have sent it, which is when we have.
        trainer_s(payload, pace) + max(0.0, beside_s(payload, pace, codec, transfer_s) - hidden_s)
        for payload, transfer_s in zip(payloads, transfers, strict=True)
    )
    training_s = pace.inner_steps * pace.step_s
    round_s = training_s + pace.inner_steps * STEP_S * pace.crowding + stall_s
    return Forecast(
        up_bytes=up,
        down_bytes=down,
        wire_up=sum(wire(sent, pace) for sent, _ in moved),
        wire_down=sum(wire(fetched, pace) for _, fetched in moved),
        bound_s=max(training_s, up * byte_s, down * byte_s),
        transfer_s=sum(transfers),
        stall_s=stall_s,
        round_s=round_s,
        utilisation=training_s / round_s,
    )


def wire(nbytes: int, pace: Pace) -> float:
    """Bytes on the wire one way for a turn's `nbytes` of payload."""
    return nbytes * SEGMENT_SHARE + TURN_BYTES + SITE_BYTES * pace.sites


def trainer_s(payload: Payload, pace: Pace) -> float:
    """Seconds that a turn takes from the training thread however fast the link is."""
    return payload.numel * TRAINER_NS * 1e-9 * pace.crowding


def beside_s(payload: Payload, pace: Pace, codec: str, transfer_s: float) -> float:
    """Seconds from a fragment's capture until its round has closed, all off the training thread."""
    code_ns, decode_ns = CODING_NS[codec]
    decodes = 1 if num_parts(payload, pace) else pace.sites - 1
    work_ns = payload.numel * (SYNC_NS + code_ns + decodes * decode_ns) + sum(turn_bytes(payload, pace)) * MOVE_NS
    work_s = work_ns * 1e-9 * pace.crowding
    waiting_s = work_s * (1 - 1 / pace.crowding)  # for cores that other sites use
    hurried_s = TURN_S + work_s + transfer_s - OVERLAP * min(transfer_s, waiting_s)
    hidden_s = pace.sync_delay * pace.step_s
    unhurried = (hidden_s / hurried_s - HURRY_FROM) / (HURRY_TO - HURRY_FROM)
    return hurried_s + min(UNHURRIED_S, UNHURRIED_SHARE * hidden_s) * min(1.0, max(0.0, unhurried))


def payloads_of(numels: Sequence[int], codec: str, merged_codec: str = "int8", slices: int = 128) -> list[Payload]:
    """Fragments of `numels` parameters as these codecs carry them."""
    from composer_prime.outer.codecs import get_codec
    from composer_prime.outer.payloads import plan_slices

    coder, merger = get_codec(codec), get_codec(merged_codec)
    found = []
    for numel in numels:
        plan = plan_slices(numel, slices, (coder, merger))
        sizes = [plan.size(index) for index in range(plan.num_slices)]
        nbytes = sum(coder.nbytes(size) for size in sizes)
        found.append(Payload(numel, nbytes, sum(merger.nbytes(size) for size in sizes), plan.num_slices))
    return found
