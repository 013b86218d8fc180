"""Rule 14 over time: who was revoked and can still write to the bucket brings nothing of its own into a master."""

import random
import threading

import pytest
import torch

from composer_prime.errors import CorruptObject
from composer_prime.outer.masters import pack_master
from composer_prime.store import Store, keys
from composer_prime.sync.admitted import AdmittedBy
from composer_prime.sync.canonical import sha256_hex
from composer_prime.sync.garbage import collect_garbage
from composer_prime.sync.history import History
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Admission, Claim, Close, Commit
from composer_prime.sync.snapshots import Master, newest_master, store_master, vouched_sha
from tests.patience import PATIENCE_S
from tests.sync.harness import KEYS, OWNER, HandSite, admitting, closing, commit_of, empty_commit, make_terms

TERMS = make_terms(rounds=40, max_stale_rounds=3, grace_s=1.0)


@pytest.fixture
def site(store, clock):
    """-> a live site by name, of a run that admits a and b and has an owner."""

    def make(name: str) -> HandSite:
        founding = admitting("ab", OWNER)
        return HandSite(store, TERMS, name, clock, key=KEYS[name], founding=founding)

    return make


def play(clock: list[float], *sites: HandSite, rounds: int = 1) -> None:
    """Rounds of fragment 0 in which all of these sites offer."""
    for _ in range(rounds):
        before = sites[0].replicas[0].version
        for each in sites:
            each.hand_over(0, 1.0)
        while any(each.replicas[0].version == before for each in sites):
            for each in sites:
                each.beat()
                each.tick()
            clock[0] += 0.5
        for each in sites:
            each.courier.collect(0)


def void_commit(author: HandSite, version: int, **fields) -> Commit:
    """A commit that takes nothing and follows from what `author` knows, signed by it."""
    replica = author.replicas[0]
    known = {"base_sha": replica.master.sha256, "previous": replica.previous, "voids": replica.history.voids}
    record = empty_commit(**({"version": version, "committer": author.name} | known | fields))
    return author.roster.sign(record)


def put_commit(store: Store, record: Commit) -> str:
    """-> the sha256 of its bytes."""
    assert store.create(keys.commit(0, record.version), record.to_bytes())
    return sha256_hex(record.to_bytes())


def test_a_revoked_site_brings_its_old_admission_back_by_no_number_of_void_rounds(store, clock, site):
    a, b = site("a"), site("b")
    Owner(store, OWNER).revoke("b")
    play(clock, a)  # honours the revocation
    assert commit_of(store).admissions == 1
    for version in range(1, 1 + TERMS.max_stale_rounds):
        store.create(keys.commit(0, version), b"garbage")
    for reader in (a, b):
        reader.courier.follow()
    # Sound in all but the admission that it honours, the one before the revocation.
    put_commit(store, void_commit(b, a.replicas[0].version))
    (closed,) = a.replicas[0].advance()
    assert closed.fault == "honours admission 0, an earlier commit 1"


def test_who_joins_knows_the_revocation_too(store, clock, site):
    a, b = site("a"), site("b")
    Owner(store, OWNER).revoke("b")
    play(clock, a, rounds=2)
    store_master(store, a.replicas[0].master)
    play(clock, a)
    joined = site("a").replicas[0]
    assert joined.version == 3 and joined.history.floor == 1
    b.courier.follow()
    put_commit(store, void_commit(b, 3))
    assert [closed.fault for closed in joined.advance()] == ["honours admission 0, an earlier commit 1"]


def test_a_window_of_past_rounds_knows_the_newest_admission_that_any_of_its_commits_named(store, clock, site):
    a, b = site("a"), site("b")
    Owner(store, OWNER).revoke("b")
    play(clock, a)
    for reader in (a, b):
        reader.courier.follow()
    put_commit(store, void_commit(b, 1))
    window = History.read(store, a.runtime, TERMS, a.roster, 0, 2)
    assert window.floor == 1


