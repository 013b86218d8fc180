"""The owner's acts: sites come and go by their keys, and nobody else can do it."""

import threading

import pytest

from composer_prime.errors import BadInput, ConfigError, SiteRevoked
from composer_prime.store import Store, keys
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Admission, Close, Commit, Offer
from composer_prime.sync.start import Founding
from tests.patience import PATIENCE_S
from tests.sync.harness import KEYS, OWNER, HandSite, ThreadSite, admitting, commit_of, make_terms, run_sites


def founding(*names: str) -> Founding:
    return admitting("".join(names), OWNER)


def make_site(store: Store, name: str, admitted: str, **options) -> ThreadSite:
    terms = make_terms(**{"rounds": 3, "liveness_s": 0.5, "grace_s": 5.0} | options.pop("terms", {}))
    return ThreadSite(store, terms, name, data_seed=ord(name), key=KEYS[name], founding=founding(*admitted), **options)


def read_close(store: Store) -> Close:
    return Close.from_bytes(store.get(keys.close()), keys.close())


def wait_for(site: ThreadSite, reached) -> None:
    """Until `reached()`; fails when the site stops before."""
    while not reached():
        site.join(0.01)
        assert site.is_alive(), site.error


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_corrupt_close_record_stops_nobody_and_is_written_anew_once_it_is_deleted(store):
    corrupted = ThreadSite(store, make_terms(), "a")
    corrupted.after_join = lambda: store.create(keys.close(), b'{"number": 0, "vers')
    run_sites(corrupted)
    late = ThreadSite(store, make_terms(), "b")
    run_sites(late)
    assert late.steps == 0 and late.summary["masters"] == corrupted.summary["masters"]
    store.delete(keys.close())
    run_sites(ThreadSite(store, make_terms(), "b"))
    assert [master["sha256"] for master in late.summary["masters"]] == list(read_close(store).masters)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_site_admitted_midway_joins_and_the_running_site_honours_it(store):
    running = make_site(store, "a", "a", terms={"rounds": 40})
    running.after_join = lambda: (early.wait(PATIENCE_S), None)[1]
    early = threading.Event()
    running.start()
    while not store.list(keys.manifest()):
        running.join(0.01)
    stranger = make_site(store, "b", "a", terms={"rounds": 40})
    stranger.start()
    stranger.join(PATIENCE_S)
    assert isinstance(stranger.error, ConfigError) and "ask the run's owner to admit that key" in str(stranger.error)
    record = Owner(store, OWNER).admit("b", KEYS["b"].public)
    assert record.number == 1 and sorted(record.keys) == ["a", "b"]
    admitted = make_site(store, "b", "a", terms={"rounds": 40})
    admitted.after_join = early.set
    admitted.start()
    for site in (running, admitted):
        site.join(PATIENCE_S)
        assert not site.is_alive() and site.error is None
    assert running.summary["masters"] == admitted.summary["masters"]
    assert sum(ledger["merged"] for ledger in admitted.summary["tokens"]) > 0
    commits = [commit_of(store, version) for version in range(41)]
    assert any(entry.site == "b" for commit in commits for entry in commit.taken)
    assert commits[-1].admissions == 1


def test_a_revoked_sites_offer_is_refused_by_those_who_know(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=3)
    a, b = (HandSite(store, terms, name, clock, key=KEYS[name], founding=founding("a", "b")) for name in "ab")
    Owner(store, OWNER).revoke("b")
    b.hand_over(0, 2.0)
    b.runtime.run_tasks()
    with pytest.raises(SiteRevoked, match="revoked site b"):
        b.tick()
    b.courier._bring(0)  # one that doesn't stop
    assert store.list(keys.offers_prefix(0, 0)) == [keys.offer(0, 0, "b")]
    a.hand_over(0, 1.0)
    for _ in range(4):
        clock[0] += terms.liveness_s
        a.beat()
        a.tick()
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a"] and commit.admissions == 1
    assert [(entry.site, entry.why) for entry in commit.refused] == [("b", "b has no admitted key")]


def test_a_new_key_of_an_admitted_name_replaces_the_old_one(store):
    HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"], founding=founding("a"))
    owner = Owner(store, OWNER)
    with pytest.raises(BadInput, match="admitted with that key already"):
        owner.admit("a", KEYS["a"].public)
    assert owner.admit("a", KEYS["c"].public).keys == {"a": KEYS["c"].public}
    with pytest.raises(ConfigError, match="site a is admitted with"):
        HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"]).roster.check_admitted("a")


