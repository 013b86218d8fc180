"""Where a run ended, and goes on: no member's word, put before its time or after the end, moves who starts again."""

from functools import partial

from composer_prime.store import keys
from composer_prime.sync.owner import Owner
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import HandSite, ThreadSite, empty_commit, make_terms, run_sites
from tests.sync.test_owner import OWNER, SITES, founding, make_site


def test_a_commit_that_a_member_puts_after_the_end_is_judged_by_what_the_run_ended_with(store):
    """Before the run is reopened, and so before anybody could call it void: its list of void rounds is false."""
    clock, terms = [0.0], make_terms(fragments=1, grace_s=1.0)
    site = partial(HandSite, store, terms, clock=clock, founding=founding(*"abc"))

    def play(*sites: HandSite) -> None:
        version = sites[0].replicas[0].version
        for each in sites:
            each.courier.collect(0)
            each.hand_over(0, 1.0)
        while any(each.replicas[0].version == version for each in sites):
            for each in sites:
                each.beat()
                each.tick()
            clock[0] += 0.5
        for each in sites:
            each.tick()
            each.runtime.run_tasks()

    a, b, c = (site(name, key=SITES[name]) for name in "abc")
    for _ in range(terms.final_version):
        play(a, b)
    assert read_record(store, Close, keys.close(0)).versions == (4,)
    c.courier.follow()
    known = {"base_sha": c.replicas[0].master.sha256, "previous": c.replicas[0].previous, "committer": "c"}
    false = empty_commit(version=4, voids=(3,), **known)
    assert store.create(keys.commit(0, 4), c.roster.sign(false).to_bytes())
    Owner(store, OWNER).reopen(20)
    a, b = (site(name, key=SITES[name]) for name in "ab")
    play(a, b)
    assert a.replicas[0].history.voids == b.replicas[0].history.voids == (4,)
    verifier = Verifier(store)
    assert verifier.check(0).num_void == 1
    verifier.close()


def test_verify_goes_by_what_the_log_has_where_the_record_of_a_reopening_is_damaged(store):
    for number, rounds in enumerate((3, 6, 9)):
        if number:
            Owner(store).reopen(rounds)
        run_sites(ThreadSite(store, make_terms(), "a"))
    store.put(keys.reopening(1), b"damaged")
    verifier = Verifier(store)
    assert verifier.check(0).num_rounds == 10
    verifier.close()


def test_a_close_record_that_a_member_puts_early_tells_no_site_that_starts_again_anything(store):
    """It would call all rounds since void: for this site, and for those that read it on rebuilding a master."""
    run_sites(*(make_site(store, name, "abc") for name in "ab"))
    Owner(store, OWNER).reopen(9)
    clock, terms = [0.0], make_terms(rounds=3, liveness_s=0.5, grace_s=5.0)
    sites = [HandSite(store, terms, name, clock, key=SITES[name], founding=founding(*"abc")) for name in "ac"]
    for number in range(3):
        for site in sites:
            site.hand_over(0, 1.0 + number)
            site.hand_over(1, 1.0 + number)
        while any(site.courier.versions() != (5 + number,) * 2 for site in sites):
            for site in sites:
                site.beat()
                site.tick()
            clock[0] += 0.2
        for site in sites:
            site.courier.collect(0)
            site.courier.collect(1)
    a, c = sites
    version = max(keys.parse_master(key)[1] for key in store.list(keys.masters_prefix(0)))
    assert 4 < version < a.courier.versions()[0]
    known = {"masters": ("ab" * 32,) * 2, "voids": ((version - 1,), ()), "floors": (1000, 1000), "closed_by": "c"}
    early = Close(number=1, versions=(version, version), **known)
    assert store.create(keys.close(1), c.roster.sign(early).to_bytes())
    back = HandSite(store, terms, "a", clock, key=SITES["a"], founding=founding(*"abc"))
    history = back.replicas[0].history
    assert (history.voids, history.floor) == (a.replicas[0].history.voids, 0)
    assert back.courier.master(0).sha256 == a.courier.master(0).sha256