def test_a_commit_that_names_an_admission_before_the_owner_wrote_it_stays_void_afterwards(store, clock, site):
    a = site("a")
    put_commit(store, void_commit(a, 0, admissions=1))
    (closed,) = a.replicas[0].advance()
    assert closed.fault == "honours admission 1, which isn't there"
    Owner(store, OWNER).admit("c", KEYS["c"].public)
    late = site("b").replicas[0]
    assert (late.version, late.history.voids) == (1, (0,))


def far_ahead(site: HandSite, version: int) -> Master:
    """A stored master of the site's own making."""
    master = Master(0, version, torch.full((site.run.fragments[0].numel,), 66.0), None)
    site.store.put(keys.master(0, version, master.sha256), pack_master(master.weights, None))
    return master


@pytest.mark.parametrize("by", ["a commit", "a close record"])
def test_a_snapshot_that_only_a_revoked_site_vouches_for_is_passed_over(store, clock, site, by):
    a, b = site("a"), site("b")
    end = TERMS.final_version  # of a close record there is no other version
    poisoned = far_ahead(b, 30 if by == "a commit" else end)
    if by == "a commit":
        put_commit(store, void_commit(b, 30, base_sha=poisoned.sha256))
    else:
        close = Close(versions=(end, end), masters=(poisoned.sha256,) * 2, voids=((), ()), closed_by="b")
        signed = close.model_copy(update={"signature": KEYS["b"].sign(close.message(b.run.sha256))})
        store.create(keys.close(), signed.to_bytes())
    newest = newest_master(store, a.run, a.roster, 0)
    assert newest is not None and newest.version == poisoned.version  # a member can still do that: docs/security.md
    Owner(store, OWNER).revoke("b")
    play(clock, a)
    a.roster.refresh()
    newest = newest_master(store, a.run, a.roster, 0)
    assert newest is not None and newest.version == 0


def test_a_snapshot_that_a_revoked_site_vouched_for_counts_as_far_as_members_went_on_from_it(store, clock, site):
    a, b = site("a"), site("b")
    play(clock, b)
    first = store_master(store, b.replicas[0].master)
    a.courier.follow()
    play(clock, b)  # commit 1, by b, stands on that master
    a.courier.follow()
    Owner(store, OWNER).revoke("b")
    a.roster.refresh()
    assert commit_of(store, 1).committer == "b"
    assert vouched_sha(store, a.run, a.roster, 0, 1) is None
    play(clock, a)
    assert str(vouched_sha(store, a.run, a.roster, 0, 1)).startswith(keys.parse_master(first)[2])


