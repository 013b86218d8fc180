"""What makes an offer, a commit or a part sound: each check, broken once."""

import base64
import math

import pytest

from composer_prime.errors import ProtocolError
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync import validity
from composer_prime.sync.history import voids_among
from composer_prime.sync.protocol import Authority
from composer_prime.sync.records import Commit, Offer, Part, Refused
from composer_prime.sync.validity import (
    FragmentFacts,
    commit_fault,
    copies,
    digests_of,
    offer_fault,
    part_fault,
    part_shares,
    write_commit,
)
from tests.sync.harness import make_terms

TERMS = make_terms(quorum=2)
FACTS = FragmentFacts(0, 2, (80, 80))


def offer(site="a", *, seed=None, version=3, captured=3, **changes):
    digests = [slice_digest(f"{seed or site}{index}".encode()) for index in range(2)]
    values = {
        "site": site,
        "incarnation": 0,
        "fragment": 0,
        "version": version,
        "base_sha": "b" * 64,
        "tokens": 10,
        "steps": 2,
        "trained_tokens": 40,
        "codec": "fp32",
        "payload": keys.payload(0, captured, site, root_sha256(digests)),
        "sha256": root_sha256(digests),
        "slices": base64.b64encode(b"".join(digests)).decode(),
        "nbytes": 80,
        "norms": (3.0, 4.0),
    }
    return Offer(**(values | changes))


def fault_of(record, *, version=3, taken=None):
    return offer_fault(
        record, site="a", facts=FACTS, version=version, base_sha="b" * 64, taken=taken or {}, terms=TERMS
    )


def test_a_sound_offer_has_no_fault_and_its_norm_is_that_of_all_slices():
    assert fault_of(offer()) is None and offer().norm == 5.0
    assert fault_of(offer(payload=None, sha256=None, slices="", nbytes=0, norms=(), tokens=0, steps=0)) is None


H = TERMS.inner_steps


@pytest.mark.parametrize(
    ("terms", "most_steps"),
    [({}, 5 * H), ({"sync_delay": 1}, 5 * (H + 2)), ({"pace": "seconds", "inner_seconds": 3.0}, 5 * 300)],
)
def test_a_claim_is_held_against_what_the_recipe_makes_in_the_rounds_there_were(terms, most_steps):
    """Of the third round: three that were, the one that is open, and what overlaps with it."""
    terms = make_terms(step_tokens=7, **terms)
    most = 4 * 7 * most_steps

    def fault(taken=None, **claims):
        record = offer(**{"tokens": 1, "trained_tokens": most} | claims)
        return offer_fault(record, site="a", facts=FACTS, version=3, base_sha="b" * 64, taken=taken or {}, terms=terms)

    assert fault(tokens=most, steps=most_steps) is None
    assert f"tokens ever trained, the recipe makes at most {most} in 3 rounds" in str(fault(trained_tokens=most + 1))
    assert "steps, there is time for" in str(fault(steps=most_steps + 1))
    since = {keys.payload(0, 2, "a", "7" * 64): "7" * 64, keys.payload(0, 1, "a", "8" * 64): "8" * 64}
    fewer = most_steps * 3 // 5
    assert fault(since, tokens=4 * 7 * fewer, steps=fewer) is None
    assert f"at most {4 * 7 * fewer} in 1 rounds" in str(fault(since, tokens=4 * 7 * fewer + 1))
    others = {keys.payload(0, 2, "b", "7" * 64): "7" * 64}
    assert fault(others, tokens=most, steps=most_steps) is None


def test_no_claim_is_compared_where_the_run_says_no_most():
    assert fault_of(offer(tokens=2**53, trained_tokens=2**53, steps=2**53)) is None


def test_a_norm_is_summed_from_left_to_right_with_a_rounding_each_whatever_python_sums_like():
    """Python 3.12 compensates in sum(): a site on it would give other multipliers than one on 3.11."""
    assert offer(norms=(1.0, *[1e-8] * 100)).norm == 1.0 != math.sqrt(math.fsum([1.0, *[1e-16] * 100]))


@pytest.mark.parametrize("spelled", [base64.b64encode(b"x" * 60).decode() + "====", "eHh4eHh4eHh4eHh4eHh4eHh4eHg\n="])
def test_hashes_have_one_spelling_so_that_no_release_of_python_takes_for_base64_what_another_does_not(spelled):
    with pytest.raises(ProtocolError, match="refuse it"):
        digests_of(offer(slices=spelled))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"site": "z"}, "record says"),
        ({"version": 2}, "record says"),
        ({"base_sha": "0" * 64}, "stands on"),
        ({"codec": "int8"}, "coded as"),
        ({"nbytes": 81}, "bytes"),
        ({"nbytes": 79}, "bytes"),
        ({"tokens": 0}, "0 tokens"),
        ({"steps": 0}, "0 steps"),
        ({"tokens": 41}, "ever trained"),
        ({"norms": (1.0,)}, "states 1 norms"),
        ({"norms": (1.0, -1.0)}, "norms"),
        ({"norms": (1e200, 1.0)}, "no finite sum"),
        ({"slices": "?"}, "base64"),
        ({"slices": base64.b64encode(b"x" * 33).decode()}, "multiple of 20"),
        ({"slices": base64.b64encode(b"x" * 40).decode()[:-2] + "B="}, "spelling"),
        ({"slices": base64.b64encode(b"x" * 40).decode()}, "don't make"),
        ({"payload": keys.payload(0, 3, "b", "c" * 64)}, "belongs to"),
        ({"payload": keys.payload(0, 3, "a", "c" * 64)}, "not that of its sha256"),
        ({"payload": "somewhere/else"}, "does not name"),
    ],
)
def test_an_offer_that_cannot_stand_in_the_round_is_refused_with_the_reason(changes, word):
    assert word in (fault_of(offer(**changes)) or "")


