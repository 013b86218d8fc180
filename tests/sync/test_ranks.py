"""Sites of several ranks, each rank a process: every layout makes the same bits, and no rank is left waiting."""

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_prime.errors import ComposerPrimeError, ConfigError, FingerprintMismatch, SiteError, Superseded
from composer_prime.store import open_store
from composer_prime.sync.report import OuterReport
from composer_prime.sync.run import load_run
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.snapshots import load_master
from tests.patience import PATIENCE_S
from tests.sync.harness import make_terms
from tests.sync.ranked_site import (
    MODELS,
    Plan,
    Rank,
    make_model,
    move,
    move_along,
    run_every_model,
    run_ranked,
    run_to_the_end,
    train_to_the_end,
)

LAYOUTS = [(1, 1), (2, 1), (3, 2)]
PAIR = {"quorum": 2, "momentum": 0.5, "weighting": "equal"}
"""Both sites' offers are in every round, so that the masters follow from the plans alone."""


def uri(folder) -> str:
    return f"file://{folder}/store"


def shas(seen: dict[str, Any]) -> list[str]:
    return [master["sha256"] for master in seen["summary"]["masters"]]


def assert_same_values(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def whole_site(site: str, model: str, uri: str, seen: dict[str, dict[str, Any]]) -> None:
    """What `run_to_the_end` does, on a whole model with a plain `OuterLoop`, which knows of no ranks."""
    outer = OuterLoop(open_store(uri), make_terms(**PAIR), run="run", site=site)
    seen[site] = move_along(outer, make_model(model), site)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """By model, what two sites without ranks end with."""
    ends: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        seen: dict[str, dict[str, Any]] = {}
        sites = [
            threading.Thread(target=whole_site, args=(site, model, f"memory://ranks-{model}", seen), daemon=True)
            for site in "ab"
        ]
        for site in sites:
            site.start()
        for site in sites:
            site.join(PATIENCE_S)
        assert shas(seen["a"]) == shas(seen["b"])
        ends[model] = seen["a"]
    return ends


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_ends_with_the_masters_of_sites_without_ranks(tmp_path, references, layout):
    plans = [
        Plan(site, ranks, uri(tmp_path), body=run_every_model, terms=PAIR)
        for site, ranks in zip("ab", layout, strict=True)
    ]
    for first, *others in run_ranked(tmp_path, *plans):
        for model, reference in references.items():
            assert shas(first[model]) == shas(reference)
            for seen in (first, *others):
                assert seen[model]["steps"] == 12
                assert_same_values(seen[model]["net"], reference["net"])
            for ledger in first[model]["summary"]["tokens"]:
                assert ledger["merged"] == ledger["trained"] == 12 * 12  # 12 steps of 12 tokens, on however many ranks
            for seen in others:
                assert seen[model]["state"] == seen[model]["summary"] == {}


def test_masters_of_bf16_parameters_are_fp32_and_the_net_holds_their_rounding(references):
    store, held = open_store("memory://ranks-bf16"), references["bf16"]["net"]
    run = load_run(store)
    for fragment, wanted in zip(run.fragments, references["bf16"]["summary"]["masters"], strict=True):
        weights = load_master(store, run, fragment.index, wanted["version"], wanted["sha256"]).weights
        rounded = weights.bfloat16()
        assert weights.dtype == torch.float32 and (weights != rounded.float()).sum() > weights.numel() / 2
        assert torch.equal(torch.cat([held[name].flatten() for name in fragment.names]), rounded)


def test_tied_parameters_go_once_frozen_ones_not_at_all_and_adapters_do(tmp_path):
    def trainable_shapes(state: dict[str, Any]) -> int:
        return sum(fragment["base"].numel() for fragment in state["fragments"])

    ((first, second),) = run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), "tied"))
    assert trainable_shapes(first["state"]) == 11 * 5 + 5 * 2 + 2 * 5
    start = make_model("tied").state_dict()
    for seen in (first, second):
        assert torch.equal(seen["net"]["base.weight"], start["base.weight"])
        assert not torch.equal(seen["net"]["lora_b.weight"], start["lora_b.weight"])


