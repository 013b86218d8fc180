"""Where a run ends: no member's word, put before its time or after the end, moves who starts again."""

from functools import partial

from composer_prime.store import keys
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Close
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import HandSite, empty_commit, make_terms
from tests.sync.test_owner import SITES, founding


def play(clock: list[float], *sites: HandSite) -> None:
    """One round."""
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


def test_a_commit_that_a_member_puts_after_the_end_moves_nobody(store):
    clock, terms = [0.0], make_terms(fragments=1, grace_s=1.0)
    site = partial(HandSite, store, terms, clock=clock, founding=founding(*"abc"))
    a, b, c = (site(name, key=SITES[name]) for name in "abc")
    for _ in range(terms.final_version):
        play(clock, a, b)
    close = read_record(store, Close, keys.close())
    assert close.versions == (4,)
    c.courier.follow()
    known = {"base_sha": "ab" * 32, "previous": c.replicas[0].previous, "committer": "c"}
    assert store.create(keys.commit(0, 4), c.roster.sign(empty_commit(version=4, voids=(3,), **known)).to_bytes())
    back = site("a", key=SITES["a"])
    assert back.courier.master(0).sha256 == close.masters[0] and back.replicas[0].history.voids == ()
    verifier = Verifier(store)
    assert verifier.check(0).last == 4
    verifier.close()


def test_a_close_record_that_a_member_puts_early_tells_no_site_that_starts_again_anything(store):
    clock, terms = [0.0], make_terms(fragments=1, rounds=9, snapshot_rounds=2, grace_s=1.0)
    site = partial(HandSite, store, terms, clock=clock, founding=founding(*"abc"))
    a, c = (site(name, key=SITES[name]) for name in "ac")
    for _ in range(5):
        play(clock, a, c)
    for version in (4, 10):
        early = Close(versions=(version,), masters=("ab" * 32,), voids=((version - 1,),), closed_by="c")
        store.put(keys.close(), c.roster.sign(early).to_bytes())
        back = site("a", key=SITES["a"])
        assert back.replicas[0].history.voids == a.replicas[0].history.voids == ()
        assert back.courier.master(0).sha256 == a.courier.master(0).sha256