def test_of_hashes_that_are_too_many_nothing_is_remembered():
    """An admitted site can sign megabytes of them, round after round."""
    before = validity._digests.cache_info().currsize
    for number in range(3):
        many = base64.b64encode(bytes([number]) * 20 * 50_000).decode()
        assert "characters of hashes for 2 slices" in str(fault_of(offer(slices=many)))
    assert validity._digests.cache_info().currsize == before


def test_a_late_payload_may_stand_in_a_later_round_until_it_is_too_old():
    assert fault_of(offer(captured=0, version=4), version=4) is None
    assert "at most 4 rounds" in (fault_of(offer(captured=0, version=5), version=5) or "")
    assert "at most 4 rounds" in (fault_of(offer(captured=4)) or "")


def test_a_payload_is_taken_at_most_once_in_a_run():
    mine = offer()
    assert "earlier round" in (fault_of(mine, taken={mine.payload: mine.sha256}) or "")


def test_an_offer_that_equals_anothers_is_a_copy_in_its_round_and_in_later_ones():
    mine, copy = offer("b"), offer("a", seed="b")
    assert list(copies({"b": mine, "a": copy})) == ["a"] and list(copies({"a": copy, "b": mine})) == ["b"]
    assert "a copy" in (fault_of(copy, taken={mine.payload: mine.sha256}) or "")
    own_again = offer("a", captured=2)
    assert fault_of(offer("a"), taken={own_again.payload: own_again.sha256}) is None


def test_an_offer_that_vouches_for_no_master_stands_on_any():
    assert fault_of(offer(base_sha=None)) is None
    assert "stands on" in (fault_of(offer(base_sha="0" * 64)) or "")


@pytest.mark.parametrize("changes", [{"norms": (0.0, 0.0)}, {"nbytes": 63}])
def test_two_sites_that_did_not_move_or_say_little_are_no_copies(changes):
    first, second = offer("a", seed="x", **changes), offer("b", seed="x", **changes)
    assert copies({"a": first, "b": second}) == {}


def commit(take=("a", "b"), terms=TERMS, **changes):
    offers = {site: offer(site, tokens=10 * (index + 1)) for index, site in enumerate(take)}
    record = write_commit(
        facts=FACTS,
        version=3,
        base_sha="b" * 64,
        previous="d" * 64,
        take=offers,
        refused={},
        voids=(1,),
        terms=terms,
        guests=(),
        admissions=0,
        admission_sha=None,
        committer="a",
        incarnation=0,
    )
    return record.model_copy(update=changes)


ANYONE = Authority()


def judge(record: Commit, *, version=3, previous="d" * 64, taken=None, voids=(1,), terms=TERMS, authority=ANYONE):
    return commit_fault(
        record,
        facts=FACTS,
        version=version,
        previous=previous,
        taken=taken or {},
        voids=voids,
        terms=terms,
        authority=authority,
    )


def test_a_commit_written_by_the_rules_has_no_fault():
    record = commit()
    assert judge(record) is None and record.num_parts == 0
    assert [entry.multiplier for entry in record.taken] == pytest.approx([1 / 3, 2 / 3])


def test_a_commit_of_many_offers_is_cut_into_parts():
    terms = make_terms(quorum=2, gather_sites=1)
    record = commit(terms=terms)
    assert record.num_parts == 2 and judge(record, terms=terms) is None
    assert "parts" in (judge(record.model_copy(update={"num_parts": 0}), terms=terms) or "")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 4}, "its key"),
        ({"previous": "e" * 64}, "commit before"),
        ({"voids": ()}, "were void"),
        ({"base_sha": "0" * 64}, "stands on"),
        ({"num_parts": 2}, "parts"),
        ({"taken": "swapped"}, "sorted"),
        ({"taken": "short"}, "quorum"),
        ({"taken": "heavy"}, "weighs"),
        ({"taken": "other payload"}, "it may not"),
        ({"taken": "nothing"}, "nothing to merge"),
    ],
)
def test_a_commit_that_does_not_follow_from_manifest_and_offers_is_refused(changes, word):
    record = commit()
    first, second = record.taken
    altered = second.offer.model_copy(update={"sha256": "f" * 64})
    empty = second.offer.model_copy(update={"payload": None})
    bad = {
        "swapped": (second, first),
        "short": (first.model_copy(update={"multiplier": 1.0}),),
        "heavy": (first.model_copy(update={"multiplier": 0.5}), second),
        "other payload": (first, second.model_copy(update={"offer": altered})),
        "nothing": (first, second.model_copy(update={"offer": empty})),
    }
    if "taken" in changes:
        changes = {"taken": bad[changes["taken"]]}
    assert word in (judge(record.model_copy(update=changes)) or "")