def test_what_makes_no_sense_is_refused_with_the_reason(store):
    HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"], founding=founding("a"))
    owner = Owner(store, OWNER)
    with pytest.raises(BadInput, match="site z is not admitted; those that are: a"):
        owner.revoke("z")
    with pytest.raises(ConfigError, match="lower-case letters"):
        owner.admit("Z", KEYS["b"].public)
    with pytest.raises(ConfigError, match="public key"):
        owner.admit("b", "ed25519:nonsense")


def test_a_run_without_an_owner_admits_nobody_by_record(store):
    HandSite(store, make_terms(), "a", [0.0])
    with pytest.raises(BadInput, match=r"asks for no keys and no owner.*outer\.owner"):
        Owner(store).admit("b", KEYS["b"].public)
    with pytest.raises(BadInput, match="leave --key out"):
        Owner(store, OWNER)


def test_a_number_that_someone_else_took_meanwhile_is_told_and_stays(store):
    HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"], founding=founding("a"))
    late = Owner(store, OWNER)
    Owner(store, OWNER).admit("b", KEYS["b"].public)
    with pytest.raises(BadInput, match=r"admissions/0001\.json was written by someone else"):
        late.admit("c", KEYS["c"].public)
    assert sorted(Admission.from_bytes(store.get(keys.admission(1)), "admission").keys) == ["a", "b"]


def test_a_corrupt_admission_record_changes_no_key_for_anybody_and_the_next_one_counts(store, caplog):
    clock, terms = [0.0], make_terms(fragments=1, rounds=5)
    a, b = (HandSite(store, terms, name, clock, key=KEYS[name], founding=founding("a", "b")) for name in "ab")

    def round_of_both() -> Commit:
        version = a.courier.versions()[0]
        clock[0] += terms.liveness_s / 2  # so that both look at the roster
        for site in (a, b):
            site.beat()
            site.hand_over(0, 1.0 + (site is b))
            site.tick()
        for site in (a, b, a):
            clock[0] += 1.0
            site.tick()
        for site in (a, b):
            site.courier.collect(0)
        return commit_of(store, version)

    store.create(keys.admission(1), b'{"keys": {')
    commit = round_of_both()
    assert commit.admissions == 0 and [entry.site for entry in commit.taken] == ["a", "b"]
    assert "admission_void number=1 fault=admissions/0001.json is no Admission" in caplog.text
    Owner(store, OWNER).revoke("b")
    with pytest.raises(SiteRevoked):
        round_of_both()
    joined = HandSite(store, terms, "a", clock, key=KEYS["a"])
    assert joined.courier.master(0).sha256 == a.courier.master(0).sha256 and joined.roster.newest == 2


# --- guests ----------------------------------------------------------------------------------------------------------


def test_a_guest_offers_and_only_hosts_commit_and_close(store):
    make = {"rounds": 6}
    host = make_site(store, "b", "b", terms=make)
    joined = threading.Barrier(2)
    host.after_join = lambda: joined.wait(PATIENCE_S)
    host.start()
    wait_for(host, lambda: store.list(keys.manifest()))
    record = Owner(store, OWNER).admit("a", KEYS["a"].public, guest=True)
    assert record.guests == ("a",)
    guest = make_site(store, "a", "b", terms=make)
    guest.after_join = lambda: joined.wait(PATIENCE_S)
    guest.start()
    for site in (host, guest):
        site.join(PATIENCE_S)
        assert not site.is_alive() and site.error is None
    assert host.summary["masters"] == guest.summary["masters"]
    assert sum(ledger["merged"] for ledger in guest.summary["tokens"]) > 0
    commits = [commit_of(store, v, f) for f in range(2) for v in range(7)]
    assert {commit.committer for commit in commits} == {"b"} and read_close(store).closed_by == "b"


def test_a_round_waits_while_only_guests_are_there(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=3, liveness_s=10.0, grace_s=1.0)
    host, guest = (HandSite(store, terms, n, clock, key=KEYS[n], founding=founding("a", "b")) for n in "ab")
    Owner(store, OWNER).admit("b", KEYS["c"].public, guest=True)
    Owner(store, OWNER).admit("b", KEYS["b"].public, guest=True)
    guest.hand_over(0, 1.0)
    for _ in range(8):
        clock[0] += terms.liveness_s
        guest.beat()
        guest.tick()
    assert not store.list(keys.commit(0, 0))
    host.beat()
    host.hand_over(0, 2.0)
    for _ in range(4):
        clock[0] += 2.0
        host.beat()
        guest.beat()
        host.tick()
    commit = commit_of(store)
    assert commit.committer == "a" and [entry.site for entry in commit.taken] == ["a", "b"]
    ours, theirs = commit.taken
    assert theirs.multiplier * theirs.offer.norm <= ours.offer.norm / 3 * (1 + 1e-6)


