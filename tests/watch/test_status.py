"""`look`: what a bucket tells of its run at any moment, and what it says of objects that are damaged."""

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest
from rich.console import Console

from composer_prime.errors import BadInput, CorruptObject
from composer_prime.store import Store, keys, open_store
from composer_prime.sync.canonical import canonical
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Close, Commit, Offer
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from composer_prime.sync.tape import Tape
from composer_prime.visible import size
from composer_prime.watch.records import RunStatus, SiteStatus
from composer_prime.watch.rounds import reason
from composer_prime.watch.status import look
from composer_prime.watch.tables import draw
from tests.sync.harness import HandSite, ThreadSite, make_terms, run_sites


@pytest.fixture
def store(request) -> Store:
    return open_store(f"memory://{request.node.name}")


def site_of(status: RunStatus, name: str) -> SiteStatus:
    return next(site for site in status.sites if site.site == name)


def drawn(status: RunStatus) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        draw(status, console)
    return captured.get()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_closed_runs_status_agrees_with_what_its_sites_counted(store_uri, kind):
    store = open_store(store_uri(kind))
    sites = [
        ThreadSite(store, make_terms(quorum=2, rounds=4), name, data_seed=place) for place, name in enumerate("ab")
    ]
    run_sites(*sites)
    status = look(store)
    assert (status.run, status.closed, status.rounds_done, status.rounds) == ("run", True, 4, 4)
    assert status.problems == () and not status.signed
    for site in sites:
        seen, ledgers = site_of(status, site.name), site.summary["tokens"]
        assert (seen.state, seen.incarnation, seen.incarnations, seen.inner_step) == ("done", 0, 1, site.steps)
        assert seen.versions == (5, 5) and seen.beating is None
        assert seen.trained_tokens == site.steps * 10 == seen.merged_tokens + seen.dropped_tokens
        assert seen.merged_tokens == round(sum(ledger["merged"] for ledger in ledgers) / 2)
    assert [fragment.version for fragment in status.by_fragment] == [5, 5]
    assert all(fragment.participation and fragment.participation > 0.7 for fragment in status.by_fragment)


def test_bytes_are_what_the_store_holds(store):
    sliced = {"gather_sites": 2, "codec": "fp32", "quorum": 4, "rounds": 2}
    run_sites(
        *(
            ThreadSite(store, make_terms(**sliced), name, data_seed=place, width=400)
            for place, name in enumerate("abcd")
        )
    )
    held = {key: len(store.get(key)) for key in store.list("")}
    parts = [held[key] for fragment in range(2) for key in merged_payloads(store, fragment)]
    status = look(store)
    assert status.bytes.payloads == sum(nbytes for key, nbytes in held.items() if keys.is_payload(key))
    assert status.bytes.masters == sum(nbytes for key, nbytes in held.items() if keys.is_master(key))
    assert status.bytes.merged == sum(parts) > 0


def merged_payloads(store: Store, fragment: int) -> list[str]:
    listed = [key for key in store.list(keys.rounds_prefix(fragment)) if keys.parse_collectable(key) is not None]
    return [key for key in listed if not keys.is_payload(key) and not keys.is_offer(key) and not key.endswith(".json")]


def test_a_run_without_any_site_has_a_status(store):
    HandSite(store, make_terms(), "a", [0.0])
    for key in store.list(keys.sites_prefix()):
        store.delete(key)
    status = look(store)
    assert status.sites == () and not status.closed and status.rounds_done == 0
    assert [fragment.participation for fragment in status.by_fragment] == [None, None]
    assert "no site has come yet" in drawn(status)


def test_a_run_in_the_middle_shows_offers_that_stand_and_work_that_is_carried(store):
    clock, terms = [0.0], make_terms(fragments=1)
    a, b = (HandSite(store, terms, name, clock) for name in "ab")
    a.hand_over(0, 1.0)
    a.tick()
    a.pulse.beat("live", (0,), (0,), 7, 25)
    status = look(store)
    assert status.by_fragment[0].open_offers == 1 and status.by_fragment[0].version == 0
    seen = site_of(status, "a")
    assert (seen.state, seen.inner_step, seen.trained_tokens, seen.carried_tokens) == ("live", 7, 25, 25)
    assert not seen.contributing and status.bytes.payloads > 0
    b.hand_over(0, 2.0)
    for site in (b, a, b):  # whoever's turn it is
        site.tick()
        clock[0] += 2.0
    status = look(store)
    assert status.by_fragment[0].version == 1 and site_of(status, "b").contributing
    assert (site_of(status, "a").merged_tokens, site_of(status, "a").carried_tokens) == (10, 15)
    assert site_of(status, "a").rounds_taken == 1


