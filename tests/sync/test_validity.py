"""What makes an offer, a commit or a part sound, beyond the forgeries in `tests/spec/test_verdicts.py`."""

import base64
import math

import pytest

from composer_prime.errors import ProtocolError
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync import validity
from composer_prime.sync.history import voids_among
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
    [({}, 5 * H), ({"sync_delay": 1}, 5 * (H + 2))],
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


def test_an_offer_that_equals_anothers_is_a_copy_in_its_round_and_in_later_ones():
    mine, copy = offer("b"), offer("a", seed="b")
    assert list(copies({"b": mine, "a": copy})) == ["a"] and list(copies({"a": copy, "b": mine})) == ["b"]
    assert "a copy" in (fault_of(copy, taken={mine.payload: mine.sha256}) or "")
    own_again = offer("a", captured=2)
    assert fault_of(offer("a"), taken={own_again.payload: own_again.sha256}) is None


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


NOBODY = frozenset[str]()


def judge(record: Commit, *, version=3, previous="d" * 64, taken=None, voids=(1,), terms=TERMS, guests=NOBODY):
    return commit_fault(
        record,
        facts=FACTS,
        version=version,
        previous=previous,
        taken=taken or {},
        voids=voids,
        terms=terms,
        guests=guests,
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


def judge_part(record: Part, guests=NOBODY):
    return part_fault(record, commit=commit(), commit_sha="c" * 64, index=1, bounds=(40, 40), guests=guests)


BOTH = (Refused(site="a", why=""), Refused(site="b", why=""))


def test_a_part_may_be_empty_only_when_every_offer_is_unsound_in_it():
    assert judge_part(part(excluded=BOTH, payload=None, sha256=None, nbytes=0)) is None


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
