"""The outer loop as a trainer sees it: join, call after every inner step, close.

Keeps the training thread's side of Streaming DiLoCo: when a fragment is due, what its movement is, and what the
parameters become when a round has closed. The bucket's side is the courier's.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ConfigError, CorruptObject
from composer_prime.outer.fragments import Fragment, trainable
from composer_prime.outer.merge import Change, blending, carry, carrying, settling
from composer_prime.store import open_store, race_store
from composer_prime.store.base import Store
from composer_prime.store.metered import MeteredStore
from composer_prime.store.throttled import throttle
from composer_prime.sync.driver import Driver
from composer_prime.sync.entering import BEATS_PER_LIVENESS, SiteIdentity, enter
from composer_prime.sync.errands import Capture, Settled
from composer_prime.sync.journal import FileJournal, Journal
from composer_prime.sync.parameters import LocalParameters, Parameters
from composer_prime.sync.protocol import due_fragment, is_due, is_stale, training_is_over
from composer_prime.sync.returning import FragmentStand, Returning
from composer_prime.sync.roster import Roster
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import Master
from composer_prime.sync.start import Founding, check_same_run, create_or_join, refuse_to_create
from composer_prime.sync.terms import Terms, terms_of
from composer_prime.waiting import Waits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OuterReport:
    """What one inner step meant for the outer loop.

    stop      the run has ended; the parameters hold the final masters
    stall_s   seconds the training thread spent in the outer loop in this step; the wait for the others once there is
              nothing left to train is not in it, but in the summary's finish_s
    round     rounds closed so far, over all fragments, as this site knows
    upload_s  seconds that coding and uploading took beside training, since this process began
    bytes_up, bytes_down   what went to and came from the bucket since then
    adopted   fragments whose parameters were moved to a newer master in this step
    """

    stop: bool
    stall_s: float
    round: int
    upload_s: float
    bytes_up: int
    bytes_down: int
    adopted: tuple[int, ...] = ()


@dataclass(frozen=True)
class _InFlight:
    """The round this site offered into and will wait for, at the latest at inner step `wait_at`."""

    fragment: int
    version: int
    wait_at: int


class OuterLoop:
    """One site's part in a run. Not thread-safe: everything is called by the training thread, but `interrupt`."""

    def __init__(
        self,
        store: Store,
        terms: Terms,
        *,
        run: str,
        site: str | SiteIdentity,
        founding: Founding | None = None,
        journal: Journal | None = None,
        runtime: Runtime | None = None,
        exact_join_s: float | None = 20.0,
        waits: Waits | None = None,
    ) -> None:
        """
        store     the run's root in the bucket
        terms     what this site's recipe asks of the run
        founding  what to put into the manifest if this site creates the run
        journal   where residuals are written ahead; None: a crash loses what coding took from the last merged offer
        runtime   threads and time; None: this process's own
        exact_join_s   seconds that a join may take for whole masters; beyond them training begins from their upper
                       halves, and the rest comes beside it. None: any time
        waits     where this site says what it waits for; None: the event log alone tells
        """
        self._store = MeteredStore(store)
        self._terms = terms
        self._run_name = run
        self._identity = SiteIdentity(site) if isinstance(site, str) else site
        self._site = self._identity.site
        self._founding = founding or Founding()
        self._journal = journal
        self._runtime = runtime or ThreadRuntime()
        self._exact_join_s = exact_join_s
        self.waits = waits or Waits(clock=self._runtime.now, wall=self._runtime.now)
        self._restored: dict[str, Any] | None = None
        self._interrupted = False
        self._step = 0
        self._turn_at = self._runtime.now()
        self._stall_s = 0.0
        self._finish_s = 0.0
        self._in_flight: _InFlight | None = None
        self._stands: list[FragmentStand] = []
        self._adopted: list[int] = []
        self._finished = False

    @classmethod
    def from_settings(cls, settings: SiteSettings) -> "OuterLoop":
        """The outer loop that a site's recipe asks for. Raises ConfigError when it asks for none."""
        outer, site = settings.recipe.outer, settings.recipe.site
        if settings.run_uri is None or outer is None:
            raise ConfigError("the recipe has no [outer] table: add one to take part in an outer loop")
        key = None if site.key_file is None else SigningKey.load(site.key_file)
        check = race_store if outer.committer is None else lambda store: None
        return cls(
            throttle(open_store(settings.run_uri, site.key_file), site.max_mbit_up, site.max_mbit_down),
            terms_of(settings.recipe),
            run=settings.recipe.run.name,
            site=SiteIdentity(settings.site, key, site.same_name == "replace"),
            founding=Founding(outer.owner, outer.keys, check if settings.has_weights else refuse_to_create),
            journal=FileJournal(settings.paths.journal),
            exact_join_s=site.exact_join_s,
            waits=Waits(settings.paths.waiting("trainer")),
        )

    # --- joining ----------------------------------------------------------------------------------------------------

    def join(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Create the run or join it; afterwards the parameters stand on the newest masters, own movement kept.

        named_parameters   the model's, after a checkpoint was loaded if there was one; frozen ones don't take part

        Raises FingerprintMismatch, ProtocolError, StoreError, and ConfigError for a checkpoint of another run; nothing
        of the run is changed then.
        """
        self.join_with(LocalParameters(dict(trainable(named_parameters))))

    def join_with(self, params: Parameters) -> None:
        """As `join`, with parameters that may lie elsewhere than in this process."""
        self._params = params
        store, runtime = self._store, self._runtime
        if self._restored is not None:
            check_same_run(store, self._restored.get("run", ""))
        run = create_or_join(store, self._terms, self._run_name, self._site, self._params, runtime, self._founding)
        self._run, self._terms, self._fragments = run, run.terms, run.fragments
        self._check_restored()
        entered = enter(
            store,
            run,
            self._identity,
            runtime=runtime,
            journal=self._journal,
            inner_step=self._restored_step(),
            own=self._own_values,
            patience_s=self._exact_join_s,
        )
        self._courier, self._tape = entered.courier, entered.tape
        self._courier.returning = self._restored is not None
        self._stand(entered.roster)
        self._driver = Driver(
            self._courier,
            entered.pulse,
            self._tape,
            runtime=runtime,
            beat_every_s=run.terms.liveness_s / BEATS_PER_LIVENESS,
            progress=lambda: (self._step, self._stands[0].ledger.trained),
            waits=self.waits,
        )
        self._tape.write("join", versions=self._courier.versions(), step=self._step)
        self._driver.start("done" if self._finished else "live")

    def _restored_step(self) -> int:
        return 0 if self._restored is None else int(self._restored["step"])

    def _check_restored(self) -> None:
        saved = None if self._restored is None else self._restored["fragments"]
        if saved is not None and len(saved) != len(self._fragments):
            raise CorruptObject(f"the checkpoint holds {len(saved)} fragments, the run has {len(self._fragments)}")

    def _own_values(self, fragment: Fragment) -> tuple[int, Tensor]:
        """What may be a master already: the checkpoint's bases, or without one the weights as training starts."""
        if self._restored is None:
            return 0, self._params.read(fragment)
        saved = self._restored["fragments"][fragment.index]
        return int(saved["version"]), saved["base"]

    def _stand(self, roster: Roster) -> None:
        """Put every fragment on the newest master: plainly when this site is new, by rule 12 when it comes back."""
        saved = self._restored["fragments"] if self._restored is not None else [None] * len(self._fragments)
        if self._courier.is_coarse() and any(
            state is not None and self._courier.replica(index).version < int(state["version"])
            for index, state in enumerate(saved)
        ):
            self._courier.refine()  # it doubts a commit behind which its checkpoint stands: only who is whole can tell
            self._courier.catch_up()
        returning = Returning(
            self._store,
            runtime=self._runtime,
            roster=roster,
            terms=self._terms,
            params=self._params,
            journal=self._journal,
            site=self._site,
        )
        for index, state in enumerate(saved):
            stand, errand = returning.stand(
                self._courier.replica(index), None if state is None else FragmentStand.from_dict(state)
            )
            self._stands.append(stand)
            if errand is not None:
                self._courier.reinstate(errand)
        self._step = self._restored_step()
        if self._courier.is_over():
            self._courier.refine()
            self._conclude()

    # --- training ---------------------------------------------------------------------------------------------------

    def after_inner_step(self, tokens: int, samples: int) -> OuterReport:
        """Call once after each step of the inner optimizer; moves the parameters when a round has closed.

        tokens, samples   trained in this step

        Raises what stopped the courier (ProtocolError, Superseded).
        """
        del samples  # weights are by tokens; the signature is the seam's
        started, finish_s = self._runtime.now(), self._finish_s
        self._driver.check()
        self._step += 1
        self._adopted = []
        for stand in self._stands:
            stand.ledger.train(tokens)
        self._wait_if_due()
        if (self._is_due(self._step) or self._falls_in()) and not self._interrupted:
            self._take_turn()
        elif self._is_due(self._step + 1):
            self._courier.look_ahead()  # beside training, so that the next step finds the log read
            self._driver.wake()
        stall_s = self._runtime.now() - started - (self._finish_s - finish_s)
        self._stall_s += stall_s
        traffic = self._store.traffic()
        return OuterReport(
            self._finished,
            stall_s,
            round=sum(self._courier.versions()),
            upload_s=self._courier.uploads.seconds,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            adopted=tuple(self._adopted),
        )

    def _is_due(self, step: int) -> bool:
        since = max(self._turn_at, self._courier.closed_at)
        return is_due(step, self._runtime.now() - since, self._terms)

    def _falls_in(self) -> bool:
        """Whether a site that has come back takes its first turn now, since the others are taking theirs (rule 12)."""
        return self._courier.returning and self._courier.is_due_elsewhere()

    def _wait_if_due(self) -> None:
        """Rule 8: tau inner steps after the capture the round must be in; wait for it only now, then adopt it."""
        flight = self._in_flight
        if flight is None or self._step < flight.wait_at:
            return
        if self._wait_past({flight.fragment: flight.version}):
            self._in_flight = None
            self._adopt(flight.fragment)

    def _take_turn(self) -> None:
        """Rules 3 and 4: stand on everything that is known, then offer the fragment whose turn it is.

        The courier has just read the log; a commit that came a moment ago is adopted with the next turn, and the
        offer's record, which the courier makes, stands on the newest master all the same.
        """
        self._turn_at = self._runtime.now()
        self._courier.returning = False
        for fragment in self._fragments:
            self._adopt(fragment.index)
        versions = self._courier.versions()
        if training_is_over(versions, self._terms):
            self._finish()
            return
        due = due_fragment(versions)
        self._offer(due)
        last = training_is_over([version + (index == due) for index, version in enumerate(versions)], self._terms)
        self._in_flight = _InFlight(due, versions[due], self._step + (0 if last else self._terms.sync_delay))
        if last:
            self._finish()
        else:
            self._wait_if_due()

    def _offer(self, index: int) -> None:
        """Hand the fragment's whole movement to the courier, unless an earlier capture of it is still on its way."""
        fragment, stand = self._fragments[index], self._stands[index]
        if stand.captured is not None:
            return
        ledger = stand.ledger
        stand.captured = local = self._params.read(fragment)
        if ledger.carried == 0:
            self._courier.submit(Capture(index, None, None, None, 0, 0, ledger.trained))
        else:
            tokens, steps = ledger.capture()
            self._courier.submit(Capture(index, stand.base, local, stand.residual, tokens, steps, ledger.trained))
        self._driver.wake()

    def _adopt(self, index: int) -> None:
        """Move a fragment onto its newest master; own movement that it holds is left out, other is carried (rule 7)."""
        fragment, stand = self._fragments[index], self._stands[index]
        master, settled = self._courier.collect(index)
        if master.version == stand.version and (settled is None or settled.outcome == "out"):
            return
        new_base = self._params.rounded(fragment, master.weights)
        if settled is not None and settled.outcome == "overtaken":
            stand.captured = stand.residual = None
            self._drop(stand, master, "another process of this name had its offer merged")
            change = None
        elif settled is not None and settled.outcome == "taken":
            change = self._leave_out_merged(stand, new_base, master, settled)
        else:
            change = self._carry(stand, new_base, master, settled)
        if change is None:
            self._params.write(fragment, new_base)
        else:
            self._params.change(fragment, change)
        stand.base, stand.version = new_base, master.version
        self._adopted.append(index)

    def _leave_out_merged(self, stand: FragmentStand, new_base: Tensor, master: Master, settled: Settled) -> Change:
        """How values change when a commit took this site's capture: exactly, or blended when the run says so."""
        assert stand.captured is not None
        captured, stand.captured = stand.captured, None
        stand.residual = settled.residual
        tokens, traffic = stand.ledger.settle_taken(), self._store.traffic()
        self._tape.write(
            "merged",
            fragment=master.fragment,
            version=master.version - 1,
            tokens=tokens,
            carried=stand.ledger.carried,
            approximate=self._terms.merge_alpha > 0,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
        )
        if self._terms.merge_alpha > 0:
            return blending(new_base, self._terms.merge_alpha)
        return settling(captured, new_base)

    def _carry(self, stand: FragmentStand, new_base: Tensor, master: Master, settled: Settled | None) -> Change | None:
        """How values change when no commit took this site's movement: it is carried. None: it is dropped, too old."""
        if settled is not None and settled.outcome in ("missed", "void"):
            if stand.ledger.captured and settled.outcome == "missed":
                stand.ledger.miss_round()
            stand.ledger.release_capture()
            stand.captured = None
            if is_stale(stand.ledger.missed_rounds, self._terms):
                self._drop(stand, master, "stale")
                return None
            if carried := stand.ledger.carried:
                self._tape.write("carried", fragment=master.fragment, version=master.version - 1, tokens=carried)
        elif stand.captured is not None:
            stand.captured = carry(stand.captured, stand.base, new_base)
        return carrying(stand.base, new_base)

    def _drop(self, stand: FragmentStand, master: Master, why: str) -> None:
        tokens = stand.ledger.drop()
        if tokens:
            logger.warning("work_dropped fragment=%d tokens=%d why=%s", master.fragment, tokens, why)
            self._tape.write("dropped", fragment=master.fragment, version=master.version, tokens=tokens, why=why)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Rule 11: a last offer of every fragment, then the final masters, the same at every site."""
        started = self._runtime.now()
        self._wait_if_due()
        if self._in_flight is None and self._close_out():
            self._conclude()
            self._driver.announce("done")
            logger.info("run_finished versions=%s", self._courier.versions())
        self._finish_s += self._runtime.now() - started

    def _close_out(self) -> bool:
        """Offer what is left of every fragment, and wait for the final masters; False when interrupted first."""
        final = self._terms.final_version
        for index, version in enumerate(self._courier.versions()):
            if version < final:
                self._offer(index)
        if not self._wait_past({fragment.index: final - 1 for fragment in self._fragments}, whole=True):
            return False
        for fragment in self._fragments:
            self._adopt(fragment.index)
        return True

    def _conclude(self) -> None:
        """The run is over: the parameters become the final masters, and movement that came too late is dropped."""
        for fragment, stand in zip(self._fragments, self._stands, strict=True):
            master = self._courier.master(fragment.index)
            self._drop(stand, master, "run ended")
            stand.captured = None
            stand.base, stand.version = self._params.write(fragment, master.weights), master.version
        self._finished = True

    def _wait_past(self, versions: dict[int, int], *, whole: bool = False) -> bool:
        """Block until each fragment's open round is beyond the one given; False when interrupted first.

        whole   wait until no master is coarse, too
        """

        def arrived() -> bool:
            now = self._courier.versions()
            passed = all(now[index] > version for index, version in versions.items())
            return passed and not (whole and self._courier.is_coarse())

        if arrived():
            return True
        self._driver.awaited = True
        self._driver.wake()
        try:
            with self._courier.changed:
                while not arrived():
                    if self._interrupted:
                        return False
                    self._driver.check()
                    what = "its own upload" if self._courier.is_uploading else "the other sites"
                    self.waits.say("round", f"{what}, before round {min(versions.values())} closes")
                    self._courier.changed.wait(timeout=0.5)
        finally:
            self._driver.awaited = False
            self.waits.say("round", None)
        return True

    def interrupt(self) -> None:
        """Stop waiting and take no further turn, so that the trainer can save a checkpoint; from any thread."""
        self._interrupted = True

    @property
    def finished(self) -> bool:
        """Whether the run has ended; true right after `join` when it had ended before."""
        return self._finished

    def close(self) -> None:
        """Leave: tell the others, stop the threads, close the store. What was not offered stays in the checkpoint."""
        try:
            if not self._finished:
                self._driver.announce("leaving")
        finally:  # a superseded site may not announce anything, and its threads stop all the same
            self._driver.close()
            self._courier.finish()
            self._runtime.close()
            self._store.close()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the parameters: the run's manifest, by its sha256, and per fragment its
        base, what is out, the token counts."""
        return {
            "run": self._run.sha256,
            "step": self._step,
            "fragments": [stand.to_dict() for stand in self._stands],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; call before `join`, on parameters of the same checkpoint."""
        self._restored = state

    def summary(self) -> dict[str, Any]:
        """The site's part in the run, for result.json: rounds, masters (version and sha256), bytes, fates of tokens."""
        masters = [self._courier.master(fragment.index) for fragment in self._fragments]
        traffic = self._store.traffic()
        return {
            "outer_rounds": sum(master.version for master in masters),
            "masters": [
                {
                    "fragment": master.fragment,
                    "version": master.version,
                    "sha256": None if master.coarse else master.sha256,
                }
                for master in masters
            ],
            "bytes_up": traffic.bytes_up,
            "bytes_down": traffic.bytes_down,
            "stall_s": self._stall_s,
            "finish_s": self._finish_s,
            "upload_s": self._courier.uploads.seconds,
            "tokens": [stand.ledger.to_dict() for stand in self._stands],
        }