def test_a_record_of_the_owner_is_counted_once_by_however_many_threads_read_it_at_once(store, clock, site):
    a = site("a")
    Owner(store, OWNER).admit("c", KEYS["c"].public)
    gate = threading.Barrier(8)
    read = a.roster._read

    def read_together(number: int):
        found = read(number)
        if number == 1:
            gate.wait(PATIENCE_S)
        return found

    a.roster._read = read_together
    threads = [threading.Thread(target=a.roster.refresh) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert a.roster.newest == 1 and a.roster.honoured[0] == 1
    a.roster._read = read
    Owner(store, OWNER).revoke("c")
    assert a.roster.refresh() == 2 and "c" not in a.roster.admitted()


def test_a_window_goes_by_no_commit_that_was_copied_there_from_another_round(store, clock, site):
    a = site("a")
    play(clock, a)
    store.create(keys.commit(0, 1), b"garbage")
    store.create(keys.commit(0, 2), store.get(keys.commit(0, 0)))  # it knows of no void round
    with pytest.raises(CorruptObject, match="has no sound commit of round 1"):
        History.read(store, a.runtime, TERMS, a.roster, 0, 2)


def test_a_site_whose_claim_is_read_before_its_admission_is_seen_as_soon_as_that_is_known(store, clock, site):
    a = site("a")
    Owner(store, OWNER).admit("c", KEYS["c"].public)
    site("c")
    a.courier._members.notice_newcomers()  # before a commit; a has not looked at the admissions yet
    clock[0] += TERMS.liveness_s
    site("b")
    a.tick()
    assert a.roster.newest == 1 and "c" in a.courier._members.live(clock[0])


def test_a_claim_under_a_key_that_was_replaced_hides_its_site_from_nobody(store, clock, site):
    a, stolen = site("a"), site("b")
    far = stolen.roster.sign(Claim(site="b", incarnation=9, nonce="", host="", pid=0))
    store.create(keys.claim("b", 9), far.to_bytes())
    a.courier._members.observe()
    Owner(store, OWNER).admit("b", KEYS["c"].public)
    founding = admitting("ab", OWNER)
    HandSite(store, TERMS, "b", clock, key=KEYS["c"], founding=founding)
    clock[0] += TERMS.liveness_s
    site("a")
    a.tick()
    assert "b" in a.courier._members.live(clock[0])


def test_what_a_newly_admitted_joiner_pins_is_kept_by_who_did_not_know_of_its_admission(store, clock):
    terms = TERMS.model_copy(update={"keep_log": False, "snapshot_rounds": 2, "quorum": 1})
    founding = admitting("ab", OWNER)
    a = HandSite(store, terms, "a", clock, key=KEYS["a"], founding=founding)
    play(clock, a, rounds=5)
    Owner(store, OWNER).admit("c", KEYS["c"].public)
    c = HandSite(store, terms, "c", clock, key=KEYS["c"], founding=founding)
    c.pulse.beat("joining", (0, 0), (0, 0), 0, 0)  # it was slow, and hasn't looked for a snapshot yet
    before = store.list(keys.offers_prefix(0, 0))
    collect_garbage(store, a.run, 0, roster=a.roster, members=a.courier._members, runtime=a.runtime)
    assert before and store.list(keys.offers_prefix(0, 0)) == before


def test_a_commit_honours_the_admission_by_which_its_offers_were_judged(store, clock, site):
    a, b = site("a"), site("b")
    for each, value in ((a, 1.0), (b, 2.0)):
        each.hand_over(0, value)
        each.tick()
    Owner(store, OWNER).revoke("b")

    def meanwhile_another_thread_reads_admissions(theirs):
        a.roster.refresh()

    a.replicas[0].check_agrees = meanwhile_another_thread_reads_admissions
    closing(clock, a, passes=6)
    assert a.replicas[0].history.voids == ()
    commit = commit_of(store)
    assert commit.admissions == 1 and [entry.site for entry in commit.taken] == ["a"]


# --- what is remembered of the admissions, against the records themselves --------------------------------------------


FIRST = Admission(number=1, keys={"a": "k0"})


def later_records(seed: int, count: int) -> list[Admission | None]:
    """Admissions in a row, each a change of the one before; None: one that isn't the owner's."""
    draw = random.Random(seed)
    keys: dict[str, str] = dict(FIRST.keys)
    guests: set[str] = set()
    found: list[Admission | None] = []
    for number in range(1, count):
        if draw.random() < 0.2:
            found.append(None)
            continue
        site = draw.choice("abcdef")
        keys = {name: key for name, key in keys.items() if name != site}
        if draw.random() < 0.7:
            keys[site] = f"k{draw.randrange(5)}"
        guests = guests ^ {draw.choice("abcdefg")}
        found.append(Admission(number=number, keys=keys, guests=tuple(sorted(guests))))
    return found


def test_every_admission_is_remembered_as_it_was():
    for seed in range(50):
        by, whole = AdmittedBy(FIRST), [FIRST]
        for record in later_records(seed, 30):
            by.add(record)
            whole.append(record or whole[-1])
        assert (by.newest, by.keys) == (29, whole[-1].keys), f"seed={seed}"
        for number, record in enumerate(whole):
            assert by.guests(number) == frozenset(record.guests), f"seed={seed}"
            assert {site: key for site in "abcdefg" if (key := by.key_of(site, number))} == record.keys
        for site in "abcdefgh":
            last = [number for number, record in enumerate(whole) if site in record.keys]
            assert by.last_of(site) == (last[-1] if last else None), f"seed={seed}"
        for public in ("k0", "k1", "k4", "k9"):
            held = [site for record in reversed(whole) for site, key in sorted(record.keys.items()) if key == public]
            assert by.held_by(public) == (held[0] if held else None), f"seed={seed}"
