"""Puts what teachers say where a trainer looks for it: on the message nodes of a verifiers trace.

Distributions go into `routed_experts`, which PRIME-RL carries from there to its trainer unread; where teachers give one
number a token, those go into `reference_logprobs`.

A node's context is the one path from the root to it, so a token has one number however many branches share it. The
policy's own numbers, rewards and advantages stay as they are.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.carrier import pack
from composer_prime.teachers.mixture import mix
from composer_prime.teachers.pool import Score
from composer_prime.teachers.sampled import NONE_HERE, Weighted, log_mixture, usable

REPLAY_TOKENS = "replay/tokens"
"""Sampled tokens that have a teacher's number."""
REPLAY_UNANSWERED = "replay/unanswered_tokens"
"""Sampled tokens that were to have one and have none: every teacher dropped out."""
REPLAY_DROPPED = "replay/dropped_tokens"
"""Sampled tokens for which a teacher that was asked gave no number, all teachers together; `.../<name>` for one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Path:
    """One token sequence to be scored.

    token_ids  a branch of the conversation, whole
    nodes      the nodes on it that are stamped from it, each with the place of its first token
    """

    token_ids: list[int]
    nodes: tuple[tuple[Any, int], ...]


@dataclass
class StampReport:
    """What came of stamping a trace, in tokens."""

    counts: Counter[str] = field(default_factory=Counter)

    def metrics(self, teachers: Sequence[str]) -> dict[str, float]:
        """By name, the same names for the same teachers."""
        names = [REPLAY_TOKENS, REPLAY_UNANSWERED, REPLAY_DROPPED, *(f"{REPLAY_DROPPED}/{name}" for name in teachers)]
        return {name: float(self.counts[name]) for name in names}


def scoring_paths(trace: Any) -> list[Path]:
    """The token sequences that cover every sampled token of a verifiers trace once: one a branch, fewer where branches
    share all their sampled nodes. A branch that verifiers doesn't train on is left out."""
    paths: list[Path] = []
    covered: set[int] = set()
    for branch in trace.branches:
        if not getattr(branch, "trainable", True):  # from verifiers 0.4 on
            continue
        nodes, start = [], 0
        for node in branch.nodes:
            if any(node.mask) and id(node) not in covered:
                nodes.append((node, start))
                covered.add(id(node))
            start += len(node.token_ids)
        if nodes:
            paths.append(Path(np.asarray(branch.token_ids).tolist(), tuple(nodes)))
    return paths


def stamp_candidates(
    trace: Any,
    paths: Sequence[Path],
    scores: Sequence[Sequence[Score]],
    hinted: Mapping[int, Candidates],
    *,
    top_k: int,
    num_streams: int,
) -> StampReport:
    """Set `routed_experts`, int32 (tokens, 2 * num_streams, top_k), on every node of a trace; in place.

    scores       for each path, what every teacher said to it: their mixture is the replay stream
    hinted       by `id(node)`, what the hinted teacher says to that node's sampled tokens: the hint stream
    num_streams  2 in a run that has both, else 1
    """
    report = StampReport()
    replay: dict[int, Candidates] = {}
    for path, answers in zip(paths, scores, strict=True):
        _tell_failures(answers, len(path.token_ids))
        for node, start in path.nodes:
            if answers:
                replay[id(node)] = _mixture(answers, start + np.flatnonzero(node.mask), top_k, report)
    for node in trace.nodes:
        said, hint = (_whole(node, found.get(id(node)), top_k) for found in (replay, hinted))
        node.routed_experts = pack(said, hint, num_streams)
    return report


def _whole(node: Any, candidates: Candidates | None, top_k: int) -> Candidates:
    """The candidates of a node's sampled tokens, none at its others."""
    whole = Candidates.none(len(node.token_ids), top_k)
    if candidates is not None:
        sampled = np.flatnonzero(node.mask)
        whole.ids[sampled], whole.logprobs[sampled] = candidates.ids, candidates.logprobs
    return whole


def _mixture(answers: Sequence[Score], places: np.ndarray, top_k: int, report: StampReport) -> Candidates:
    """The teachers' mixture at some places of a path; what a teacher lacks is counted."""
    weighted = []
    for answer in answers:
        if answer.scores is not None:
            weighted.append((answer.weight, answer.scores.candidates[places]))
        num_answered = 0 if answer.scores is None else int(weighted[-1][1].has_teacher.sum())
        report.counts[REPLAY_DROPPED] += len(places) - num_answered
        report.counts[f"{REPLAY_DROPPED}/{answer.teacher}"] += len(places) - num_answered
    mixture = mix(weighted, top_k) if weighted else Candidates.none(len(places), top_k)
    num_taught = int(mixture.has_teacher.sum())
    report.counts[REPLAY_TOKENS] += num_taught
    report.counts[REPLAY_UNANSWERED] += len(places) - num_taught
    return mixture


def _tell_failures(answers: Sequence[Score], num_tokens: int) -> None:
    for answer in answers:
        if answer.failure is not None:
            logger.warning("teacher=%s dropped=%d failure=%s", answer.teacher, num_tokens, answer.failure)


def stamp(paths: Sequence[Path], scores: Sequence[Sequence[Score]], *, ref_kl: bool = False) -> StampReport:
    """Set `reference_logprobs`, one number a sampled token, on every node of the paths; in place.

    scores  for each path, what every teacher said to it
    ref_kl  also set upstream's loss weight `ref_kl` to 1 on the tokens that have a number, which makes PRIME-RL run
            its own term on them, besides ours

    A token without any number gets 0.0, which says "none here"; a node without any keeps None.
    """
    report = StampReport()
    for path, answers in zip(paths, scores, strict=True):
        _tell_failures(answers, len(path.token_ids))
        for node, start in path.nodes:
            places = [place for place, is_sampled in enumerate(node.mask) if is_sampled]
            weighted = _cut(answers, start, places, report)
            if answers:
                _stamp_node(node, places, log_mixture(weighted, len(places)), ref_kl, report)
    return report


def _cut(answers: Sequence[Score], start: int, places: Sequence[int], report: StampReport) -> list[Weighted]:
    """The teachers' numbers at one node's sampled tokens; what a teacher lacks is counted."""
    weighted: list[Weighted] = []
    for answer in answers:
        num_dropped = len(places)
        if answer.scores is not None:
            values = [answer.scores.logprobs[start + place] for place in places]
            weighted.append((answer.weight, values))
            num_dropped -= int(usable(values).sum())
        report.counts[REPLAY_DROPPED] += num_dropped
        report.counts[f"{REPLAY_DROPPED}/{answer.teacher}"] += num_dropped
    return weighted


def _stamp_node(node: Any, places: Sequence[int], mixture: list[float], ref_kl: bool, report: StampReport) -> None:
    has_number = [value != NONE_HERE for value in mixture]
    report.counts[REPLAY_TOKENS] += sum(has_number)
    report.counts[REPLAY_UNANSWERED] += len(places) - sum(has_number)
    if not any(has_number):
        return
    node.reference_logprobs = mixture
    if ref_kl:
        weights = [0.0] * len(node.token_ids)
        for place, has in zip(places, has_number, strict=True):
            weights[place] = float(has)
        node.loss_weights = {**(node.loss_weights or {}), "ref_kl": weights}
