"""Liveness as one observer sees it (rule 6), claims and incarnations."""

import threading
from collections.abc import Callable

import pytest

from composer_prime.errors import ConfigError, Superseded
from composer_prime.store import keys
from composer_prime.sync.members import (
    MAX_BEAT_BYTES,
    Members,
    Pulse,
    check_name_is_free,
    claim_incarnation,
    newest_incarnation,
)
from composer_prime.sync.records import Manifest, SiteState
from composer_prime.sync.roster import Roster
from composer_prime.sync.terms import Terms
from tests.sync.harness import HandRuntime, make_terms


@pytest.fixture
def roster(store):
    return Roster(store, open_manifest(make_terms()), "0" * 64)


@pytest.fixture
def runtime():
    return HandRuntime()


def open_manifest(terms: Terms) -> Manifest:
    """The manifest of a run without keys."""
    return Manifest(
        protocol=2,
        run="run",
        fingerprint="",
        parameters=(),
        masters=(),
        terms=terms,
        test_vector="",
        created_by="a",
        nonce="0" * 32,
    )


def pulse_of(store, roster) -> Pulse:
    return Pulse(store, "a", claim_incarnation(store, "a", roster), roster)


def beat(pulse: Pulse, state: SiteState = "live", pins=(0,)) -> None:
    pulse.beat(state, (0,), pins, 0, 0)


def test_incarnations_of_a_name_count_up_and_no_two_processes_get_the_same(store, roster):
    assert newest_incarnation(store, "a", roster) == -1
    assert [claim_incarnation(store, "a", roster) for _ in range(3)] == [0, 1, 2]
    assert claim_incarnation(store, "a-b", roster) == 0


def test_a_site_is_live_until_its_beat_has_not_changed_for_liveness_s(store, roster, runtime):
    members, pulse = Members(store, runtime, roster, liveness_s=10), pulse_of(store, roster)
    beat(pulse)
    members.observe()
    assert members.live(now=10.0) == {"a"}
    runtime.advance(10.5)
    members.observe()
    assert members.live(now=10.5) == frozenset()
    beat(pulse)
    runtime.advance(0.5)
    members.observe()
    assert members.live(now=12.0) == {"a"}


@pytest.mark.parametrize("state", ["joining", "done", "leaving"])
def test_sites_that_join_finish_or_leave_are_not_waited_for(store, roster, runtime, state):
    members = Members(store, runtime, roster, liveness_s=10)
    beat(pulse_of(store, roster), state)
    members.observe()
    assert members.live(now=0.0) == frozenset() and set(members.beats()) == {"a"}


@pytest.mark.parametrize(("state", "pins"), [("live", [(7,)]), ("joining", [(7,)]), ("done", []), ("leaving", [])])
def test_what_a_site_that_is_there_may_need_is_pinned_until_it_is_silent(store, roster, runtime, state, pins):
    members = Members(store, runtime, roster, liveness_s=10)
    beat(pulse_of(store, roster), state, pins=(7,))
    members.observe()
    assert members.pins(now=10.0) == pins and members.pins(now=10.1) == []


def test_only_the_newest_incarnation_of_a_name_counts(store, roster, runtime):
    members = Members(store, runtime, roster, liveness_s=10)
    beat(pulse_of(store, roster))
    members.observe()
    claim_incarnation(store, "a", roster)  # started again, not beating yet
    members.observe()
    assert members.live(now=1.0) == frozenset()


def test_the_older_process_of_a_name_stops_at_its_next_beat(store, roster):
    pulse = pulse_of(store, roster)
    beat(pulse)
    claim_incarnation(store, "a", roster)
    with pytest.raises(Superseded, match="site a was started again as incarnation 1"):
        beat(pulse)


def test_a_torn_beat_is_no_sign_of_life_and_no_error(store, roster, runtime):
    members, pulse = Members(store, runtime, roster, liveness_s=10), pulse_of(store, roster)
    beat(pulse)
    members.observe()
    store.put(keys.beat("a", 0), b'{"site": "a"')
    runtime.advance(11)
    members.observe()
    assert members.live(now=11.0) == frozenset()


class Waiting(threading.Condition):
    """Time passes by waiting, and with it another process beats."""

    def __init__(self, runtime: "BeatingRuntime") -> None:
        super().__init__()
        self._runtime = runtime

    def wait(self, timeout: float | None = None) -> bool:
        self._runtime.advance(timeout or 0.0)
        self._runtime.others_beat()
        return False


class BeatingRuntime(HandRuntime):
    """A runtime whose waits let `others_beat`."""

    def __init__(self, others_beat: Callable[[], None]) -> None:
        super().__init__()
        self.others_beat = others_beat

    def condition(self) -> threading.Condition:
        return Waiting(self)


def test_a_second_process_of_a_live_name_is_refused_when_it_may_not_replace(store, roster):
    pulse = pulse_of(store, roster)
    for _ in ("claimed, and not beaten yet", "beating"):
        with pytest.raises(ConfigError, match="already runs as incarnation 0"):
            check_name_is_free(store, BeatingRuntime(lambda: beat(pulse)), "a", roster, 10.0)
    check_name_is_free(store, BeatingRuntime(lambda: None), "a", roster, 10.0)  # it has fallen silent
    check_name_is_free(store, BeatingRuntime(lambda: None), "b", roster, 10.0)  # never seen
    beat(pulse, "leaving")
    check_name_is_free(store, BeatingRuntime(lambda: beat(pulse, "leaving")), "a", roster, 10.0)


def test_of_two_processes_that_start_at_once_and_may_not_replace_the_second_to_claim_is_refused(store, roster, runtime):
    judged = [check_name_is_free(store, runtime, "a", roster, 10.0) for _ in range(2)]
    first = claim_incarnation(store, "a", roster, judged[0])
    with pytest.raises(ConfigError, match="site a already runs as incarnation 0"):
        claim_incarnation(store, "a", roster, judged[1])
    Pulse(store, "a", first, roster).check()  # it isn't superseded


def test_a_claim_whose_process_never_beat_keeps_nobody_from_the_name(store, roster):
    claim_incarnation(store, "a", roster)
    judged = check_name_is_free(store, BeatingRuntime(lambda: None), "a", roster, 10.0)
    assert claim_incarnation(store, "a", roster, judged) == 1


def test_a_beat_of_endless_numbers_is_no_sign_of_life_and_is_not_remembered(store, roster, runtime):
    members, pulse = Members(store, runtime, roster, liveness_s=10), pulse_of(store, roster)
    beat(pulse)
    members.observe()
    beat(pulse, pins=(1,) * MAX_BEAT_BYTES)
    runtime.advance(10.5)
    members.observe()
    assert members.live(now=10.5) == frozenset() and members.beats()["a"].pins == (0,)
    pulse.beat("live", (10**8,) * 10**4, (10**8,) * 10**4, 2**53, 2**53)
    members.observe()
    assert members.live(now=10.5) == {"a"}, "of ten thousand fragments it isn't too long"