def test_a_commit_needs_a_quorum_of_offers_that_vouch_for_its_master():
    record = commit(("a", "b", "c"))
    silent = [
        entry.model_copy(update={"offer": entry.offer.model_copy(update={"base_sha": None})}) for entry in record.taken
    ]
    assert judge(record.model_copy(update={"taken": (*record.taken[:2], silent[2])})) is None
    alone = record.model_copy(update={"taken": (record.taken[0], *silent[1:])})
    assert "1 offers of members that vouch for a master, the quorum is 2" in (judge(alone) or "")


def test_guests_make_no_quorum():
    assert judge(commit(("a", "b")), authority=Authority(guests=frozenset("b"))) == (
        "takes 1 offers of members that vouch for a master, the quorum is 2"
    )


def test_only_the_fixed_committer_may_commit_where_there_is_one():
    assert judge(commit(), authority=Authority("a")) is None
    assert "only z may" in (judge(commit(), authority=Authority("z")) or "")


def test_a_commit_that_takes_a_copy_or_a_taken_payload_is_refused():
    record = commit()
    first = record.taken[0]
    assert "earlier round" in (judge(record, taken={first.payload: first.sha256}) or "")
    twins = {"a": offer("a"), "b": offer("b", seed="a", tokens=20)}
    forged = write_commit(
        facts=FACTS,
        version=3,
        base_sha="b" * 64,
        previous="d" * 64,
        take=twins,
        refused={},
        voids=(1,),
        terms=TERMS,
        guests=(),
        admissions=0,
        admission_sha=None,
        committer="a",
        incarnation=0,
    )
    assert "a copy" in (judge(forged) or "")


PART_SHA = "9" * 64


def part(**changes):
    values = {
        "fragment": 0,
        "version": 3,
        "part": 1,
        "commit_sha": "c" * 64,
        "excluded": (),
        "payload": keys.merged_payload(0, 3, 1, PART_SHA),
        "sha256": PART_SHA,
        "nbytes": 40,
        "reducer": "a",
    }
    return Part(**(values | changes))


def judge_part(record: Part, authority=ANYONE):
    return part_fault(record, commit=commit(), commit_sha="c" * 64, index=1, bounds=(40, 40), authority=authority)


BOTH = (Refused(site="a", why=""), Refused(site="b", why=""))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"part": 0}, "another place"),
        ({"commit_sha": "0" * 64}, "stands on"),
        ({"excluded": BOTH[::-1]}, "not in order"),
        ({"excluded": (Refused(site="z", why=""),)}, "doesn't take"),
        ({"payload": None}, "no payload"),
        ({"sha256": "8" * 64}, "not that of its sha256"),
        ({"nbytes": 41}, "bytes"),
    ],
)
def test_a_part_that_does_not_follow_from_its_commit_is_refused(changes, word):
    assert judge_part(part()) is None
    assert word in (judge_part(part(**changes)) or "")


def test_a_part_may_be_empty_only_when_every_offer_is_unsound_in_it():
    assert judge_part(part(excluded=BOTH, payload=None, sha256=None, nbytes=0)) is None


def test_what_a_guest_commits_or_merges_does_not_count():
    guests = Authority(guests=frozenset("a"))
    assert judge(commit(), authority=guests) == "was made by a, a guest, which may only offer"
    assert judge_part(part(), authority=guests) == "was merged by a, a guest, which may only offer"
    others = Authority(guests=frozenset("c"))
    assert judge(commit(), authority=others) is None and judge_part(part(), authority=others) is None


def test_with_a_fixed_committer_only_it_merges_parts():
    assert judge_part(part(), authority=Authority("a")) is None
    assert "only z may" in (judge_part(part(), authority=Authority("z")) or "")


def test_shares_are_drawn_anew_over_the_offers_that_are_sound_in_a_part():
    record = commit()
    assert part_shares(record, [], TERMS, ()) == {entry.site: entry.multiplier for entry in record.taken}
    assert part_shares(record, ["a"], TERMS, ()) == {"b": 1.0}
    assert part_shares(record, ["a"], TERMS, "b") == {"b": 0.0}  # a guest's, with no member's beside it


def test_void_rounds_before_the_window_are_known_from_sound_commits_only():
    def commit(*voids: int) -> Commit:
        return Commit.model_construct(voids=voids)

    commits = [commit(), None, commit(0), commit(1), commit(1, 2), commit()]
    assert voids_among(range(6), commits, ()) == {1, 2}
    assert voids_among(range(6), commits, (3, 4)) == {0, 3, 4}
