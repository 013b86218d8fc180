"""Captures on their way into the bucket: coded, written ahead and uploaded, each on a task of its own."""

import base64
from collections.abc import Callable, Sequence
from functools import partial

from composer_prime.outer.payloads import code
from composer_prime.store import keys
from composer_prime.store.base import Store
from composer_prime.sync.errands import Errand
from composer_prime.sync.journal import Journal
from composer_prime.sync.merging import Stated
from composer_prime.sync.replica import Replica
from composer_prime.sync.runtime import PARALLEL_BODIES, Condition, Room, Runtime, side_by_side
from composer_prime.sync.terms import Terms


class Uploads:
    """One site's, several at once. `changed` guards errands and what is kept of them."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        *,
        runtime: Runtime,
        replicas: Sequence[Replica],
        journal: Journal | None,
        changed: Condition,
        site: str,
    ) -> None:
        self._store = store
        self._terms = terms
        self._runtime = runtime
        self._replicas = replicas
        self._journal = journal
        self._changed = changed
        self._site = site
        self._room = Room(runtime, PARALLEL_BODIES)
        self.on_ready: Callable[[], None] = lambda: None
        """Called when an upload has ended, so that the next pass comes at once."""
        self.seconds = 0.0
        """That coding and uploading took, off the training thread."""

    def start(self, errand: Errand) -> None:
        """Code a capture, write ahead what that leaves, upload it; its errand is `ready` then, or has a `failure`."""
        errand.failure = None
        errand.upload = self._runtime.spawn("outer-upload", partial(self._upload, errand))

    def _upload(self, errand: Errand) -> None:
        started = self._runtime.now()
        try:
            with self._room:
                started = self._runtime.now()
                if errand.data is None:
                    self._code(errand)
                # Not in `runtime.map`, whose threads the passes need: a slow link's uploads would hold all of them.
                both = [partial(act, errand) for act in (self._put, self._write_ahead)]
                side_by_side(self._runtime, "outer-upload", both)
            with self._changed:
                errand.data, errand.ready = None, True
        except BaseException as error:
            errand.failure = error
        with self._changed:  # uploads of several fragments may end at once
            self.seconds += self._runtime.now() - started
        self.on_ready()

    def _code(self, errand: Errand) -> None:
        fragment, movement = errand.capture.fragment, errand.capture.movement()
        replica = self._replicas[fragment]
        codec, plan = replica.coding.codec, replica.coding.plan
        assert movement is not None
        coded = code(codec, movement, plan)
        payload = keys.payload(fragment, errand.version, self._site, coded.sha256)
        residual = coded.residual_of(movement) if codec.lossy and self._terms.error_feedback else None
        slices = base64.b64encode(b"".join(coded.digests)).decode()
        with self._changed:
            if errand.outcome == "out":  # else nobody would let go of it
                stated = Stated(payload, coded.nbytes, slices, coded.norms)
                replica.merger.keep(stated, coded.decoded, partial(self._put_again, errand))
            errand.data, errand.payload, errand.sha256, errand.nbytes = coded.data, payload, coded.sha256, coded.nbytes
            errand.slices = slices
            errand.norms, errand.residual = coded.norms, residual

    def _put(self, errand: Errand) -> None:
        assert errand.payload is not None and errand.data is not None
        if not errand.stored:  # the journal's disk may be full for hours
            self._store.put(errand.payload, errand.data)
            errand.stored = True

    def _put_again(self, errand: Errand) -> None:
        """Store a payload that the bucket has lost: coding the capture once more gives the same bytes."""
        movement, coding = errand.capture.movement(), self._replicas[errand.capture.fragment].coding
        assert movement is not None and errand.payload is not None
        self._store.put(errand.payload, code(coding.codec, movement, coding.plan).data)

    def _write_ahead(self, errand: Errand) -> None:
        """Rule 12: what the payload leaves if it is taken must outlive a crash before the offer's record names it."""
        if errand.residual is not None and self._journal is not None:
            assert errand.payload is not None
            self._journal.write(errand.capture.fragment, errand.payload, errand.residual)
