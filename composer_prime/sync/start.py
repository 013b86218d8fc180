"""Rules 2 and 11: create the run in its bucket or join the one that is there, and refuse what doesn't fit.

A create-once manifest decides who created the run; everyone else throws its own initial weights away.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from composer_prime.errors import ConfigError, FingerprintMismatch, KeyMissing, ProtocolError
from composer_prime.outer.arithmetic import test_vector
from composer_prime.outer.fragments import Fragment, model_fingerprint, plan_fragments
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.canonical import PROTOCOL, sha256_hex
from composer_prime.sync.deleting import check_whole
from composer_prime.sync.founding import another_run
from composer_prime.sync.lifetime import read_manifest
from composer_prime.sync.parameters import Parameters
from composer_prime.sync.reading import read_bytes
from composer_prime.sync.records import Manifest, ParameterShape
from composer_prime.sync.run import Run, load_run
from composer_prime.sync.runtime import Runtime
from composer_prime.sync.snapshots import Master, store_master
from composer_prime.sync.terms import ASKED, Terms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Founding:
    """What a site brings along in case it is the one that creates the run.

    parent  sha256 of the manifest of the run that this one goes on from
    check   called with the store before anything is created; raises StoreUnusable when the store won't do
    draw    gives the run's nonce, 32 hex digits
    """

    owner: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Store], None] = lambda store: None
    draw: Callable[[], str] = lambda: os.urandom(16).hex()
    parent: str | None = None


def create_or_join(
    store: Store, terms: Terms, run: str, site: str, params: Parameters, runtime: Runtime, founding: Founding
) -> Run:
    """The run in the bucket; created from this site's parameters when there is none.

    Raises FingerprintMismatch when the model or the terms differ from the run's, ProtocolError when this machine's
    arithmetic does or the bucket speaks another protocol.
    """
    try:
        found = load_run(store)
    except KeyMissing:
        _create(store, terms, run, site, params, runtime, founding)
        found = load_run(store)
    check_fit(found, terms, params.shapes(), store.uri)
    check_arithmetic(found.manifest)
    return found


def _create(
    store: Store, terms: Terms, run: str, site: str, params: Parameters, runtime: Runtime, founding: Founding
) -> None:
    """Upload every master(f, 0), then race for the manifest."""
    won = found_run(store, terms, run, site, params, runtime, founding)
    logger.info("run_created run=%s by_this_site=%s store=%s", run, won, store.uri)


def refuse_to_create(store: Store) -> None:
    """`Founding.check` of a site without weights of its own. Raises ConfigError."""
    raise ConfigError(
        f"{store.uri} holds no run any more, and this site came without weights to make one from: ask the run's owner"
    )


def found_run(
    store: Store, terms: Terms, run: str, created_by: str, params: Parameters, runtime: Runtime, founding: Founding
) -> bool:
    """Write a run with these parameters as its first masters; whether it is ours, and not another creator's.

    Raises ConfigError when the model can't be cut into `terms.fragments`, StoreUnusable when the store won't do,
    BadInput where another run was deleted in part.
    """
    check_whole(store)
    founding.check(store)
    fragments = plan_fragments(params.shapes(), terms.fragments)
    masters = [_first_master(params, fragment, terms) for fragment in fragments]
    runtime.map(lambda master: store_master(store, master), masters)
    manifest = Manifest(
        protocol=PROTOCOL,
        run=run,
        fingerprint=model_fingerprint(params.shapes()),
        parameters=tuple(ParameterShape(name=name, shape=shape) for name, shape in params.shapes()),
        masters=tuple(master.sha256 for master in masters),
        terms=terms,
        test_vector=test_vector(),
        owner=founding.owner,
        keys=dict(founding.keys),
        created_by=created_by,
        nonce=founding.draw(),
        parent=founding.parent,
    )
    return store.create(keys.manifest(), manifest.to_bytes())


def _first_master(params: Parameters, fragment: Fragment, terms: Terms) -> Master:
    weights = params.read(fragment)
    return Master(fragment.index, 0, weights, torch.zeros_like(weights) if terms.has_momentum else None)


def check_same_run(store: Store, run_sha: str) -> None:
    """Raise ConfigError unless the bucket holds the run of a checkpoint, by its manifest's sha256.

    Raises StoreUnusable where it doesn't answer: that says nothing of what it holds.
    A checkpoint's movement counts from masters of its own run; in one made anew from its weights it would count twice.
    """
    try:
        data = read_bytes(store, keys.manifest())
    except KeyMissing:
        held = None
    else:
        read_manifest(data)  # of a run of another protocol say so, first of all
        held = sha256_hex(data)
    if held == run_sha:
        return
    what = "holds no run any more, and this site's checkpoint is of one: restore the bucket and start again"
    if held is not None:
        what = "holds another run than this site's checkpoint is of: name the bucket or the run.name that it belongs to"
    raise ConfigError(
        f"{store.uri} {what}; or start without the checkpoint (without --resume), to begin at the masters that are "
        "there, or at the model's weights where there are none"
    )


def check_fit(found: Run, terms: Terms, named_shapes: Sequence[tuple[str, tuple[int, ...]]], uri: str) -> None:
    """Raise FingerprintMismatch, showing every difference, unless model and terms are the run's."""
    manifest = found.manifest
    differences = [
        f"outer.{name}: run {theirs!r}, recipe {getattr(terms, name)!r}"
        for name, theirs in manifest.terms.model_dump(include=ASKED).items()
        if theirs != getattr(terms, name)
    ]
    differences += _shape_differences({p.name: p.shape for p in manifest.parameters}, dict(named_shapes))
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise FingerprintMismatch(
            f"this recipe differs from the run {manifest.run!r} in the bucket: {shown}. "
            f"{another_run(manifest.run, uri)}"
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
