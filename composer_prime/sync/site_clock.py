"""The outer loop as a trainer sees it: join, call after every inner step, close.

Keeps the training thread's side of Streaming DiLoCo: when a fragment is due, what its movement is, and what the
parameters become when a round has closed. The bucket's side is the courier's.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ConfigError
from composer_prime.outer.fragments import trainable
from composer_prime.outer.merge import Change, carry, carrying, settling
from composer_prime.store import open_store, race_store
from composer_prime.store.base import Store
from composer_prime.sync.driver import Driver
from composer_prime.sync.entering import BEATS_PER_LIVENESS, Entered, SiteIdentity, enter
from composer_prime.sync.errands import Capture, Settled
from composer_prime.sync.founding import first_keys
from composer_prime.sync.journal import FileJournal, Journal
from composer_prime.sync.learning import Held, Learner, Present
from composer_prime.sync.metered import MeteredStore, throttle
from composer_prime.sync.parameters import LocalParameters, Parameters
from composer_prime.sync.protocol import due_fragment, is_due, is_stale, training_is_over
from composer_prime.sync.report import OuterReport
from composer_prime.sync.returning import FragmentStand, Learned, Returning, Saved
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.snapshots import Master
from composer_prime.sync.start import Founding, check_same_run, create_or_join, refuse_to_create
from composer_prime.sync.terms import Terms, terms_of
from composer_prime.waiting import Waits

logger = logging.getLogger(__name__)


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
        waits: Waits | None = None,
    ) -> None:
        """
        store     the run's root in the bucket
        terms     what this site's recipe asks of the run
        founding  what to put into the manifest if this site creates the run
        journal   where residuals are written ahead; None: a crash loses what coding took from the last merged offer
        runtime   threads and time; None: this process's own
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
        self.waits = waits or Waits(clock=self._runtime.now, wall=self._runtime.now)
        self._saved = Saved()
        self._interrupted = False
        self._step = 0
        self._stall_s = 0.0
        self._finish_s = 0.0
        self._in_flight: _InFlight | None = None
        self._learner: Learner | None = None
        """Set while the masters are still coming."""
        self._learned = Learned()
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
        return cls(
            throttle(open_store(settings.run_uri, site.key_file), site.max_mbit_up, site.max_mbit_down),
            terms_of(settings.recipe),
            run=settings.recipe.run.name,
            site=SiteIdentity(settings.site, key, site.same_name == "replace"),
            founding=Founding(
                outer.owner,
                first_keys(settings.recipe, settings.site),
                race_store if settings.has_weights else refuse_to_create,
            ),
            journal=FileJournal(settings.paths.journal),
            waits=Waits(settings.paths.waiting("trainer")),
        )

    # --- joining ----------------------------------------------------------------------------------------------------

    def join(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Create the run or join it; afterwards the parameters stand on the newest masters, own movement kept.

        Where the masters take long to come, a site that holds weights of the run is a learner afterwards: its
        parameters are as they were, and come to stand on the masters in an `after_inner_step`.

        named_parameters   the model's, after a checkpoint was loaded if there was one; frozen ones don't take part

        Raises FingerprintMismatch, ProtocolError, StoreError, and ConfigError for a checkpoint of another run; nothing
        of the run is changed then.
        """
        self.join_with(LocalParameters(dict(trainable(named_parameters))))

    def join_with(self, params: Parameters) -> None:
        """As `join`, with parameters that may lie elsewhere than in this process."""
        self._params = params
        store, runtime = self._store, self._runtime
        if self._saved.run is not None:
            check_same_run(store, self._saved.run)
        run = create_or_join(store, self._terms, self._run_name, self._site, self._params, runtime, self._founding)
        self._run, self._terms, self._fragments = run, run.terms, run.fragments
        self._saved.check(len(run.fragments))
        self._step, self._learned = self._saved.step, self._saved.learned
        self._entered = enter(store, run, self._identity, runtime)
        held = self._held()
        self._stands = self._saved.stands() or [FragmentStand(version, values) for version, values in held.values]
        present = Present(store, self._entered, runtime=runtime, held=held, journal=self._journal)
        trained = self._learned.tokens
        learner = Learner(self._entered, present, runtime=runtime, progress=self._progress, trained=trained)
        self._learner = learner
        try:
            if learner.is_read_soon():
                self._take_part()
            elif not self._learned.starts:
                self._learned = Learned([*map(self._params.read, run.fragments)])
        except BaseException:
            learner.stop()
            raise

    def _take_part(self) -> None:
        """The masters are whole: stand on them, and take turns from now on."""
        assert self._learner is not None
        entered, learner = self._entered, self._learner
        self._courier = learner.take()
        self._courier.returning = bool(self._saved.fragments)
        self._stand(entered, learner.trained)
        self._turn_at = self._runtime.now()
        self._driver = Driver(
            self._courier,
            entered.pulse,
            entered.tape,
            runtime=self._runtime,
            beat_every_s=self._terms.liveness_s / BEATS_PER_LIVENESS,
            progress=self._progress,
            waits=self.waits,
        )
        self._learner = None
        entered.tape.write("join", versions=self._courier.versions(), step=self._step)
        self._driver.start("done" if self._finished else "live")

    def _progress(self) -> tuple[int, int]:
        return self._step, self._stands[0].ledger.trained

    def _held(self) -> Held:
        """What may be masters already: the checkpoint's bases, or without one the weights as training starts."""
        if saved := self._saved.stands():
            return Held([(stand.version, stand.base) for stand in saved], of_run=True)
        starts = self._learned.starts or map(self._params.read, self._fragments)
        return Held([(0, values) for values in starts])

    def _stand(self, entered: Entered, tokens: Sequence[int]) -> None:
        """Put every fragment on the newest master: plainly when this site is new, by rule 12 when it comes back.

        tokens   of each inner step that it has made as a learner; that movement is carried
        """
        returning = Returning(
            self._store,
            runtime=self._runtime,
            roster=entered.roster,
            terms=self._terms,
            params=self._params,
            journal=self._journal,
            site=self._site,
        )
        saved = self._saved.stands() or [None] * len(self._fragments)
        for index, state in enumerate(saved):
            start = self._learned.starts[index] if tokens else None
            stand, errand = returning.stand(self._courier.replica(index), state, start)
            for count in tokens:
                stand.ledger.train(count)
            self._stands[index] = stand
            if errand is not None:
                self._courier.reinstate(errand)
        self._learned = Learned()
        if self._courier.is_over():
            self._conclude()

    # --- training ---------------------------------------------------------------------------------------------------

    def after_inner_step(self, tokens: int, samples: int) -> OuterReport:
        """Call once after each step of the inner optimizer; moves the parameters when a round has closed.

        tokens, samples   trained in this step

        Raises what stopped the courier (ProtocolError, Superseded).
        """
        del samples  # weights are by tokens; the signature is the seam's
        started, finish_s = self._runtime.now(), self._finish_s
        self._step += 1
        self._adopted = []
        for stand in self._stands:
            stand.ledger.train(tokens)
        if self._learner is None:
            self._driver.check()
            self._take_turn_if_due()
        else:
            self._learn(self._learner, tokens)
        stall_s = self._runtime.now() - started - (self._finish_s - finish_s)
        self._stall_s += stall_s
        return self._report(stall_s)

    def _learn(self, learner: Learner, tokens: int) -> None:
        """One inner step while the masters still come; after H of them it waits. Once they are whole, stand on them."""
        if learner.train(tokens) >= self._terms.inner_steps:
            self.waits.say("round", "the run's weights, which are still coming")
            learner.wait(lambda: not self._interrupted)
            self.waits.say("round", None)
        if learner.is_whole():
            self._take_part()
            self._adopted = [fragment.index for fragment in self._fragments]

    def _take_turn_if_due(self) -> None:
        self._wait_if_due()
        if (is_due(self._step, self._terms) or self._falls_in()) and not self._interrupted:
            self._take_turn()
        elif is_due(self._step + 1, self._terms):
            self._courier.look_ahead()  # beside training, so that the next step finds the log read
            self._driver.wake()

    def _report(self, stall_s: float) -> OuterReport:
        traffic, is_learner = self._store.traffic(), self._learner is not None
        return OuterReport(
            self._finished,
            stall_s,
            round=0 if is_learner else sum(self._courier.versions()),
            upload_s=0.0 if is_learner else self._courier.uploads.seconds,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            adopted=tuple(self._adopted),
        )

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
        """How values change when a commit took this site's capture: exactly."""
        assert stand.captured is not None
        captured, stand.captured = stand.captured, None
        stand.residual = settled.residual
        tokens, traffic = stand.ledger.settle_taken(), self._store.traffic()
        self._entered.tape.write(
            "merged",
            fragment=master.fragment,
            version=master.version - 1,
            tokens=tokens,
            carried=stand.ledger.carried,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
        )
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
                self._entered.tape.write(
                    "carried", fragment=master.fragment, version=master.version - 1, tokens=carried
                )
        elif stand.captured is not None:
            stand.captured = carry(stand.captured, stand.base, new_base)
        return carrying(stand.base, new_base)

    def _drop(self, stand: FragmentStand, master: Master, why: str) -> None:
        tokens = stand.ledger.drop()
        if tokens:
            logger.warning("work_dropped fragment=%d tokens=%d why=%s", master.fragment, tokens, why)
            self._entered.tape.write(
                "dropped", fragment=master.fragment, version=master.version, tokens=tokens, why=why
            )

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
        if not self._wait_past({fragment.index: final - 1 for fragment in self._fragments}):
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

    def _wait_past(self, versions: dict[int, int]) -> bool:
        """Block until each fragment's open round is beyond the one given; False when interrupted first."""

        def arrived() -> bool:
            now = self._courier.versions()
            return all(now[index] > version for index, version in versions.items())

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
            if self._learner is not None:
                self._learner.leave()
            elif not self._finished:
                self._driver.announce("leaving")
        finally:  # a superseded site may not announce anything, and its threads stop all the same
            if self._learner is None:
                self._driver.close()
                self._courier.finish()
            self._runtime.close()
            self._store.close()

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the parameters: the run's manifest, by its sha256, and per fragment its
        base, what is out, the token counts. A learner's holds where it stood before, and what it has done since."""
        stands = self._saved.fragments if self._learner else [stand.to_dict() for stand in self._stands]
        learned = replace(self._learned, tokens=[*self._learner.trained]) if self._learner else Learned()
        return Saved(self._run.sha256, self._step, stands, learned).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; call before `join`, on parameters of the same checkpoint."""
        self._saved = Saved.from_dict(state)

    def summary(self) -> dict[str, Any]:
        """The site's part in the run, for result.json: rounds, masters (version and sha256), bytes, fates of tokens."""
        is_learner, traffic = self._learner is not None, self._store.traffic()
        masters = [] if is_learner else [self._courier.master(fragment.index) for fragment in self._fragments]
        return {
            "outer_rounds": sum(master.version for master in masters),
            "masters": [
                {"fragment": master.fragment, "version": master.version, "sha256": master.sha256} for master in masters
            ],
            "bytes_up": traffic.bytes_up,
            "bytes_down": traffic.bytes_down,
            "stall_s": self._stall_s,
            "finish_s": self._finish_s,
            "upload_s": 0.0 if is_learner else self._courier.uploads.seconds,
            "tokens": [stand.ledger.to_dict() for stand in self._stands],
        }
