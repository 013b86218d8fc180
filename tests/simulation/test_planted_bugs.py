"""The simulator is worth what it catches: each kind of bug, planted in production code, breaks an invariant."""

import contextlib
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_prime.errors import StoreError
from composer_prime.outer.aggregate import weighted_mean
from composer_prime.outer.sparse import dense
from composer_prime.store import keys
from composer_prime.sync import courier, garbage, merging, replica, returning, rounds, site_clock
from composer_prime.sync.courier import Courier
from composer_prime.sync.merging import Merger
from composer_prime.sync.protocol import RoundDecision, RoundView
from composer_prime.sync.records import Commit, Refused
from composer_prime.sync.replica import Replica
from composer_prime.sync.roster import Roster
from composer_prime.sync.rounds import RoundCloser
from composer_prime.sync.site_clock import OuterLoop
from tests.simulation.__main__ import main
from tests.simulation.plan import Fault, Plan, draw_plan
from tests.simulation.shrink import command, shrink
from tests.simulation.world import World, run_plan

MOST_SEEDS = 80
"""Seeds in which a bug must show."""


def find(fits: Callable[[Plan], bool]) -> list[Plan]:
    """The first plans of a kind, none with many sites; sound code plays them soundly."""
    plans = (draw_plan(seed) for seed in range(100_000))
    fitting = (plan for plan in plans if plan.num_sites < 6 and fits(plan))
    return [next(fitting) for _ in range(MOST_SEEDS)]


def faults_of(plan: Plan) -> set[str]:
    return {fault.kind for fault in plan.faults}


def check(
    monkeypatch: pytest.MonkeyPatch,
    telling: str,
    plant: Callable[[], None],
    fits: Callable[[Plan], bool] = lambda _: True,
) -> None:
    """The bug is noticed for what it is, and without it the very same seed is sound."""
    plans = find(fits)
    plant()
    failing = next((result for result in map(run_plan, plans) if result.violations), None)
    monkeypatch.undo()
    assert failing is not None, f"{len(plans)} seeds from {plans[0].seed} on don't notice the bug"
    assert re.search(telling, failing.violations[0])
    assert run_plan(failing.plan).violations == ()