def test_a_site_whose_offer_a_round_left_out_has_missed_it_and_the_reason_is_counted(store):
    clock, terms = [0.0], make_terms(fragments=1)
    a, b = (HandSite(store, terms, name, clock) for name in "ab")
    b.hand_over(0, 2.0)
    b.tick()
    payload = next(key for key in store.list(keys.rounds_prefix(0)) if keys.is_payload(key))
    store.put(payload, b"x" * len(store.get(payload)))
    a.hand_over(0, 1.0)
    for _ in range(3):
        a.tick()
        clock[0] += terms.grace_s
    b.tick()
    status = look(store)
    assert site_of(status, "b").rounds_missed == 1 and site_of(status, "b").rounds_taken == 0
    assert list(status.refused.values()) == [1] and "another sha256" in next(iter(status.refused))
    assert not site_of(status, "b").contributing and "refused 1: " in drawn(status)


def test_in_a_run_that_is_closed_nothing_is_carried_any_more(store):
    """What a site trained and no round took, say before it was killed, will never be merged."""
    run_sites(*(ThreadSite(store, make_terms(), name, data_seed=place) for place, name in enumerate("ab")))
    merged = site_of(look(store), "a").merged_tokens
    late = HandSite(store, make_terms(), "a", [0.0])
    late.pulse.beat("live", (4, 4), (4, 4), 7, merged + 20)
    status = look(store)
    seen = site_of(status, "a")
    assert status.closed and (seen.trained_tokens, seen.merged_tokens) == (merged + 20, merged)
    assert (seen.carried_tokens, seen.dropped_tokens) == (0, 20)


def test_tokens_dropped_are_those_of_the_tape(store):
    site = HandSite(store, make_terms(), "a", [0.0])
    tape = Tape(store, "a", 0)
    tape.write("dropped", fragment=0, version=2, tokens=30, why="stale")
    tape.write("dropped", fragment=1, version=2, tokens=10, why="stale")
    tape.flush()
    site.pulse.beat("live", (0, 0), (0, 0), 7, 50)
    seen = site_of(look(store), "a")
    assert (seen.dropped_tokens, seen.carried_tokens) == (20, 30)


def test_live_contributing_and_quorum_are_three_counts(store):
    clock, terms = [0.0], make_terms(fragments=1, quorum=1, grace_s=0.0, liveness_s=10.0)
    a, b, c, _, over = (HandSite(store, terms, name, clock) for name in "abcde")
    for value, site in ((1.0, a), (2.0, b)):
        site.hand_over(0, value)
        site.runtime.run_tasks()
        site.courier._bring(0)
    for site in (a, b, a, b):
        site.tick()
        clock[0] += 2.0

    def beat(seconds: float) -> None:
        for site in (a, b, c):
            site.beat()
        over.pulse.beat("done", (1,), (1,), 0, 0)

    status = look(store, 3.0, beat)
    assert len(status.sites) == 5 and status.by_fragment[0].version == 1
    assert (status.live, status.contributing, status.quorum) == (3, 2, 1)
    assert "live 3, contributing 2, quorum 1" in drawn(status)


def test_who_is_live_is_left_open_where_looking_went_not_far_enough(store):
    a, _ = (HandSite(store, make_terms(liveness_s=10.0), name, [0.0]) for name in "ab")  # each beats every 2 s
    beat: Callable[[float], object] = lambda seconds: a.beat()  # noqa: E731
    once, short, long = look(store), look(store, 1.0, beat), look(store, 3.0, beat)
    beating = [[site.beating for site in status.sites] for status in (once, short, long)]
    assert beating == [[None, None], [True, None], [True, False]]
    assert [status.live for status in (once, short, long)] == [None, None, 1]
    assert "who is alive" in drawn(once) and "who is alive" not in drawn(long)
    assert "live unknown (one look: --watch-s tells), contributing 0, quorum 1" in drawn(once)
    assert "live 1 or more (--watch-s 1 is too short to tell), " in drawn(short)
    assert "live 1, " in drawn(long)