def test_real_training_of_mixed_layouts_ends_with_the_same_parameters_on_all_ranks(tmp_path):
    terms = {"quorum": 2, "codec": "int8", "sync_delay": 1, "rounds": 2, "lr": 0.7, "momentum": 0.9}
    plans = [Plan(site, ranks, uri(tmp_path), "tied", train_to_the_end, terms) for site, ranks in [("a", 2), ("b", 1)]]
    a, b = run_ranked(tmp_path, *plans)
    assert shas(a[0]) == shas(b[0])
    for seen in (*a, *b):
        assert_same_values(seen["net"], a[0]["net"])
    assert sum(ledger["trained"] for ledger in a[0]["summary"]["tokens"]) == 2 * 2 * 16 * a[0]["steps"]


def resume_at_5(saved: dict[str, Any], rank: Rank) -> dict[str, Any]:
    with torch.no_grad():
        for name, parameter in rank.net.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(saved["net"][name], parameter.device_mesh, parameter.placements))
    outer = rank.outer()
    outer.load_state_dict(saved["state"] if rank.number == 0 else {})
    return move_along(outer, rank.net, rank.plan.site, num_ranks=rank.plan.num_ranks, step=5)


def save_and_resume(folder: Path, ranks_before: int, ranks_after: int) -> list[dict[str, Any]]:
    for part in ("before", "after"):
        (folder / part).mkdir(parents=True)
    ((saved, *_),) = run_ranked(
        folder / "before", Plan("a", ranks_before, uri(folder), body=partial(run_to_the_end, last=5))
    )
    (seen,) = run_ranked(folder / "after", Plan("a", ranks_after, uri(folder), body=partial(resume_at_5, saved)))
    return seen


def test_a_checkpoint_of_three_ranks_is_resumed_by_two_as_one_rank_resumes_its_own(tmp_path):
    (alone,) = save_and_resume(tmp_path / "alone", 1, 1)
    for seen in (ranks := save_and_resume(tmp_path / "ranks", 3, 2)):
        assert_same_values(seen["net"], alone["net"])
    assert shas(ranks[0]) == shas(alone) and ranks[0]["summary"]["tokens"] == alone["summary"]["tokens"]


def test_ranks_that_join_a_finished_run_get_its_masters_and_stop_at_once(tmp_path):
    ((first,),) = run_ranked(tmp_path, Plan("a", 1, uri(tmp_path)))
    (late,) = run_ranked(tmp_path, Plan("b", 2, uri(tmp_path)))
    for seen in late:
        assert seen["steps"] == 0
        assert_same_values(seen["net"], first["net"])


# --- waiting --------------------------------------------------------------------------------------------------------


def late_site(seconds: float, rank: Rank) -> dict[str, Any]:
    time.sleep(seconds)
    return run_to_the_end(rank)


def test_a_wait_for_another_site_may_take_longer_than_the_ranks_limit_for_each_other(tmp_path):
    plans = [
        Plan("a", 2, uri(tmp_path), terms=PAIR, timeout_s=10.0),
        Plan("b", 1, uri(tmp_path), terms=PAIR, body=partial(late_site, 12.0)),
    ]
    a, b = run_ranked(tmp_path, *plans)
    assert shas(a[0]) == shas(b[0]) and a[1]["steps"] == 12


