"""What BucketManager does when all is well, and when replicas are late, lost, wrong or started again."""

import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_prime.errors import ConfigError, ProtocolError, SiteError, StoreError
from composer_prime.integrations import torchft as ours
from composer_prime.integrations import torchft_keys
from composer_prime.integrations.torchft import BucketManager
from composer_prime.integrations.torchft_rounds import RunTerms, common_base, who_takes_part
from composer_prime.store import open_store
from tests.integrations.replicas import (
    in_lockstep,
    masters,
    run_together,
    train_with_torchft,
)
from tests.patience import PATIENCE_S

pytest.importorskip("torchft")

TERMS = RunTerms(num_replicas=3, min_replicas=2)
TRAIN: dict[str, Any] = {"inner_steps": 8, "num_fragments": 2, "steps": 24}
"""Six rounds, three of each fragment."""


@pytest.fixture
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BucketManager]:
    """`manager(name)` is a replica of one run in memory; all are shut down when the test ends."""
    monkeypatch.setattr(ours, "START_PATIENCE", 1)
    uri = f"memory://{secrets.token_hex(8)}"

    def make(replica: str, **changes: Any) -> BucketManager:
        values: dict[str, Any] = {"run": "run", "num_replicas": 2, "min_replicas": 2, "timeout_s": 30.0}
        made = BucketManager(uri, replica=replica, **(values | changes))
        request.addfinalizer(made.shutdown)
        return made

    return make


def trained(manager: BucketManager, place: int, **changes: Any) -> Tensor:
    train_with_torchft(manager, **{**TRAIN, "data_seed": place, **changes})
    return masters(manager)


def one_round(manager: BucketManager, value: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, bool]:
    """A round of one small tensor: what it holds at the end, and whether to commit."""
    tensor = torch.full((3,), value, dtype=dtype)
    manager.start_quorum()
    work = manager.allreduce(tensor)
    assert work.wait()
    return tensor, manager.should_commit()


# --- decisions ------------------------------------------------------------------------------------------------------


def test_the_first_round_waits_for_all_replicas_until_time_is_up():
    assert who_takes_part("ba", "ba", None, False, TERMS) is None
    assert who_takes_part("ba", "ba", None, True, TERMS) == ("a", "b")
    assert who_takes_part("cba", "cba", None, False, TERMS) == ("a", "b", "c")


def test_a_later_round_waits_only_for_replicas_that_gave_a_sign_of_life():
    assert who_takes_part("ab", "ab", "ab", False, TERMS) == ("a", "b")
    assert who_takes_part("ab", "ab", "abc", False, TERMS) is None
    assert who_takes_part("ab", "ab", "abc", True, TERMS) == ("a", "b")


def test_a_replica_whose_part_fits_no_other_is_not_waited_for():
    assert who_takes_part("ab", "abc", None, False, TERMS) == ("a", "b")


def test_a_round_with_too_few_is_void_when_time_is_up():
    assert who_takes_part("a", "a", "a", False, TERMS) is None
    assert who_takes_part("a", "a", "a", True, TERMS) == ()


def test_the_base_of_a_round_is_that_of_most_replicas():
    assert common_base({"a": "x", "b": "y", "c": "y"}) == "y"
    assert common_base({"b": "y", "a": "x"}) == "x"


# --- rounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_allreduce_gives_both_replicas_the_mean_in_their_dtype(manager, dtype):
    both = [manager("a"), manager("b")]
    results = run_together(lambda: one_round(both[0], 1.0, dtype), lambda: one_round(both[1], 2.0, dtype))
    for tensor, committed in results:
        assert committed and torch.equal(tensor, torch.full((3,), 1.5, dtype=dtype))
    assert [one.num_participants() for one in both] == [one.batches_committed() for one in both] == [2, 2]


def test_a_replica_that_never_comes_is_left_out(manager, monkeypatch):
    monkeypatch.setattr(ours, "START_PATIENCE", 0.05)
    settings: dict[str, Any] = {"num_replicas": 3}
    both = [manager(name, **settings) for name in "ab"]
    first, second = run_together(lambda: trained(both[0], 0), lambda: trained(both[1], 1))
    assert torch.equal(first, second) and both[0].num_participants() == 2
    assert (first - in_lockstep(2, **TRAIN)[0]).abs().max().item() < 1e-6


