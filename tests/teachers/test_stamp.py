"""What stands on a trace's nodes after stamping, and what is counted, against numbers worked out by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from composer_prime.teachers.candidates import Candidates
from composer_prime.teachers.pool import Score
from composer_prime.teachers.sampled import log_mixture
from composer_prime.teachers.stamp import scoring_paths, stamp, stamp_candidates
from composer_prime.teachers.wire import Scores
from tests.traces.turns import node, trace

NAN = math.nan


def forked() -> list:
    """A question, a first turn, and two ways on from it: a second turn after another question each."""
    return [
        node(None, "user", [1, 2]),
        node(0, "assistant", [3, 4, 5], num_sampled=2),
        node(1, "user", [6]),
        node(2, "assistant", [7, 8], num_sampled=1),
        node(1, "user", [9, 10]),
        node(4, "assistant", [11, 12, 13], num_sampled=3),
    ]


def test_a_path_for_every_branch_covers_each_sampled_node_once() -> None:
    nodes = forked()
    first, second = scoring_paths(trace(*nodes))
    assert first.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(nodes.index(covered), start) for covered, start in first.nodes] == [(1, 2), (3, 6)]
    assert second.token_ids == [1, 2, 3, 4, 5, 9, 10, 11, 12, 13]
    assert [(nodes.index(covered), start) for covered, start in second.nodes] == [(5, 7)]


def test_a_branch_that_only_repeats_sampled_nodes_or_has_none_is_not_scored() -> None:
    nodes = [*forked()[:2], node(1, "user", [6]), node(1, "user", [7])]
    assert len(scoring_paths(trace(*nodes))) == 1
    assert scoring_paths(trace(node(None, "user", [1, 2]))) == []


def test_every_sampled_token_gets_the_mixture_of_the_teachers_numbers_at_its_place() -> None:
    stamped = trace(*forked())
    first, second = ([-0.1 * place for place in range(8)], [-0.2 * place for place in range(10)])
    other = [-1.0 - 0.1 * place for place in range(8)]
    scores = [
        [said("a", 1.0, first), said("b", 3.0, other)],
        [said("a", 1.0, second), Score("b", 3.0, None, "late: no answer within 1 s")],
    ]
    report = stamp(scoring_paths(stamped), scores)
    turn, end, fork = (stamped.nodes[place] for place in (1, 3, 5))
    assert turn.reference_logprobs == log_mixture([(1.0, first[3:5]), (3.0, other[3:5])], 2)
    assert end.reference_logprobs == log_mixture([(1.0, first[7:]), (3.0, other[7:])], 1)
    assert fork.reference_logprobs == pytest.approx(second[7:])
    assert [stamped.nodes[place].reference_logprobs for place in (0, 2, 4)] == [None] * 3
    assert stamped.branches[1].reference_logprobs == pytest.approx(
        [0.0, 0.0, 0.0, *(turn.reference_logprobs or ()), 0.0, 0.0, *second[7:]]
    )
    assert report.metrics(["a", "b"]) == {
        "replay/tokens": 6.0,
        "replay/unanswered_tokens": 0.0,
        "replay/dropped_tokens": 3.0,
        "replay/dropped_tokens/a": 0.0,
        "replay/dropped_tokens/b": 3.0,
    }


def test_a_token_that_nobody_answered_gets_none_and_is_counted() -> None:
    stamped = trace(*forked()[:4])
    report = stamp(scoring_paths(stamped), [[said("a", 1.0, [NAN, -1.0, -1.0, NAN, -2.0, -1.0, -1.0, NAN])]])
    assert stamped.nodes[1].reference_logprobs == [0.0, -2.0]
    assert stamped.nodes[3].reference_logprobs is None
    assert report.metrics([]) == {
        "replay/tokens": 1.0,
        "replay/unanswered_tokens": 2.0,
        "replay/dropped_tokens": 2.0,
    }


def test_what_the_rollout_brought_stays_and_ref_kl_weights_are_set_only_when_asked() -> None:
    for ref_kl in (False, True):
        stamped = trace(*forked()[:2])
        before = stamped.nodes[1].model_copy(deep=True)
        stamped.nodes[1].loss_weights = {"ce": [0.0, 0.5, 0.0]}
        stamp(scoring_paths(stamped), [[said("a", 1.0, [NAN, -1.0, -1.0, NAN, -2.0])]], ref_kl=ref_kl)
        after = stamped.nodes[1]
        wanted = {"ce": [0.0, 0.5, 0.0]} | ({"ref_kl": [0.0, 0.0, 1.0]} if ref_kl else {})
        assert after.loss_weights == wanted
        unchanged = {"token_ids", "mask", "logprobs", "advantages", "message"}
        assert after.model_dump(include=unchanged) == before.model_dump(include=unchanged)


def test_candidates_stand_at_sampled_tokens_of_every_node_and_streams_are_told_apart() -> None:
    stamped = trace(*forked()[:4])
    replay, hint = told(range(8)), told([40])
    scores = [[Score("a", 1.0, Scores([NAN] * 8, replay))]]
    report = stamp_candidates(
        stamped, scoring_paths(stamped), scores, {id(stamped.nodes[3]): hint}, top_k=2, num_streams=2
    )
    arrays = [one.routed_experts for one in stamped.nodes]
    assert [one is not None and one.shape for one in arrays] == [(2, 4, 2), (3, 4, 2), (1, 4, 2), (2, 4, 2)]
    sampled = [(1, 1, 3), (1, 2, 4), (3, 1, 7)]
    for node_, token, place in sampled:
        packed = arrays[node_]
        assert packed is not None
        assert packed[token, 0].tolist() == (replay.ids[place] + 1).tolist()
        assert packed[token, 1].view(np.float32).tolist() == replay.logprobs[place].tolist()
    last = arrays[3]
    assert last is not None
    assert last[1, 2].tolist() == (-(hint.ids[0] + 1)).tolist()
    assert last[1, 3].view(np.float32).tolist() == hint.logprobs[0].tolist()
    assert sum(int(np.any(one[token])) for one in arrays if one is not None for token in range(len(one))) == 3
    assert report.metrics([])["replay/tokens"] == 3.0
    assert stamped.nodes[1].reference_logprobs is None


def test_a_teacher_that_fails_leaves_no_candidates_and_is_counted() -> None:
    stamped = trace(*forked()[:4])
    report = stamp_candidates(
        stamped, scoring_paths(stamped), [[Score("a", 1.0, None, "late")]], {}, top_k=2, num_streams=1
    )
    assert not any(one.routed_experts.any() for one in stamped.nodes if one.routed_experts is not None)
    assert report.metrics(["a"])["replay/unanswered_tokens"] == report.metrics(["a"])["replay/dropped_tokens/a"] == 3.0


def told(places: Sequence[int]) -> Candidates:
    """Two candidates at each place, which differ from place to place."""
    ids = np.array([[2 * place, 2 * place + 1] for place in places], np.int32)
    return Candidates(ids, np.log(np.array([[0.5, 0.5 / (place + 2)] for place in places], np.float32)))


def said(teacher: str, weight: float, logprobs: list[float]) -> Score:
    """A teacher's numbers for the tokens themselves, without candidates."""
    return Score(teacher, weight, Scores(logprobs, Candidates.none(len(logprobs), 0)))