def interrupted_by(number: int, rank: Rank) -> OuterReport:
    """Wait for a quorum that never comes, until one rank is interrupted."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    if rank.number == number:
        threading.Timer(1.0, outer.interrupt).start()
    for step in (1, 2):
        move(rank.net, step, rank.plan.site)
        report = outer.after_inner_step(tokens=6, samples=1)
    outer.close()
    return report


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_on_any_rank_frees_all_of_them(tmp_path, number):
    terms, body = {"quorum": 2}, partial(interrupted_by, number)
    ((first, second),) = run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), terms=terms, body=body))
    assert first == second and not first.stop


# --- failures -------------------------------------------------------------------------------------------------------


class Failing(OuterLoop):
    """An outer loop that fails in its third step."""

    error: BaseException

    def after_inner_step(self, tokens: int, samples: int) -> OuterReport:
        if self._step == 2:
            raise self.error
        return super().after_inner_step(tokens, samples)


def fail_on_rank_0(error: BaseException, rank: Rank) -> str:
    def lead() -> OuterLoop:
        outer = Failing(open_store(rank.plan.uri), make_terms(), run="run", site="a")
        outer.error = error
        return outer

    outer = rank.outer(lead)
    outer.join(rank.net.named_parameters())
    try:
        for step in range(5):
            move(rank.net, step, rank.plan.site)
            outer.after_inner_step(tokens=6, samples=1)
    finally:
        outer.close()
    return "went on"


@pytest.mark.parametrize("error", [Superseded("another process has our name"), ZeroDivisionError("0")], ids=repr)
def test_an_error_of_rank_0_is_raised_by_all(tmp_path, error):
    ((first, *others),) = run_ranked(tmp_path, Plan("a", 3, uri(tmp_path), body=partial(fail_on_rank_0, error)))
    assert type(first) is type(error) and str(first) == str(error)
    for seen in others:
        if isinstance(error, ComposerPrimeError):
            assert type(seen) is Superseded and str(seen) == str(error)
        else:
            assert type(seen) is SiteError and str(seen) == "rank 0 of this site failed: ZeroDivisionError: 0"


def refuse_to_open(rank: Rank) -> None:
    def lead() -> OuterLoop:
        raise ConfigError("the recipe has no [outer] table")

    rank.outer(lead)


def join_with_other_terms(rank: Rank) -> None:
    rank.outer().join(rank.net.named_parameters())


def test_all_ranks_say_why_rank_0_could_not_open_or_join(tmp_path):
    for seen in run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), body=refuse_to_open))[0]:
        assert type(seen) is ConfigError and "no [outer] table" in str(seen)
    run_ranked(tmp_path, Plan("b", 1, uri(tmp_path)))
    plan = Plan("c", 2, uri(tmp_path), terms={"lr": 0.5}, body=join_with_other_terms)
    for seen in run_ranked(tmp_path, plan)[0]:
        assert type(seen) is FingerprintMismatch and "outer.lr: run 1.0, recipe 0.5" in str(seen)


def die(number: int, after_s: float, rank: Rank) -> str:
    """Wait for a quorum that never comes; meanwhile one rank ends as if killed."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    if rank.number == number:
        threading.Timer(after_s, os._exit, [9]).start()
    try:
        for step in range(1, 4):
            move(rank.net, step, rank.plan.site)
            outer.after_inner_step(tokens=4, samples=1)
    except SiteError as error:
        return str(error)
    finally:
        outer.close()
    raise AssertionError("went on")


@pytest.mark.parametrize("number", [0, 2])
def test_when_a_rank_is_killed_while_the_site_waits_the_others_fail_with_a_word(tmp_path, number):
    plan = Plan("a", 3, uri(tmp_path), terms={"quorum": 2}, body=partial(die, number, 0.5), timeout_s=2 * PATIENCE_S)
    (seen,) = run_ranked(tmp_path, plan)
    assert seen[number] is None
    for place, said in enumerate(seen):
        if place != number:
            assert "restart the site" in str(said), said


def hang(sign: Path, rank: Rank) -> str:
    """Rank 1 isn't there for the first step until rank 0 has given it up, and left a sign of that."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    try:
        while rank.number == 1 and not sign.exists():
            time.sleep(0.05)
        outer.after_inner_step(tokens=6, samples=1)
    except SiteError as error:
        sign.touch()
        return str(error)
    finally:
        outer.close()
    return "went on"


def test_a_rank_that_hangs_fails_the_site_after_the_limit(tmp_path):
    plan = Plan("a", 2, uri(tmp_path), body=partial(hang, tmp_path / "sign"), timeout_s=10.0)
    (seen,) = run_ranked(tmp_path, plan)
    assert "rank 0 of this site's 2 lost the others" in seen[0] and "limit of 10 s" in seen[0]
    assert "rank 1 of this site's 2 lost the others" in seen[1]


def join_with_one_more(rank: Rank) -> None:
    named = list(rank.net.named_parameters())
    if rank.number == 1:
        named.append(("extra", torch.nn.Parameter(torch.ones(2))))
    rank.outer().join(named)


def test_ranks_that_pass_different_parameters_are_refused_with_the_difference_shown(tmp_path):
    for seen in run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), body=join_with_one_more))[0]:
        assert type(seen) is ConfigError
        assert "rank 1 of this site has extra 2 torch.float32 where rank 0 has nothing" in str(seen)
