"""What a world hears of production code while it plays: log lines, decisions, and what returning sites find.

Nothing is changed by listening. Three things are remembered, to save time: the arithmetic's test vector, which every
joining site computes, and what the same bytes parse or decode to, each of which every site reads.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from composer_prime.outer.arithmetic import test_vector
from composer_prime.outer.codecs import Codec
from composer_prime.outer.slices import SlicePlan
from composer_prime.sync import archive, merging, returning, rounds, start
from composer_prime.sync.canonical import Record
from composer_prime.sync.protocol import RoundDecision, RoundView
from composer_prime.sync.returning import OwnPast
from tests.simulation import invariants
from tests.simulation.coverage import Coverage

V = TypeVar("V")


@contextlib.contextmanager
def listening(coverage: Coverage) -> Iterator[None]:
    """Count in `coverage` what happens inside the block."""
    logger = logging.getLogger("composer_prime")
    level, propagate, threads = logger.level, logger.propagate, torch.get_num_threads()
    own_past, decide, vector = returning.own_past, rounds.decide_round, start.test_vector
    collect = archive.collect_garbage
    from_bytes: Any = Record.__dict__["from_bytes"]
    decode, decode_whole, decode_outside = merging.decode, merging.decode_whole, invariants.decode

    def heard_past(*args: Any) -> OwnPast:
        past = own_past(*args)
        coverage.branch(_return_branch(past))
        return past

    def heard_decision(view: RoundView, quorum: int, grace_s: float) -> RoundDecision:
        decision = decide(view, quorum, grace_s)
        if decision.close:
            coverage.branch(_decision_branch(view, decision))
        return decision

    def heard_collection(*args: Any, runtime: Any, **others: Any) -> int:
        runtime.process.collects_from = runtime.process.scheduler.time
        return collect(*args, runtime=runtime, **others)

    logger.addHandler(coverage)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    torch.set_num_threads(1)
    returning.own_past, rounds.decide_round, start.test_vector = heard_past, heard_decision, _vector
    archive.collect_garbage = heard_collection
    Record.from_bytes = classmethod(_parsed_once(from_bytes.__func__))  # type: ignore[assignment]
    merging.decode, merging.decode_whole = _decoded_once(decode), _decoded_once(decode_whole)
    invariants.decode = merging.decode if decode_outside is decode else _decoded_once(decode_outside)
    try:
        yield
    finally:
        merging.decode, merging.decode_whole, invariants.decode = decode, decode_whole, decode_outside
        Record.from_bytes = from_bytes
        returning.own_past, rounds.decide_round, start.test_vector = own_past, decide, vector
        archive.collect_garbage = collect
        torch.set_num_threads(threads)
        logger.propagate = propagate
        logger.setLevel(level)
        logger.removeHandler(coverage)


def _return_branch(past: OwnPast) -> str:
    if past.newest is None:
        what = "no offer"
    elif past.taken:
        what = "offer taken"
    else:
        what = "offer open" if past.open else "offer missed"
    return f"return: {what}{', others merged' if past.merged and not past.taken else ''}"


def _decision_branch(view: RoundView, decision: RoundDecision) -> str:
    everyone = view.live <= view.verdicts.keys()
    if decision.take:
        return "close: at once" if everyone else "close: after grace"
    return "close: void, too few valid" if "invalid" in view.verdicts.values() else "close: void, nothing to merge"


def _parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Records are frozen, so the sites of one process may share them."""
    known: dict[tuple[type, bytes], Any] = {}

    def from_bytes(kind: type, data: bytes, key: str) -> Any:
        found = known.get((kind, data))
        if found is None:
            found = known[kind, data] = parse(kind, data, key)
        return found

    return from_bytes


def _decoded_once(decode: Callable[..., V]) -> Callable[..., V]:
    """Decoding depends on its arguments alone. A tensor is copied for everyone; nobody writes to a sparse vector."""
    known: dict[tuple[Any, ...], Any] = {}

    def decoded(codec: Codec, data: bytes, digests: Any, norms: Any, plan: SlicePlan, *slices: int) -> Any:
        place = (codec.name, data, tuple(digests), tuple(norms), plan, *slices)
        found = known.get(place)
        if found is None:
            found = known[place] = decode(codec, data, digests, norms, plan, *slices)
        return found.clone() if isinstance(found, Tensor) else found

    return decoded


_vectors: list[str] = []


def _vector() -> str:
    if not _vectors:
        _vectors.append(test_vector())
    return _vectors[0]
