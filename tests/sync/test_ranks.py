"""Sites of several ranks, each rank a process: every layout makes the same bits, and no rank is left waiting."""

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from composer_prime.errors import ComposerPrimeError, ConfigError, FingerprintMismatch, SiteError, Superseded
from composer_prime.sync.site_clock import OuterLoop, OuterReport
from tests.sync.harness import make_terms
from tests.sync.ranked_site import Plan, Rank, make_model, move, run_ranked, run_to_the_end, train_to_the_end, whole

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


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """`reference(model)`: the masters, and the parameters, of two sites of one rank each."""
    known: dict[str, tuple[list[str], dict[str, torch.Tensor]]] = {}

    def of(model: str) -> tuple[list[str], dict[str, torch.Tensor]]:
        if model not in known:
            folder = tmp_path_factory.mktemp(f"reference-{model}")
            (a,), (b,) = run_ranked(folder, *(Plan(site, 1, uri(folder), model, local_site, PAIR) for site in "ab"))
            assert shas(a) == shas(b)
            known[model] = shas(a), a["net"]
        return known[model]

    return of


def local_site(rank: Rank) -> dict[str, Any]:
    """A plain `OuterLoop` on a plain model, which knows of no ranks."""
    net = make_model(rank.plan.model)
    outer = rank.lead()
    outer.join(net.named_parameters())
    step = 0
    while not outer.finished:
        step += 1
        move(net, step, rank.plan.site)
        outer.after_inner_step(tokens=12, samples=1)
    seen = {"net": whole(net), "summary": outer.summary()}
    outer.close()
    return seen