class Overwriting:
    """A store on which create wins always."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create(self, key: str, data: bytes) -> bool:
        self._inner.put(key, data)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def overwriting(method: Callable[..., Any], kind: type[Overwriting] = Overwriting) -> Callable[..., Any]:
    """The method with a store that overwrites."""

    def run(self: Any, *args: Any) -> Any:
        store = self._store
        self._store = kind(store)
        try:
            return method(self, *args)
        finally:
            self._store = store

    return run


def test_double_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant() -> None:
        monkeypatch.setattr(RoundCloser, "_commit", overwriting(RoundCloser._commit))
        monkeypatch.setattr("composer_prime.sync.rounds.commit_rank", lambda *_: 0)

    check(monkeypatch, "two contents at rounds/", plant, lambda plan: plan.num_sites > 2)


def test_fragment_clock_by_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turn = OuterLoop._take_turn

    def own(self: Any) -> None:
        turn = self._step // self._terms.steps_per_turn
        site_clock.due_fragment = lambda versions: turn % len(versions)
        take_turn(self)

    def plant() -> None:
        monkeypatch.setattr(site_clock, "due_fragment", site_clock.due_fragment)
        monkeypatch.setattr(OuterLoop, "_take_turn", own)

    check(monkeypatch, "deadlock|stall", plant, lambda plan: plan.terms.fragments > 1 and plan.terms.quorum > 1)


def test_a_round_that_waits_for_a_site_that_is_away_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = rounds.decide_round

    def patient(view: RoundView, quorum: int, grace_s: float) -> RoundDecision:
        staying = {site.name for site in World.playing.sites.values() if site.process and not site.is_gone}
        return decide(replace(view, live=view.live | staying), quorum, math.inf)

    def is_long(fault: Fault) -> bool:
        return fault.kind in ("pause", "absent", "crash", "cut") and fault.for_s > 30

    check(
        monkeypatch,
        "stall: no round closed in",
        lambda: monkeypatch.setattr(rounds, "decide_round", patient),
        lambda plan: any(map(is_long, plan.faults)),
    )


def test_residual_applied_when_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = OuterLoop._carry

    def apply(self: Any, stand: Any, new_base: Any, master: Any, settled: Any) -> Any:
        if settled is not None and settled.outcome in ("missed", "void"):
            stand.residual = settled.residual
        return carry(self, stand, new_base, master, settled)

    check(monkeypatch, " is off by ", lambda: monkeypatch.setattr(OuterLoop, "_carry", apply), _is_lossy)


def _is_lossy(plan: Plan) -> bool:
    return plan.terms.codec != "fp32" and bool(faults_of(plan) & {"slow", "pause", "slow_upload"})


def test_offer_counted_twice_after_a_return(monkeypatch: pytest.MonkeyPatch) -> None:
    own_past = returning.own_past

    def forgetful(*args: Any) -> Any:
        return replace(own_past(*args), taken=False, merged=())

    check(monkeypatch, "commits took", lambda: monkeypatch.setattr(returning, "own_past", forgetful), _has_crash)


def _has_crash(plan: Plan) -> bool:
    return bool(faults_of(plan) & {"crash", "crash_old"})


def test_movement_of_a_learner_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = returning.Returning.stand

    def plant() -> None:
        monkeypatch.setattr(
            returning.Returning, "stand", lambda self, replica, saved, start: stand(self, replica, saved)
        )

    check(monkeypatch, " learned ", plant, lambda plan: plan.hasty and bool(faults_of(plan) & {"late"}))


def test_slice_reduced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant() -> None:
        monkeypatch.setattr(Merger, "reduce", overwriting(Merger.reduce))
        monkeypatch.setattr(courier, "reducer_rank", lambda *_: 0)

    check(
        monkeypatch,
        "two contents at rounds/",
        plant,
        lambda plan: plan.terms.gather_sites < plan.num_sites and plan.terms.slices > 2,
    )


def test_shares_kept_when_a_part_leaves_an_offer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(commit: Any, *_: Any) -> Any:
        return {entry.site: entry.multiplier for entry in commit.taken}

    check(
        monkeypatch,
        "isn't what the offers in it make",
        lambda: monkeypatch.setattr(merging, "part_shares", kept),
        _excludes,
    )


def test_a_reducer_leaves_out_what_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Merger._read_slices

    def choosy(self: Any, offer: Any, *place: Any) -> Any:
        return "too slow" if offer.site == "s01" else read(self, offer, *place)

    check(
        monkeypatch,
        "excludes s01, whose payload is sound: too slow",
        lambda: monkeypatch.setattr(Merger, "_read_slices", choosy),
        lambda plan: plan.terms.gather_sites < plan.num_sites and plan.terms.slices > 1,
    )


def _excludes(plan: Plan) -> bool:
    return "damage" in faults_of(plan) and plan.terms.aggregate == "mean"


def test_garbage_collection_of_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    is_garbage = garbage._is_garbage

    def greedy(key: str, limit: int, run: Any) -> bool:
        return is_garbage(key, limit, run) or (key.endswith("commit.json") and int(key.split("/")[2]) < limit)

    def plant() -> None:
        monkeypatch.setattr(garbage, "_is_garbage", greedy)

    check(
        monkeypatch,
        "commit.json was deleted",
        plant,
        lambda plan: not plan.terms.keep_log and plan.terms.snapshot_rounds == 1,
    )


def test_garbage_collection_of_what_a_live_site_has_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = garbage.garbage_limit

    check(
        monkeypatch,
        "is still pinned",
        lambda: monkeypatch.setattr(garbage, "garbage_limit", lambda snapshots, pins: limit(snapshots, [])),
        lambda plan: not plan.terms.keep_log and plan.terms.snapshot_rounds == 1 and _is_out_of_step(plan),
    )


def _is_out_of_step(plan: Plan) -> bool:
    return bool(faults_of(plan) & {"phase", "slow_upload", "slow", "late"})


def test_fused_multiply_add_at_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = replica.nesterov_next

    def fused(weights: Any, pseudograd: Any, momentum: Any, *, lr: float, mu: float) -> Any:
        if World.playing.scheduler.current.process.name != "s01":
            return sound(weights, pseudograd, momentum, lr=lr, mu=mu)
        gradient, velocity = pseudograd.double(), momentum.double() * mu + pseudograd.double()
        return (weights.double() - lr * (gradient + mu * velocity)).float(), velocity.float()

    check(
        monkeypatch,
        "has another master",
        lambda: monkeypatch.setattr(replica, "nesterov_next", fused),
        lambda plan: plan.num_sites > 1 and plan.terms.has_momentum,
    )


def test_alpha_blend_on_untaken_work(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = OuterLoop._carry

    def blended(self: Any, stand: Any, new_base: Any, master: Any, settled: Any) -> Any:
        change = carry(self, stand, new_base, master, settled)
        return change if settled is None else lambda local, span: 0.5 * local + 0.5 * new_base[span]

    check(
        monkeypatch,
        " is off by ",
        lambda: monkeypatch.setattr(OuterLoop, "_carry", blended),
    )


def test_late_work_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = OuterLoop._carry

    def forget(self: Any, stand: Any, new_base: Any, master: Any, settled: Any) -> Any:
        change = carry(self, stand, new_base, master, settled)
        return change if settled is None or settled.outcome not in ("missed", "void") else None

    check(
        monkeypatch,
        " is off by | tokens and moves ",
        lambda: monkeypatch.setattr(OuterLoop, "_carry", forget),
    )


def test_work_offered_after_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    bring = Courier._bring

    def bring_always(self: Courier, fragment: int) -> None:
        terms = self._terms
        self._terms = terms.model_copy(update={"rounds": terms.rounds + 1})
        try:
            bring(self, fragment)
        finally:
            self._terms = terms

    def plant() -> None:
        monkeypatch.setattr(Courier, "_bring", bring_always)

    check(monkeypatch, "after the run's last", plant, lambda plan: "slow_upload" in faults_of(plan))


def test_late_work_dropped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    check(
        monkeypatch,
        "rounds missed",
        lambda: monkeypatch.setattr(site_clock, "is_stale", lambda *_: True),
    )


def test_work_grows_old_in_void_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: a round that took nobody's work made that of all one round older."""
    carry = OuterLoop._carry

    def aging(self: Any, stand: Any, new_base: Any, master: Any, settled: Any) -> Any:
        if settled is not None and settled.outcome == "void":
            settled = replace(settled, outcome="missed")
        return carry(self, stand, new_base, master, settled)

    def fits(plan: Plan) -> bool:
        return plan.terms.max_stale_rounds == 1 and "both" in faults_of(plan)

    def plant() -> None:
        monkeypatch.setattr(OuterLoop, "_carry", aging)

    check(monkeypatch, "tokens after [01] rounds missed", plant, fits)


