"""One trainer's part in an outer run, from joining to its end: what the hook calls, free of upstream's names.

The run's terms come from its manifest; a run that was only announced is founded with this trainer's weights. The first
rank alone knows the bucket.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_prime.errors import BadInput, ConfigError, CorruptObject, KeyMissing
from composer_prime.outer.fragments import NamedShape
from composer_prime.plan.memory import check_memory
from composer_prime.private import sync_folder
from composer_prime.sites.embedded.result import write_whole
from composer_prime.sites.intact import damage, sums_line
from composer_prime.sites.prime_rl import checkpoints
from composer_prime.sites.prime_rl.result import RESULT, STEPS_LEFT
from composer_prime.sites.prime_rl.saying import naming_what_is_missing
from composer_prime.sites.prime_rl.settings import KEY, OUTER, SITE, HookSettings
from composer_prime.store import open_store, race_store
from composer_prime.store.base import Store
from composer_prime.sync.entering import SiteIdentity
from composer_prime.sync.founding import FoundingRecord, check_founded, find_founding
from composer_prime.sync.journal import FileJournal
from composer_prime.sync.metered import throttle
from composer_prime.sync.ranked_loop import RankedLoop
from composer_prime.sync.ranks import Ranks
from composer_prime.sync.records import Manifest
from composer_prime.sync.report import OuterReport
from composer_prime.sync.run import load_run
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.site_clock import OuterLoop
from composer_prime.sync.start import Founding
from composer_prime.sync.terms import Terms
from composer_prime.waiting import Waits

logger = logging.getLogger(__name__)


class Membership:
    """A trainer that has joined. The same calls on each rank: all wait for each other, and return and raise alike."""

    def __init__(self, loop: RankedLoop, parameters: Sequence[nn.Parameter], leading: "_Leading") -> None:
        self._loop = loop
        self._parameters = parameters
        self._leading = leading
        self._final: list[Tensor] | None = None

    @classmethod
    def join(
        cls,
        settings: HookSettings,
        folder: Path,
        named: Sequence[tuple[str, nn.Parameter]],
        loaded: checkpoints.OuterState | None,
        timeout_s: float,
        waits: Waits | None = None,
    ) -> "Membership":
        """Join the run that is named, or found it where it was announced; collective over the default process group.

        folder      what the outer loop keeps on this site's disk
        named       the trainable parameters, as the outer loop names them
        loaded      None: no checkpoint was
        timeout_s   how long a rank waits for another that is late
        waits       where rank 0 says what it waits for

        Raises BadInput when there is no run, when it has ended, or when this site doesn't fit it.
        """
        shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
        leading = _Leading(settings, folder, loaded, shapes, waits)
        loop = RankedLoop(Ranks(timeout_s), leading.open)
        loop.join(named)
        if leading.leads:
            leading.remember_run()
        member = cls(loop, [parameter for _, parameter in named], leading)
        if loop.finished:
            member._end_joining(resumed=loaded is not None and loaded.is_own)
        if leading.leads:
            fragments = len(loop.summary()["masters"])
            logger.info("joined uri=%s site=%s fragments=%d", settings.uri, settings.site, fragments)
        return member

    def after_step(self, tokens: int, samples: int, *, is_last: bool) -> OuterReport | None:
        """The outer loop's turn after an inner step; None once the run has ended: the parameters stay what they were.

        tokens, samples   trained by this rank in this step
        is_last           whether the trainer stops after this step
        """
        if self._final is not None:
            self._restore()
            return None
        report = self._loop.after_inner_step(tokens, samples)
        if report.stop:
            self._end(steps_left=not is_last)
            if self._leading.leads and not is_last:
                logger.warning(
                    "run_ended uri=%s: its masters are final, and this trainer holds them. The steps up to its "
                    "max_steps change nothing any more; it may be stopped",
                    self._leading.settings.uri,
                )
        elif is_last:
            self._loop.close()
            if self._leading.leads:
                logger.warning(
                    "left uri=%s rounds=%d: max_steps is reached and the run goes on; raise max_steps and resume to "
                    "go on with it",
                    self._leading.settings.uri,
                    report.round,
                )
        return report

    def save(self, trainer_checkpoint: Path) -> None:
        """Write the outer state of the checkpoint that upstream is about to write; only rank 0 has one."""
        if not self._leading.leads:
            return
        checkpoints.begin_saving(trainer_checkpoint)
        path = checkpoints.outer_state_file(trainer_checkpoint)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with part.open("wb") as file:
            torch.save(self._leading.checkpoint(self._loop.state_dict()), file)
            file.flush()
            os.fsync(file.fileno())
        write_whole(checkpoints.sums_file(path), sums_line(part, path.name))
        os.replace(part, path)
        sync_folder(path.parent)

    def _end_joining(self, resumed: bool) -> None:
        if not resumed:
            self._loop.close()
            raise ConfigError(
                f"the run at {self._leading.settings.uri} has ended, no site can join it: start another "
                "run from its masters with `composer-prime create RECIPE --from`"
            )
        self._end(steps_left=True)

    def _end(self, *, steps_left: bool) -> None:
        """Leave the run that has ended, and remember its masters as they lie here, shard by shard."""
        summary = self._loop.summary()
        self._loop.close()
        if self._leading.leads:
            self._leading.write_result(summary, steps_left)
        self._final = [_local(parameter).to("cpu", copy=True) for parameter in self._parameters]

    def _restore(self) -> None:
        assert self._final is not None
        with torch.no_grad():
            for parameter, final in zip(self._parameters, self._final, strict=True):
                _local(parameter).copy_(final)


class _Leading:
    """What rank 0 alone does: it opens the run, and knows which run a checkpoint belongs to."""

    def __init__(
        self,
        settings: HookSettings,
        folder: Path,
        loaded: checkpoints.OuterState | None,
        shapes: Sequence[NamedShape],
        waits: Waits | None = None,
    ) -> None:
        self.leads = dist.get_rank() == 0
        self.settings = settings
        self._folder = folder
        self._loaded = loaded
        self._shapes, self._waits = shapes, waits
        self._store: Store | None = None
        self._announced: FoundingRecord | None = None
        self._run: tuple[str, Manifest] | None = None

    @naming_what_is_missing()
    def open(self) -> OuterLoop:
        """This site's outer loop, with the state of its checkpoint. Raises BadInput, StoreError."""
        told = self.settings
        key = None if told.key_file is None else SigningKey.load(told.key_file)
        self._store = store = throttle(open_store(told.uri, told.key_file), told.mbit_up, told.mbit_down)
        self._announced = find_founding(store)
        founding, run, terms, signed = self._asked(self._announced)
        if signed and key is None:
            raise ConfigError(
                f"the run at {told.uri} admits keys, and site {told.site} has none: set {KEY} to its key file, which "
                "`composer-prime keygen` makes"
            )
        check_memory(terms, sum(math.prod(shape) for _, shape in self._shapes))
        outer = OuterLoop(
            store,
            terms,
            run=run,
            site=SiteIdentity(told.site, key, told.replace),
            founding=founding,
            journal=FileJournal(self._folder / "journal"),
            waits=self._waits,
        )
        state = None if self._loaded is None else self._restored(self._loaded)
        if state is not None:
            outer.load_state_dict(state)
        return outer

    def _asked(self, announced: FoundingRecord | None) -> tuple[Founding, str, Terms, bool]:
        """What the bucket asks of a site: of the run that is there, or of the one that was announced."""
        assert self._store is not None
        try:
            found = load_run(self._store)
        except KeyMissing:
            if announced is None:
                raise BadInput(
                    f"{self.settings.uri} holds no run: write it there with `composer-prime create RECIPE`, or correct "
                    f"{OUTER}, which names the run's own folder in the bucket"
                ) from None
            founding = Founding(announced.owner, announced.keys, race_store)
            return founding, announced.run, announced.terms, announced.owner is not None or bool(announced.keys)
        manifest = found.manifest
        check_founded(manifest, announced)
        self._run = found.sha256, manifest
        return Founding(), manifest.run, found.terms, manifest.owner is not None or bool(manifest.keys)

    def remember_run(self) -> None:
        """Which run was joined, for checkpoints; after joining, since this site may have founded it."""
        assert self._store is not None
        if self._run is None:
            found = load_run(self._store)
            check_founded(found.manifest, self._announced)
            self._run = found.sha256, found.manifest

    def checkpoint(self, outer: dict[str, Any]) -> dict[str, Any]:
        """The outer state as it lies beside a checkpoint: with the run and the site that it belongs to."""
        assert self._run is not None, "not joined"
        sha, manifest = self._run
        return {"manifest": sha, "run": manifest.run, "site": self.settings.site, "outer": outer}

    def _restored(self, loaded: checkpoints.OuterState) -> dict[str, Any] | None:
        """The outer state of a checkpoint; None where this trainer joins anew, since it has none or is another's.

        Raises ConfigError where it is another's and lies in this trainer's own folder: it isn't what was meant.
        """
        path, site = loaded.file, self.settings.site
        if not path.exists():
            logger.warning("no_outer_state path=%s: this site joins anew, from the run's masters", path)
            return None
        if (cause := damage(checkpoints.sums_file(path))) is not None:
            raise CorruptObject(f"{path} can't be taken ({cause}): delete it to join anew from the run's masters")
        state = torch.load(path, weights_only=True)
        sha = None if self._run is None else self._run[0]
        other_run, theirs = state["manifest"] != sha, state["site"]
        if (other_run or theirs != site) and not loaded.is_own:
            logger.warning(
                "anothers_state path=%s: it is of site %s in run %s, so this site joins anew, from its run's masters",
                path,
                theirs,
                state["run"],
            )
            return None
        if other_run:
            raise ConfigError(
                f"checkpoint {path} belongs to another run, {state['run']!r}, than {self.settings.uri}: name that run "
                f"in {OUTER}, or move {path} away to go on from this run's masters. A run's settings never change; "
                "`composer-prime create RECIPE --from` starts a new one from its masters"
            )
        if theirs != site:
            raise ConfigError(
                f"checkpoint {path} is of site {theirs} and this is site {site}, which would offer again what {theirs} "
                f"has offered: set {SITE} to {theirs}, or move {path} away to go on from the run's masters"
            )
        return state["outer"]

    def write_result(self, summary: dict[str, Any], steps_left: bool) -> None:
        """The run has ended: its rounds, the masters that the parameters hold, whether steps are left."""
        result = {"uri": self.settings.uri, "site": self.settings.site, STEPS_LEFT: steps_left} | {
            name: summary[name] for name in ("outer_rounds", "masters", "bytes_up", "bytes_down", "stall_s", "tokens")
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / RESULT, json.dumps(result, indent=1) + "\n")


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that lies on this rank."""
    from torch.distributed.tensor import DTensor

    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