def test_a_late_replica_takes_over_the_rounds_it_missed(manager, monkeypatch):
    monkeypatch.setattr(ours, "START_PATIENCE", 0.05)
    settings: dict[str, Any] = {"num_replicas": 3}
    both = [manager(name, **settings) for name in "ab"]
    first, _ = run_together(lambda: trained(both[0], 0), lambda: trained(both[1], 1))
    late = manager("c", **settings)
    assert torch.equal(trained(late, 2), first)
    assert late.current_step() == 6 and not late.is_participating() and late.num_participants() == 2


def test_a_late_replica_is_waited_for_again(manager, monkeypatch):
    settings: dict[str, Any] = {"min_replicas": 1, "timeout_s": 0.2}
    first, second = manager("a", **settings), manager("b", **settings | {"timeout_s": 30.0})
    assert one_round(first, 1.0)[1] and first.num_participants() == 1  # b stays away
    assert torch.equal(one_round(second, 5.0)[0], torch.full((3,), 1.0)) and not second.is_participating()
    first._timeout_s = 30.0
    looks, signs_of_life = iter((False, True)), first._signs_of_life
    waits = threading.Event()

    def looking(number: int) -> frozenset[str]:
        if next(looks, False):
            waits.set()  # a looked, did not decide, and looks again
        return signs_of_life(number)

    monkeypatch.setattr(first, "_signs_of_life", looking)

    def after_a() -> tuple[Tensor, bool]:
        assert waits.wait(PATIENCE_S), "a did not wait for b"
        return one_round(second, 2.0)

    results = run_together(lambda: one_round(first, 1.0), after_a)
    assert all(torch.equal(tensor, torch.full((3,), 1.5)) for tensor, _ in results)


def test_a_round_with_too_few_replicas_is_void_and_three_in_a_row_are_an_error(manager):
    alone = manager("a", timeout_s=0.1)
    for _ in range(2):
        tensor, committed = one_round(alone, 1.0)
        assert not committed and torch.equal(tensor, torch.full((3,), 1.0))
    with pytest.raises(SiteError, match="3 rounds in a row had fewer than min_replicas"):
        one_round(alone, 1.0)
    assert alone.current_step() == 0


def test_a_replica_started_again_gets_past_void_rounds(manager):
    alone = manager("a", timeout_s=0.1)
    with pytest.raises(SiteError):
        for _ in range(ours.MAX_VOID_ROUNDS):
            one_round(alone, 1.0)
    both = [manager("a"), manager("b")]

    def four_rounds(one: BucketManager) -> list[bool]:
        return [one_round(one, 1.0)[1] for _ in range(ours.MAX_VOID_ROUNDS + 1)]

    results = run_together(*(lambda one=one: four_rounds(one) for one in both))
    assert results == [[False, False, False, True]] * 2


def test_a_void_round_is_void_for_a_late_replica_too(manager):
    assert not one_round(manager("a", timeout_s=0.1), 1.0)[1]
    assert not one_round(manager("b"), 1.0)[1]


def test_a_replica_with_other_tensors_stops_and_the_others_go_on(manager):
    settings: dict[str, Any] = {"num_replicas": 3}
    three = [manager(name, **settings) for name in "abc"]

    def wrong() -> str:
        with pytest.raises(ProtocolError, match="replica c stands on"):
            one_round(three[2], 1.0, torch.float64)
        return "stopped"

    first, second, third = run_together(lambda: one_round(three[0], 1.0), lambda: one_round(three[1], 2.0), wrong)
    assert first[1] and second[1] and third == "stopped" and three[0].num_participants() == 2


def test_replicas_that_start_from_different_weights_find_out(manager):
    both = [manager(name, min_replicas=1) for name in "ab"]
    for number, one in enumerate(both):
        state = {"original_parameters": {"weight": torch.full((2,), float(number))}}
        one.register_state_dict_fn("StreamingDiLoCoFragment_0", lambda _: None, lambda state=state: state)

    def wrong() -> bool:
        with pytest.raises(ProtocolError, match="start it from the same weights"):
            one_round(both[1], 2.0)
        return True

    right, stopped = run_together(lambda: one_round(both[0], 1.0), wrong)
    assert stopped and right[1] and both[0].num_participants() == 1