def test_a_mean_that_takes_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowest(parts: Any) -> Any:
        return torch.stack([multiplier * dense(x) for multiplier, x in parts]).amin(0)

    check(
        monkeypatch,
        "isn't what",
        lambda: monkeypatch.setattr(merging, "weighted_mean", lowest),
        lambda plan: plan.num_sites > 2,
    )


class Twice(Overwriting):
    """A store on which another commit of the same process follows at once."""

    def create(self, key: str, data: bytes) -> bool:
        self._inner.put(key, data)
        other = Commit.from_bytes(data, key).model_copy(update={"refused": (Refused(site="s09", why="late"),)})
        self._inner.put(key, other.to_bytes())
        return True


def test_unreadable_payload_left_out_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    pseudograd = Merger.pseudograd

    def lenient(self: Any, closing: Any) -> Any:
        parts = []
        for entry in () if closing.commit.num_parts else closing.commit.taken:
            with contextlib.suppress(StoreError):
                parts.append((entry.multiplier, self.fetch(entry.offer)))
        return weighted_mean(parts) if parts else pseudograd(self, closing)

    check(
        monkeypatch,
        "has another master",
        lambda: monkeypatch.setattr(Merger, "pseudograd", lenient),
        lambda plan: "unreadable" in faults_of(plan) and plan.terms.aggregate == "mean",
    )


def test_a_site_goes_on_though_others_stand_on_another_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose master is wrong would close rounds with nothing, and call the others' commits void."""
    check(
        monkeypatch,
        "finds a commit faulty",
        lambda: monkeypatch.setattr(Replica, "check_agrees", lambda *_: None),
        _mistakes_a_master,
    )


def _mistakes_a_master(plan: Plan) -> bool:
    """Whether a site may believe a wrong master while a quorum, no less than half of all, stands on the right one."""
    before_hashing = any(fault.kind == "corrupt" and fault.amount % 2 == 0 for fault in plan.faults)
    half = plan.num_sites > 3 and plan.terms.quorum * 2 >= plan.num_sites
    return before_hashing and half and plan.terms.codec == "fp32"


def test_own_work_taken_for_overtaken_after_a_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: what commits took of a name before its process joined counted as taken behind its back."""
    check(
        monkeypatch,
        "no other process had any merged",
        lambda: monkeypatch.setattr(Courier, "catch_up", Courier.follow),
        _has_crash,
    )


def test_a_process_that_joins_one_round_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the last closed round for later, though all that it takes is there."""

    def hasty(self: Any) -> None:
        for own in self._replicas:
            while keys.commit(own.fragment, own.version + 1) in World.playing.bucket.objects:
                self._advance(own)
        self._overtaken.clear()

    check(monkeypatch, "the log led to", lambda: monkeypatch.setattr(Courier, "catch_up", hasty), _comes_late)


def _comes_late(plan: Plan) -> bool:
    return "late" in faults_of(plan) and not _has_crash(plan)


def test_a_guest_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def plant() -> None:
        monkeypatch.setattr(Roster, "guests", lambda self, number=None: frozenset())

    check(monkeypatch, "which is a guest", plant, lambda plan: len(plan.guests) > 1)


def test_a_failing_seed_is_shrunk_and_its_command_shows_the_same_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_past = returning.own_past

    def forgetful(*args: Any) -> Any:
        return replace(own_past(*args), taken=False, merged=())

    plans = [plan for plan in find(_has_crash) if len(plan.faults) > 4]
    with monkeypatch.context() as planted:
        planted.setattr(returning, "own_past", forgetful)
        failing = next(plan for plan in plans if run_plan(plan).violations)
        small = shrink(failing)
        given = shlex.split(command(small))
        assert len(small.faults) < len(failing.faults)
        assert faults_of(small) & {"crash", "crash_old"}
        planted.setattr(sys, "argv", given[2:])
        assert main() == 1
        assert f"VIOLATION {run_plan(small).violations[0]}" in capsys.readouterr().out
    assert run_plan(small).violations == ()
