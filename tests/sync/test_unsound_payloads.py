"""A commit that takes a payload whose bytes are what was signed, and yet no sound payload: void, for everybody."""

import base64
from collections.abc import Callable

import numpy as np
import pytest
import torch

from composer_prime.errors import PayloadUnsound, StoreError
from composer_prime.outer.codecs import get_codec
from composer_prime.outer.payloads import code, decode, plan_slices
from composer_prime.outer.slices import root_sha256, slice_digest
from composer_prime.store import keys
from composer_prime.sync.reading import read_record
from composer_prime.sync.records import Offer
from composer_prime.sync.replica import Replica
from composer_prime.sync.validity import write_commit
from composer_prime.sync.verifying import Verifier
from tests.sync.harness import HandSite, make_terms

TERMS = make_terms(fragments=1, rounds=9, grace_s=1.0)
SPOILED: dict[str, Callable[[np.ndarray], tuple[bytes, float]]] = {
    "a value that is none": lambda x: (np.concatenate([[np.float32(np.nan)], x[1:]]).tobytes(), 1.0),
    "a norm understated": lambda x: (x.tobytes(), 0.01),
}
"""-> bytes, and the factor to the norm"""


def commit_on(evil: HandSite, kind: str) -> Offer:
    """`evil` offers such a payload, and commits on it itself."""
    evil.hand_over(0, 1.0)
    evil.runtime.run_tasks()
    evil.courier._bring(0)
    offer = read_record(evil.store, Offer, keys.offer(0, 0, evil.name))
    data, factor = SPOILED[kind](np.frombuffer(evil.store.get(str(offer.payload)), "<f4").copy())
    digests = (slice_digest(data),)
    sha, slices = root_sha256(digests), base64.b64encode(b"".join(digests)).decode()
    changed = {"payload": keys.payload(0, 0, evil.name, sha), "sha256": sha, "slices": slices}
    offer = offer.model_copy(update=changed | {"norms": (offer.norms[0] * factor,)})
    evil.store.put(str(offer.payload), data)
    evil.store.put(keys.offer(0, 0, evil.name), offer.to_bytes())
    commit_taking(evil, offer)
    return offer


def commit_taking(evil: HandSite, *offers: Offer) -> None:
    """It commits on these offers, whatever they say."""
    replica = evil.replicas[0]
    commit = write_commit(
        facts=replica.coding.facts,
        version=0,
        base_sha=replica.master.sha256,
        previous=replica.previous,
        take={offer.site: offer for offer in offers},
        refused={},
        voids=(),
        terms=TERMS,
        guests=(),
        admissions=0,
        admission_sha=None,
        committer=evil.name,
        incarnation=0,
    )
    evil.store.create(keys.commit(0, 0), commit.to_bytes())


def replica_of(site: HandSite) -> Replica:
    return Replica(site.store, site.run, 0, runtime=site.runtime, roster=site.roster, site="z")


@pytest.mark.parametrize("kind", SPOILED)
def test_a_commit_on_a_payload_that_is_none_is_a_void_round_for_everybody(store, clock, kind):
    a, e = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "e", clock)
    before = a.replicas[0].master.sha256
    commit_on(e, kind)
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None and closed.fault.startswith("takes an offer of e it may not: slice 0 ")
    assert (a.replicas[0].version, a.replicas[0].master.sha256) == (1, before)
    a.hand_over(0, 2.0)
    for _ in range(4):
        a.tick()
        clock[0] += 1.0
    late = replica_of(a)
    while late.advance():
        pass
    assert (late.version, late.history.voids) == (2, (0,))
    assert late.master.sha256 == a.replicas[0].master.sha256
    verifier = Verifier(store)
    assert verifier.check(0).num_void == 1
    verifier.close()


def test_a_round_waits_for_the_bytes_as_long_as_they_are_not_those_that_were_signed(store, clock):
    a, e = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "e", clock)
    offer = commit_on(e, "a norm understated")
    data = store.get(str(offer.payload))
    store.put(str(offer.payload), bytes(len(data)))
    with pytest.raises(StoreError, match="can't be skipped"):
        a.replicas[0].advance()
    store.put(str(offer.payload), data)
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None


def test_what_was_read_for_one_offer_vouches_for_no_other_that_names_the_same_payload(store, clock):
    """One that has its norm right is read early; the commit takes another, with a norm that the clip lets pass."""
    a, b, e = (HandSite(store, TERMS, name, clock) for name in "abe")
    for site, values in ((a, 1.0), (e, 1000.0)):
        site.hand_over(0, values)
        site.runtime.run_tasks()
        site.courier._bring(0)
    own, first = (read_record(store, Offer, keys.offer(0, 0, site.name)) for site in (a, e))
    a.replicas[0].merger.fetch(first)
    commit_taking(e, own, first.model_copy(update={"norms": (first.norms[0] * 1e-6,)}))
    for site in (a, b):
        (closed,) = site.replicas[0].advance()
        assert closed.fault is not None and "has norm" in closed.fault, site.name
    assert a.replicas[0].master.sha256 == b.replicas[0].master.sha256


def test_nor_does_what_a_site_knows_of_its_own_payload(store, clock):
    """Where nothing is signed anybody may write an offer in its name."""
    a, e = HandSite(store, TERMS, "a", clock), HandSite(store, TERMS, "e", clock)
    a.hand_over(0, 1.0)
    a.runtime.run_tasks()
    a.courier._bring(0)
    own = read_record(store, Offer, keys.offer(0, 0, "a"))
    commit_taking(e, own.model_copy(update={"norms": (own.norms[0] * 2,)}))
    (closed,) = a.replicas[0].advance()
    assert closed.fault is not None and "has norm" in closed.fault


def test_a_round_that_is_void_for_all_is_no_fault_for_verify_whatever_its_offers_records_say(store, clock):
    e = HandSite(store, TERMS, "e", clock)
    offer = commit_on(e, "a norm understated")
    store.put(keys.offer(0, 0, "e"), offer.model_copy(update={"tokens": offer.tokens - 1}).to_bytes())
    e.replicas[0].advance()
    verifier = Verifier(store)
    assert verifier.check(0).num_void == 1
    verifier.close()


def at_the_edge(share: float) -> torch.Tensor:
    """Values whose squares make 1.00005 squared, or less where that share of the small ones is lost: in fp64 those are
    that are added to the large one one by one, in whichever order and in so many sums as a machine adds."""
    small = torch.full((2**16 - 4,), 1e-8)
    target, large = 1.00005**2 - (1 - share) * float(small.double().square().sum()), []
    for _ in range(4):
        large.append(np.nextafter(np.float32(np.sqrt(target)), np.float32(0)))
        target -= float(large[-1]) ** 2
    return torch.cat([torch.tensor(large), small])


def accepts(x: torch.Tensor, norm: float) -> bool:
    codec = get_codec("fp32")
    plan = plan_slices(x.numel(), 1, (codec,))
    coded = code(codec, x, plan)
    try:
        decode(codec, coded.data, coded.digests, (norm,), plan, 0, 1)
    except PayloadUnsound:
        return False
    return True


def test_whether_a_norm_is_right_hangs_on_no_order_in_which_a_machine_adds():
    for share in range(0, 20):
        x = at_the_edge(share / 20)
        real = float(torch.linalg.vector_norm(x.double()))
        near = [real * factor * (1 + 1e-15 * at) for factor in (1.0001, 0.9999) for at in (-1, 0, 1)]
        for norm in (1.0002, 1.0001, 1.0, *near):
            assert accepts(x, norm) == accepts(x.flip(0), norm), norm
        assert accepts(x, 1.0) and not accepts(x, 1.0002)