@pytest.mark.parametrize("model", ["mlp", "bf16", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_ends_with_the_masters_of_sites_without_ranks(tmp_path, reference, layout, model):
    plans = [Plan(site, ranks, uri(tmp_path), model, None, PAIR) for site, ranks in zip("ab", layout, strict=True)]
    masters, values = reference(model)
    for ranks in run_ranked(tmp_path, *plans):
        assert shas(ranks[0]) == masters
        for seen in ranks:
            assert seen["steps"] == 12
            assert_same_values(seen["net"], values)
        for ledger in ranks[0]["summary"]["tokens"]:
            assert ledger["merged"] == ledger["trained"] == 12 * 12  # 12 steps of 12 tokens, over however many ranks
        for seen in ranks[1:]:
            assert seen["state"] == seen["summary"] == {}


def test_tied_parameters_go_once_frozen_ones_not_at_all_and_adapters_do(tmp_path, reference):
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


def save_at_5(rank: Rank) -> dict[str, Any]:
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    for step in range(1, 6):
        move(rank.net, step, rank.plan.site)
        outer.after_inner_step(tokens=12 // rank.plan.num_ranks, samples=1)
    seen = {"net": whole(rank.net), "outer": outer.state_dict()}
    outer.close()
    return seen


def resume_at_5(saved: dict[str, Any], rank: Rank) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, parameter in rank.net.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(saved["net"][name], parameter.device_mesh, parameter.placements))
    outer = rank.outer()
    outer.load_state_dict(saved["outer"] if rank.number == 0 else {})
    outer.join(rank.net.named_parameters())
    step = 5
    while not outer.finished:
        step += 1
        move(rank.net, step, rank.plan.site)
        outer.after_inner_step(tokens=12 // rank.plan.num_ranks, samples=1)
    seen = {"net": whole(rank.net), "summary": outer.summary()}
    outer.close()
    return seen


def test_a_checkpoint_of_three_ranks_is_resumed_by_two_as_if_nothing_had_happened(tmp_path):
    for name in ("split", "plain"):
        (tmp_path / name).mkdir()
    ((plain,),) = run_ranked(tmp_path / "plain", Plan("a", 1, uri(tmp_path / "plain")))
    ((saved, *_),) = run_ranked(tmp_path / "split", Plan("a", 3, uri(tmp_path / "split"), body=save_at_5))
    (tmp_path / "split" / "a.meeting").unlink(missing_ok=True)
    plan = Plan("a", 2, uri(tmp_path / "split"), body=partial(resume_at_5, saved))
    ((first, second),) = run_ranked(tmp_path / "split", plan)
    assert shas(first) == shas(plain)
    assert_same_values(first["net"], plain["net"])
    assert_same_values(second["net"], plain["net"])


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
        Plan("a", 2, uri(tmp_path), terms=PAIR, timeout_s=2.0),
        Plan("b", 1, uri(tmp_path), terms=PAIR, body=partial(late_site, 5.0)),
    ]
    a, b = run_ranked(tmp_path, *plans)
    assert shas(a[0]) == shas(b[0]) and a[1]["steps"] == 12


def interrupted_by(number: int, rank: Rank) -> tuple[OuterReport, float]:
    """Wait for a quorum that never comes, until one rank is interrupted."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    if rank.number == number:
        threading.Timer(1.0, outer.interrupt).start()
    started = time.monotonic()
    for step in (1, 2):
        move(rank.net, step, rank.plan.site)
        report = outer.after_inner_step(tokens=6, samples=1)
    outer.close()
    return report, time.monotonic() - started


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_on_any_rank_frees_all_of_them(tmp_path, number):
    terms, body = {"quorum": 2}, partial(interrupted_by, number)
    ((first, second),) = run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), terms=terms, body=body, timeout_s=4.0))
    assert first[0] == second[0] and not first[0].stop
    assert 0.9 < first[1] < 10


# --- failures -------------------------------------------------------------------------------------------------------


class Failing(OuterLoop):
    """An outer loop that fails in its third step."""

    error: BaseException

    def after_inner_step(self, tokens: int, samples: int) -> OuterReport:
        if self._step == 2:
            raise self.error
        return super().after_inner_step(tokens, samples)


def fail_on_rank_0(error: BaseException, rank: Rank) -> str:
    from composer_prime.store import open_store

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


def die(number: int, after_s: float, rank: Rank) -> float:
    """Wait for a quorum that never comes; meanwhile one rank ends as if killed, or hangs before its next step."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    if rank.number == number:
        threading.Timer(after_s, os._exit, [9]).start()
    started = time.monotonic()
    try:
        for step in range(1, 4):
            move(rank.net, step, rank.plan.site)
            outer.after_inner_step(tokens=4, samples=1)
    except SiteError as error:
        assert "restart the site" in str(error)
        return time.monotonic() - started
    finally:
        outer.close()
    raise AssertionError("went on")


@pytest.mark.parametrize("number", [0, 2])
def test_when_a_rank_is_killed_while_the_site_waits_the_others_fail_with_a_word(tmp_path, number):
    plan = Plan("a", 3, uri(tmp_path), terms={"quorum": 2}, body=partial(die, number, 0.5), timeout_s=4.0)
    (seen,) = run_ranked(tmp_path, plan)
    assert seen[number] is None
    for place, waited_s in enumerate(seen):
        if place != number:
            assert isinstance(waited_s, float), waited_s
            assert waited_s < 10


def hang(rank: Rank) -> str:
    """Rank 1 is late for its step by more than the limit."""
    outer = rank.outer()
    outer.join(rank.net.named_parameters())
    try:
        if rank.number == 1:
            time.sleep(4.0)
        outer.after_inner_step(tokens=6, samples=1)
    except SiteError as error:
        return str(error)
    finally:
        outer.close()
    return "went on"


def test_a_rank_that_hangs_fails_the_site_after_the_limit(tmp_path):
    (seen,) = run_ranked(tmp_path, Plan("a", 2, uri(tmp_path), body=hang, timeout_s=1.5))
    assert "rank 0 of this site's 2 lost the others" in seen[0] and "limit of 1.5 s" in seen[0]
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
