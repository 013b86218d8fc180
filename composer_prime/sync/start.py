"""Rules 2 and 11: create the run in its bucket or join the one that is there, and refuse what doesn't fit.

A create-once manifest decides who created the run; everyone else throws its own initial weights away.
"""

import json
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from composer_prime.config.recipe import Recipe
from composer_prime.errors import ConfigError, FingerprintMismatch, KeyMissing, ProtocolError
from composer_prime.outer.arithmetic import test_vector
from composer_prime.outer.fragments import Fragment, model_fingerprint, plan_fragments
from composer_prime.outer.pseudograd import flatten
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.records import PROTOCOL, Manifest, ParameterShape, Terms, sha256_hex
from composer_prime.sync.snapshots import Master, store_master

logger = logging.getLogger(__name__)


def terms_of(recipe: Recipe) -> Terms:
    """What the recipe's `[outer]` table and `max_steps` ask of a run. Raises ConfigError when it has no such table."""
    outer = recipe.outer
    if outer is None:
        raise ConfigError("the recipe has no [outer] table: add one to take part in an outer loop")
    wanted = {name: getattr(outer, name) for name in Terms.model_fields if name != "rounds"}
    return Terms(**wanted, rounds=recipe.max_steps // outer.inner_steps)


def create_or_join(
    store: Store, terms: Terms, run: str, site: str, params: Mapping[str, Tensor]
) -> tuple[Manifest, str, tuple[Fragment, ...]]:
    """The run's manifest, its sha256, and the fragments; creates the run when the bucket has none.

    params   the trainable parameters by clean name; read only when this site creates the run

    Raises FingerprintMismatch when the model or the terms differ from the run's, ProtocolError when this machine's
    arithmetic does or the bucket speaks another protocol.
    """
    named_shapes = [(name, tuple(value.shape)) for name, value in params.items()]
    fragments = plan_fragments(named_shapes, terms.fragments)
    try:
        data = store.get(keys.manifest())
    except KeyMissing:
        data = _create(store, terms, run, site, params, named_shapes, fragments)
    manifest = read_manifest(data)
    check_fit(manifest, terms, named_shapes, run)
    check_arithmetic(manifest)
    return manifest, sha256_hex(data), fragments


def _create(
    store: Store,
    terms: Terms,
    run: str,
    site: str,
    params: Mapping[str, Tensor],
    named_shapes: Sequence[tuple[str, tuple[int, ...]]],
    fragments: Sequence[Fragment],
) -> bytes:
    """Upload every master(f, 0), then race for the manifest; returns the winner's bytes."""
    shas = []
    for fragment in fragments:
        weights = flatten(params, fragment)
        master = Master.of(fragment.index, 0, weights, torch.zeros_like(weights))
        store_master(store, master)
        shas.append(master.sha256)
    manifest = Manifest(
        protocol=PROTOCOL,
        run=run,
        fingerprint=model_fingerprint(named_shapes),
        parameters=tuple(ParameterShape(name=name, shape=shape) for name, shape in named_shapes),
        masters=tuple(shas),
        terms=terms,
        test_vector=test_vector(),
        created_by=site,
    )
    won = store.create(keys.manifest(), manifest.to_bytes())
    logger.info("run_created run=%s by_this_site=%s store=%s", run, won, store.uri)
    return manifest.to_bytes() if won else store.get(keys.manifest())


def read_manifest(data: bytes) -> Manifest:
    """Parse a manifest's bytes. Raises ProtocolError when it speaks another version, CorruptObject when it is none."""
    try:
        protocol = json.loads(data).get("protocol")
    except (ValueError, AttributeError):
        protocol = PROTOCOL  # not JSON at all: the record's own parser says so
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"{keys.manifest()} speaks protocol {protocol}, this composer-prime speaks {PROTOCOL}: "
            "install the version the run was created with"
        )
    return Manifest.from_bytes(data, keys.manifest())


def check_fit(manifest: Manifest, terms: Terms, named_shapes: Sequence[tuple[str, tuple[int, ...]]], run: str) -> None:
    """Raise FingerprintMismatch, showing every difference, unless model and terms are the run's."""
    differences = [
        f"outer.{name}: run {theirs!r}, recipe {getattr(terms, name)!r}"
        for name, theirs in manifest.terms.model_dump().items()
        if theirs != getattr(terms, name)
    ]
    differences += _shape_differences({p.name: p.shape for p in manifest.parameters}, dict(named_shapes))
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise FingerprintMismatch(
            f"this recipe differs from the run {manifest.run!r} in the bucket: {shown}. "
            f"Use the run's values, or start a new run with another run.name than {run!r}"
        )


def _shape_differences(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> list[str]:
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return [
        f"parameter {name}: run {_shape(theirs.get(name))}, model {_shape(ours.get(name))}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "scalar"


def check_arithmetic(manifest: Manifest) -> None:
    """Raise ProtocolError when this machine doesn't compute the run's test vector bit for bit."""
    ours = test_vector()
    if ours != manifest.test_vector:
        raise ProtocolError(
            f"this machine computes the run's test vector as {ours[:16]}, the run says {manifest.test_vector[:16]}: "
            "its masters would drift apart; use the torch version and CPU type of the other sites"
        )
