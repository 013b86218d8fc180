"""Liveness as one observer sees it (rule 6), claims and incarnations."""

import pytest

from composer_prime.errors import Superseded
from composer_prime.store import keys, open_store
from composer_prime.sync.members import Members, Pulse, claim_incarnation, newest_incarnation


@pytest.fixture
def store(request):
    return open_store(f"memory://{request.node.name}")


def test_incarnations_of_a_name_count_up_and_no_two_processes_get_the_same(store):
    assert newest_incarnation(store, "a") == -1
    assert [claim_incarnation(store, "a") for _ in range(3)] == [0, 1, 2]
    assert claim_incarnation(store, "a-b") == 0


def test_a_site_is_live_until_its_beat_has_not_changed_for_liveness_s(store):
    members, pulse = Members(store, liveness_s=10), Pulse(store, "a", claim_incarnation(store, "a"))
    pulse.beat("live", (0,), 0, 0)
    members.observe(now=100.0)
    assert members.live(now=110.0) == {"a"}
    members.observe(now=110.5)
    assert members.live(now=110.5) == frozenset()
    pulse.beat("live", (0,), 0, 0)
    members.observe(now=111.0)
    assert members.live(now=112.0) == {"a"}


@pytest.mark.parametrize("state", ["joining", "done", "leaving"])
def test_sites_that_join_finish_or_leave_are_not_waited_for(store, state):
    members, pulse = Members(store, liveness_s=10), Pulse(store, "a", claim_incarnation(store, "a"))
    pulse.beat(state, (0,), 0, 0)
    members.observe(now=0.0)
    assert members.live(now=0.0) == frozenset() and set(members.beats()) == {"a"}


def test_only_the_newest_incarnation_of_a_name_counts(store):
    members = Members(store, liveness_s=10)
    Pulse(store, "a", claim_incarnation(store, "a")).beat("live", (0,), 0, 0)
    members.observe(now=0.0)
    claim_incarnation(store, "a")  # started again, not beating yet
    members.observe(now=1.0)
    assert members.live(now=1.0) == frozenset()


def test_the_older_process_of_a_name_stops_at_its_next_beat(store):
    pulse = Pulse(store, "a", claim_incarnation(store, "a"))
    pulse.beat("live", (0,), 0, 0)
    claim_incarnation(store, "a")
    with pytest.raises(Superseded, match="site a was started again as incarnation 1"):
        pulse.beat("live", (0,), 0, 0)


def test_a_torn_beat_is_no_sign_of_life_and_no_error(store):
    members, pulse = Members(store, liveness_s=10), Pulse(store, "a", claim_incarnation(store, "a"))
    pulse.beat("live", (0,), 0, 0)
    members.observe(now=0.0)
    store.put(keys.beat("a", 0), b'{"site": "a"')
    members.observe(now=11.0)
    assert members.live(now=11.0) == frozenset()