def test_a_site_that_came_back_shows_its_newest_process(store):
    for _ in range(3):
        site = HandSite(store, make_terms(), "a", [0.0])
    site.pulse.beat("joining", (0, 0), (0, 0), 0, 0)
    seen = site_of(look(store), "a")
    assert (seen.incarnation, seen.incarnations, seen.state, seen.beat_counter) == (
        2,
        3,
        "joining",
        site.pulse._counter,
    )


def test_a_run_with_keys_says_so_and_believes_signed_beats_only(store):
    owner, pair = SigningKey.generate(), {name: SigningKey.generate() for name in "ab"}
    founding = Founding(owner.public, {name: key.public for name, key in pair.items()})
    for name, key in pair.items():
        HandSite(store, make_terms(), name, [0.0], key=key, founding=founding)
    data = json.loads(store.get(keys.beat("b", 0)))
    store.put(keys.beat("b", 0), canonical(data | {"state": "done"}))
    status = look(store)
    assert status.signed and status.owner == owner.public
    assert (site_of(status, "a").state, site_of(status, "b").state) == ("live", "silent")
    assert any("signature that is not b's" in problem for problem in status.problems)
    store.put(keys.claim("a", 0), store.get(keys.claim("b", 0)))
    assert any("none that its admitted key signed" in problem for problem in look(store).problems)


def test_what_a_revoked_site_trained_stays_told_and_what_it_carried_is_dropped(store):
    owner, pair = SigningKey.generate(), {name: SigningKey.generate() for name in "ab"}
    founding = Founding(owner.public, {name: key.public for name, key in pair.items()})
    for name, key in pair.items():
        site = HandSite(store, make_terms(), name, [0.0], key=key, founding=founding)
        site.pulse.beat("live", (0, 0), (0, 0), 80, 799)
    before = site_of(look(store), "b")
    assert (before.state, before.trained_tokens, before.carried_tokens, before.dropped_tokens) == ("live", 799, 799, 0)
    Owner(store, owner).revoke("b")
    status = look(store)
    after = site_of(status, "b")
    assert (after.state, after.trained_tokens, after.carried_tokens, after.dropped_tokens) == ("revoked", 799, 0, 799)
    assert status.problems == () and site_of(status, "a").state == "live"


def test_a_close_record_of_a_site_revoked_later_still_counts(store):
    owner, key = SigningKey.generate(), SigningKey.generate()
    run_sites(ThreadSite(store, make_terms(), "a", key=key, founding=Founding(owner.public, {"a": key.public})))
    Owner(store, owner).revoke("a")
    status = look(store)
    assert status.closed and not any("close" in problem for problem in status.problems)


def test_a_close_record_that_comes_before_the_last_round_closes_nothing(store):
    site = HandSite(store, make_terms(), "a", [0.0])
    ended = {"versions": (4, 4), "masters": ("0" * 64,) * 2, "voids": ((), ())}
    store.create(keys.close(), Close(closed_by="a", **ended).to_bytes())
    assert not look(store).closed and site.run.terms.final_version == 4


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"{}", b"[1, 2", b'{"event": "offer"}\n'])
def test_damaged_objects_are_named_and_the_rest_is_shown(store, damage):
    run_sites(*(ThreadSite(store, make_terms(quorum=2), name, data_seed=place) for place, name in enumerate("ab")))
    tape = store.list(keys.tape_prefix("b"))[0]
    doomed = [keys.commit(0, 1), keys.beat("a", 0), tape, keys.close(), keys.offer(1, 1, "a")]
    for key in doomed:
        store.put(key, damage)
    store.delete(keys.commit(1, 0))
    status = look(store)
    assert [fragment.version for fragment in status.by_fragment] == [4, 4]
    for key in (keys.commit(0, 1), keys.beat("a", 0), keys.close(), keys.commit(1, 0)):
        assert any(key in problem for problem in status.problems), key
    assert damage == b"" or any(tape in problem for problem in status.problems)
    assert site_of(status, "a").state == "silent" and site_of(status, "b").state == "done"
    assert status.by_fragment[0].faulty >= 1
    json.dumps(asdict(status))
    assert drawn(status).count("problem: ") == len(status.problems)


def test_a_place_without_a_run_and_a_damaged_manifest_are_refused(store):
    with pytest.raises(BadInput, match="holds no run"):
        look(store)
    store.put(keys.manifest(), b"{")
    with pytest.raises(CorruptObject, match=r"manifest\.json is no Manifest"):
        look(store)