# --- the bucket -----------------------------------------------------------------------------------------------------


def test_payloads_of_old_rounds_go_and_who_needs_them_is_told(manager):
    alone = manager("a", min_replicas=1, timeout_s=0.1)
    for _ in range(ours.KEPT_ROUNDS + 2):
        assert one_round(alone, 1.0)[1]
    store = open_store(alone._store.uri)
    held = [number for number in range(ours.KEPT_ROUNDS + 2) if store.list(torchft_keys.payload_prefix(number, "a"))]
    assert held == list(range(2, ours.KEPT_ROUNDS + 2))
    with pytest.raises(SiteError, match="too far behind"):
        one_round(manager("b", min_replicas=1), 1.0)


def test_a_store_that_fails_for_a_moment_is_asked_again(manager, monkeypatch):
    monkeypatch.setattr(ours, "RETRY_S", 0.01)
    alone = manager("a", min_replicas=1, timeout_s=3.0)
    failures = iter([StoreError("the bucket is busy")] * 3)
    put = alone._store.put

    def flaky(key: str, data: bytes) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        put(key, data)

    monkeypatch.setattr(alone._store, "put", flaky)
    assert one_round(alone, 1.0)[1] and next(failures, None) is None


def test_a_replica_started_again_from_its_checkpoint_ends_with_the_others_weights(manager):
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    from tests.integrations.replicas import INNER_LR, batches, fragment_modules, inner_step, make_net, outer_optimizers

    def part(one: BucketManager, place: int, steps: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        net = make_net(seed=0 if saved is None else 99)
        fragments = fragment_modules(net, 2)
        inner = torch.optim.SGD(net.parameters(), lr=INNER_LR)
        of_torchft: Any = one  # torchft asks for its own Manager by type, and uses what ours has too
        diloco = DiLoCo(of_torchft, fragments, inner, outer_optimizers(fragments), sync_every=8)
        if saved is not None:
            net.load_state_dict(saved["net"])
            one.load_state_dict(saved["manager"])
        data = batches(place, torch.float32)
        with diloco:
            for _ in range(steps):
                inner_step(net, next(data), inner)
        return {"net": net.state_dict(), "manager": one.state_dict()}

    settings: dict[str, Any] = {"min_replicas": 1, "timeout_s": 0.5}
    staying, leaving = manager("a", **settings), manager("b", **settings)
    _, saved = run_together(lambda: part(staying, 0, 24, None), lambda: part(leaving, 1, 12, None))
    returned = manager("b", **settings)
    part(returned, 1, 12, saved)
    assert staying.current_step() == returned.current_step() == 6
    assert torch.equal(masters(returned), masters(staying))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_replicas_must_agree_on_their_number(manager):
    manager("a")
    with pytest.raises(ConfigError, match="started with num_replicas = 2"):
        manager("b", num_replicas=3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"run": "../b"}, "run"),
        ({"min_replicas": 3}, "min_replicas"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_settings_are_refused(manager, changes, message):
    with pytest.raises(ConfigError, match=message):
        manager("a", **changes)


def test_what_the_bucket_can_not_do_is_refused(manager):
    alone = manager("a")
    with pytest.raises(SiteError, match="no round is open"):
        alone.allreduce(torch.ones(2))
    alone.start_quorum()
    with pytest.raises(ConfigError, match="should_quantize"):
        alone.allreduce(torch.ones(2), should_quantize=True)
    with pytest.raises(ConfigError, match="floating point"):
        alone.allreduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="use_bucketization"):
        alone.allreduce(torch.ones(2)).get_future()
    with pytest.raises(SiteError, match="round 0 is open"):
        alone.start_quorum()
    with pytest.raises(SiteError, match="save after the inner step"):
        alone.state_dict()


def test_without_torchft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[torchft\]'"):
        BucketManager("memory://none", run="run", replica="a", num_replicas=1, min_replicas=1)
