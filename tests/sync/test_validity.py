"""What makes an offer, a commit or a part sound, beyond the forgeries in `tests/spec/test_verdicts.py`."""

import base64
import math

import pytest

from composer_prime.errors import ProtocolError
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync import validity
from composer_prime.sync.history import voids_among
from composer_prime.sync.records import Commit, Offer
from composer_prime.sync.validity import FragmentFacts, copies, digests_of, offer_fault
from tests.sync.harness import make_terms

TERMS = make_terms(quorum=2)
FACTS = FragmentFacts(0, 2, (80, 80))


def offer(site="a", *, seed=None, **changes):
    digests = [slice_digest(f"{seed or site}{index}".encode()) for index in range(2)]
    values = {
        "site": site,
        "incarnation": 0,
        "fragment": 0,
        "version": 3,
        "base_sha": "b" * 64,
        "tokens": 10,
        "steps": 2,
        "trained_tokens": 40,
        "codec": "fp32",
        "payload": keys.payload(0, 3, site, root_sha256(digests)),
        "sha256": root_sha256(digests),
        "slices": base64.b64encode(b"".join(digests)).decode(),
        "nbytes": 80,
        "norms": (3.0, 4.0),
    }
    return Offer(**(values | changes))


def fault_of(record, taken=None, terms=TERMS):
    return offer_fault(record, site="a", facts=FACTS, version=3, base_sha="b" * 64, taken=taken or {}, terms=terms)


def test_a_sound_offer_has_no_fault_and_its_norm_is_that_of_all_slices():
    assert fault_of(offer()) is None and offer().norm == 5.0
    assert fault_of(offer(payload=None, sha256=None, slices="", nbytes=0, norms=(), tokens=0, steps=0)) is None


H = TERMS.inner_steps


@pytest.mark.parametrize(("terms", "most_steps"), [({}, 5 * H), ({"sync_delay": 1}, 5 * (H + 2))])
def test_a_claim_is_held_against_what_the_recipe_makes_in_the_rounds_there_were(terms, most_steps):
    """Of the third round: three that were, the one that is open, and what overlaps with it."""
    terms = make_terms(step_tokens=7, **terms)
    most = 4 * 7 * most_steps

    def fault(taken=None, **claims):
        return fault_of(offer(**{"tokens": 1, "trained_tokens": most} | claims), taken, terms)

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


@pytest.mark.parametrize("changes", [{"norms": (0.0, 0.0)}, {"nbytes": 63}])
def test_two_sites_that_did_not_move_or_say_little_are_no_copies(changes):
    first, second = offer("a", seed="x", **changes), offer("b", seed="x", **changes)
    assert copies({"a": first, "b": second}) == {}


def test_void_rounds_before_the_window_are_known_from_sound_commits_only():
    def commit(*voids: int) -> Commit:
        return Commit.model_construct(voids=voids)

    commits = [commit(), None, commit(0), commit(1), commit(1, 2), commit()]
    assert voids_among(range(6), commits, ()) == {1, 2}
    assert voids_among(range(6), commits, (3, 4)) == {0, 3, 4}