def test_no_site_doubts_its_master_because_of_the_base_that_a_guest_names(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=3, liveness_s=10.0, grace_s=1.0)
    host = HandSite(store, terms, "a", clock, key=KEYS["a"], founding=founding("a"))
    Owner(store, OWNER).admit("b", KEYS["b"].public, guest=True)
    guest = HandSite(store, terms, "b", clock, key=KEYS["b"], founding=founding("a"))
    said = {"site": "b", "incarnation": 0, "fragment": 0, "version": 0, "base_sha": "f" * 64, "codec": terms.codec}
    nothing = {"tokens": 0, "steps": 0, "trained_tokens": 0, "nbytes": 0, "payload": None, "sha256": None}
    store.create(keys.offer(0, 0, "b"), guest.roster.sign(Offer(**said, **nothing)).to_bytes())
    host.hand_over(0, 2.0)
    for _ in range(4):
        clock[0] += 2.0
        host.beat()
        host.tick()
    commit = commit_of(store)
    assert [entry.site for entry in commit.taken] == ["a"]


def test_a_round_that_only_guests_have_something_for_takes_nothing(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=3, liveness_s=10.0, grace_s=1.0)
    host, guest = (HandSite(store, terms, n, clock, key=KEYS[n], founding=founding("a", "b")) for n in "ab")
    Owner(store, OWNER).admit("b", KEYS["b"].public, guest=True)
    guest.hand_over(0, 1000.0)
    host.hand_over(0, 0.0, tokens=0)  # the word that there is nothing
    for _ in range(6):
        clock[0] += 1.0
        for site in (host, guest):
            site.beat()
            site.tick()
    assert store.list(keys.offers_prefix(0, 0)) == [keys.offer(0, 0, "a"), keys.offer(0, 0, "b")]
    commit = commit_of(store)
    assert commit.taken == () and guest.replicas[0].version == 1


def test_guests_stay_guests_through_other_acts_until_they_are_admitted_otherwise(store):
    HandSite(store, make_terms(), "a", [0.0], key=KEYS["a"], founding=founding("a"))
    owner = Owner(store, OWNER)
    owner.admit("b", KEYS["b"].public, guest=True)
    assert Owner(store, OWNER).admit("c", KEYS["c"].public, guest=True).guests == ("b", "c")
    assert Owner(store, OWNER).revoke("c").guests == ("b",)
    with pytest.raises(BadInput, match="admitted with that key already"):
        Owner(store, OWNER).admit("b", KEYS["b"].public, guest=True)
    assert Owner(store, OWNER).admit("b", KEYS["b"].public).guests == ()


def test_a_revoked_site_that_learns_of_it_from_a_commit_stops_all_the_same(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=5)
    a, b = (HandSite(store, terms, name, clock, key=KEYS[name], founding=founding("a", "b")) for name in "ab")
    b.tick()  # has just looked at the members
    Owner(store, OWNER).revoke("b")
    clock[0] += terms.liveness_s + 1
    a.beat()
    a.hand_over(0, 1.0)
    a.tick(2)
    assert commit_of(store).admissions == 1
    with pytest.raises(SiteRevoked, match="revoked site b"):
        b.tick()


def test_an_offer_judged_before_its_site_was_revoked_is_not_committed_after_it(store):
    clock, terms = [0.0], make_terms(fragments=2, rounds=5, grace_s=20.0)
    a, b, c = (HandSite(store, terms, n, clock, key=KEYS[n], founding=founding("a", "b", "c")) for n in "abc")
    for site in (a, b):
        site.hand_over(0, 1.0 + (site is b))
        site.tick()
    a.tick()  # has seen b's offer, and waits for c
    Owner(store, OWNER).revoke("b")
    c.hand_over(1, 1.0)
    for _ in range(3):  # c alone closes a round of the other fragment, honouring the revocation
        c.tick()
        clock[0] += terms.grace_s
        c.beat()
    assert commit_of(store, 0, fragment=1).admissions == 1
    for _ in range(4):
        a.beat()
        a.tick()
        clock[0] += terms.grace_s / 2
    commit = commit_of(store)
    assert commit.admissions == 1 and [entry.site for entry in commit.taken] == ["a"]
