"""The run that a gateway serves, as its bucket states it, and whether a gateway can serve it at all."""

from collections.abc import Collection
from dataclasses import dataclass

from composer_prime.errors import BadInput
from composer_prime.gateway.policy import RunFacts
from composer_prime.gateway.tickets import tickets_of
from composer_prime.store.base import MAX_CREATE_BYTES, Store
from composer_prime.sync.lifetime import find_manifest
from composer_prime.sync.owner import check_guarded
from composer_prime.sync.roster import Roster


@dataclass(frozen=True)
class Served:
    """One run behind a gateway."""

    store: Store
    facts: RunFacts
    roster: Roster


def serve_run(store: Store, max_object_bytes: int, allowed: Collection[str] = ()) -> Served:
    """The run whose root `store` is, for objects of at most so many bytes.

    allowed   terms by which one site could ruin the run and which the owner accepts, see `owner.check_guarded`

    Raises BadInput when there is none, when it admits no keys by which its sites could be told apart, when none of
    them could be a guest or one could ruin it, or when its payloads are larger than that, or than what a store without
    presigned URLs takes.
    """
    manifest, sha = find_manifest(store)
    if manifest.owner is None and not manifest.keys:
        raise BadInput(
            f"run {manifest.run} asks for no keys, and a gateway knows sites by their keys: create a run with "
            "outer.owner"
        )
    if manifest.owner is None:
        raise BadInput(
            f"run {manifest.run} has no owner who could admit guests, and all its sites close rounds, which behind a "
            "gateway nobody does: create a run with outer.owner"
        )
    check_guarded(manifest, allowed)

    from composer_prime.sync.run import load_run  # its codecs bring torch, which nothing else here needs

    run = load_run(store)
    bounds = tuple(coding.facts.bounds for coding in run.codings)
    largest = max(most for _, most in bounds)
    if largest > max_object_bytes:
        raise BadInput(
            f"payloads of run {manifest.run} have up to {largest} bytes, this gateway takes {max_object_bytes} "
            "(--max-object-mib): raise it, or create the run with more outer.fragments"
        )
    if tickets_of(store) is None and largest > MAX_CREATE_BYTES:
        raise BadInput(
            f"payloads of run {manifest.run} have up to {largest} bytes, and {store.uri} gives no presigned URLs, so "
            f"that they would go through this gateway, which takes {MAX_CREATE_BYTES}: use an S3 bucket, or create the "
            "run with more outer.fragments"
        )
    facts = RunFacts(manifest.run, run.terms, bounds, max_object_bytes)
    return Served(store, facts, Roster(store, manifest, sha))