def test_a_round_that_all_sites_found_void_is_shown_as_unsound(store):
    site = ThreadSite(store, make_terms(rounds=4), "a")
    site.after_join = lambda: store.create(keys.commit(0, 1), commit_of_nobody())
    run_sites(site)
    status = look(store)
    assert [fragment.faulty for fragment in status.by_fragment] == [1, 0] and status.problems == ()


def commit_of_nobody() -> bytes:
    base = {"base_sha": "0" * 64, "taken": (), "refused": (), "previous": "0" * 64, "num_parts": 0}
    return Commit.model_validate(base | {"fragment": 0, "version": 1, "committer": "z", "incarnation": 0}).to_bytes()


def taking_run(store: Store, **changes) -> None:
    """A run of one closed round that a committed and that took a, b and c, the last with a long movement."""
    HandSite(store, make_terms(fragments=1, **changes), "a", [0.0])
    for site in "bc":
        HandSite(store, make_terms(fragments=1, **changes), site, [0.0])
    taken = [entry_of(site, 0, 0) for site in "abc"]
    for entry, norm in zip(taken, (1.0, 2.0, 400.0), strict=True):
        entry["offer"]["norms"] = (norm,)
    commit = json.loads(commit_of_nobody()) | {"version": 0, "taken": taken, "committer": "a", "num_parts": 0}
    store.create(keys.commit(0, 0), canonical(commit))


def test_who_was_clipped_is_shown_with_the_smallest_factor(store):
    taking_run(store, aggregate="clipped", clip=2.0)
    status = look(store)
    clips = {site.site: (site.rounds_clipped, site.least_clip) for site in status.sites}
    assert clips == {"a": (0, None), "b": (0, None), "c": (1, 0.01)} and status.problems == ()
    row = next(line for line in drawn(status).splitlines() if line.startswith("│ c ") and "0.01" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["c", "1", "0.01"]


def test_without_anything_bounded_there_is_no_table_of_it(store):
    taking_run(store)
    assert "clipped" not in drawn(look(store))


def test_reasons_that_differ_in_numbers_count_as_one():
    whys = [f"stands on master {sha}, the round on {sha[::-1]}" for sha in ("0123456789abcdef", "fedcba9876543210")]
    assert len({reason(why) for why in whys}) == 1
    assert reason("rounds/0000/00000001/payload/a-00 has 12 bytes") == ".. has .. bytes"


def test_a_run_of_some_hundred_rounds_is_counted_whole(store_uri):
    store = open_store(store_uri("file"))
    HandSite(store, make_terms(rounds=300), "a", [0.0])
    tapes = {site: Tape(store, site, 0) for site in "abcd"}
    for fragment in range(2):
        for version in range(300):
            taken = tuple(entry_of(site, fragment, version) for site in "abcd")
            commit = json.loads(commit_of_nobody()) | {"fragment": fragment, "version": version, "taken": taken}
            store.create(keys.commit(fragment, version), canonical(commit))
            for site, tape in tapes.items():
                store.create(keys.offer(fragment, version, site), b"on the tape")
                tape.write("offer", fragment=fragment, version=version, tokens=10, nbytes=100)
                tape.write("round", fragment=fragment, version=version, taken=[*tapes], refused={}, fault=None, parts=0)
    for tape in tapes.values():
        tape.flush()
    status = look(store)
    assert status.rounds_done == 300 and site_of(status, "a").rounds_taken == 600
    assert site_of(status, "a").rounds_missed == 0 and status.bytes.payloads >= 60_000


def entry_of(site: str, fragment: int, version: int) -> dict:
    payload = keys.payload(fragment, version, site, "0" * 16)
    offer = Offer(
        site=site,
        incarnation=0,
        fragment=fragment,
        version=version,
        base_sha="0" * 64,
        tokens=10,
        steps=1,
        trained_tokens=10 * version,
        codec="fp32",
        payload=payload,
        sha256="0" * 64,
        nbytes=100,
    )
    return {"offer": offer.model_dump(mode="json"), "multiplier": 0.25}


def test_sizes_are_for_people():
    assert [size(n) for n in (0, 999, 1000, 1_719_616, 10**15)] == ["0 B", "999 B", "1.00 kB", "1.72 MB", "1.00 PB"]
