"""The outer loop of a site of several ranks, the same calls as `OuterLoop` on each of them (rule 16).

Rank 0 runs the outer loop; the others take part in moving fragments when it says so, and get its reports.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from torch import nn

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ComposerPrimeError, ConfigError, SiteError
from composer_prime.outer.fragments import trainable
from composer_prime.sync.parameters import RankedParameters
from composer_prime.sync.ranks import Command, Heard, Lead, LedParameters, Ranks
from composer_prime.sync.report import OuterReport
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.site_clock import OuterLoop

T = TypeVar("T")


class RankedLoop:
    """One site's part in a run, on each of its ranks; the same calls as `OuterLoop`.

    Every rank makes one, joins, and calls `after_inner_step` after each step, on its training thread; these three wait
    for all ranks, and return and raise the same on all. The rest concerns one rank alone. A waiting rank 0 keeps the
    others waiting, however long; a rank that dies or hangs makes all others raise SiteError within `ranks.timeout_s`.
    """

    def __init__(self, ranks: Ranks, lead: Callable[[], OuterLoop], runtime: Runtime | None = None) -> None:
        """
        lead     makes the site's outer loop; called on rank 0 only, since the others never touch the store
        runtime  threads and time; None: this process's own
        """
        self._ranks = ranks
        self._outer: OuterLoop | None = None
        self._lead: Lead | None = None
        self._params: RankedParameters | None = None
        self._interrupted = False
        self._finished = False
        if ranks.rank == 0:
            self._lead = Lead(ranks, runtime or ThreadRuntime(), self._interrupt_lead)
        try:
            self._in_step(lambda heard: self._open(lead))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_settings(cls, settings: SiteSettings, ranks: Ranks) -> "RankedLoop":
        """The outer loop that a site's recipe asks for. Raises ConfigError when it asks for none."""
        return cls(ranks, partial(OuterLoop.from_settings, settings))

    def _open(self, lead: Callable[[], OuterLoop]) -> None:
        self._outer = lead()

    def join(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """As `OuterLoop.join`. All ranks pass the same parameters: DTensors over all of them, or whole ones.

        Also raises ConfigError when the ranks' parameters differ.
        """
        params = self._params = RankedParameters(dict(trainable(named_parameters)), self._ranks.group)
        with self._ranks.together():
            fault = params.fault()
        if fault is not None:
            raise ConfigError(fault)
        self._finished = self._in_step(lambda heard: self._join(params))

    def _join(self, params: RankedParameters) -> bool:
        assert self._lead is not None and self._outer is not None
        self._outer.join_with(LedParameters(self._lead, params))
        return self._outer.finished

    def after_inner_step(self, tokens: int, samples: int) -> OuterReport:
        """As `OuterLoop.after_inner_step`; tokens and samples are those of this rank, and are summed."""
        report = self._in_step(self._after_inner_step, tokens, samples)
        self._finished = report.stop
        return report

    def _after_inner_step(self, heard: Heard) -> OuterReport:
        assert self._outer is not None
        return self._outer.after_inner_step(heard.tokens, heard.samples)

    def _in_step(self, act: Callable[[Heard], T], tokens: int = 0, samples: int = 0) -> T:
        """`act` on rank 0, while the others do what it tells them; the same result or error on all ranks."""
        if self._lead is None:
            return self._follow(tokens, samples)
        heard = self._lead.begin(tokens, samples)
        try:
            result = act(heard)
        except BaseException as error:
            with suppress(SiteError):  # the others are gone, and `error` says so or matters more
                self._lead.end(Command("failed", _tellable(error)))
            raise
        self._lead.end(Command("done", result))
        return result

    def _follow(self, tokens: int, samples: int) -> Any:
        heard = self._ranks.exchange(tokens=tokens, samples=samples, interrupted=self._interrupted)
        while True:
            command = heard.command
            if command is not None and command.kind == "done":
                return command.what
            if command is not None and command.kind == "failed":
                raise command.what
            if command is not None:
                with self._ranks.together():
                    self._take_part(command)
            heard = self._ranks.exchange(interrupted=self._interrupted)

    def _take_part(self, command: Command) -> None:
        assert self._params is not None
        if command.kind == "gather":
            self._params.gather(command.what)
        else:
            self._params.scatter(command.what, None)

    def _interrupt_lead(self) -> None:
        if self._outer is not None:
            self._outer.interrupt()

    def interrupt(self) -> None:
        """As `OuterLoop.interrupt`, for all ranks; takes effect with the next word between them."""
        self._interrupted = True
        self._interrupt_lead()

    @property
    def finished(self) -> bool:
        """Whether the run has ended; true right after `join` when it had ended before."""
        return self._finished

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 as `OuterLoop.state_dict`, whole fragments in fp32, whatever the ranks; empty on the others."""
        return {} if self._outer is None else self._outer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what rank 0's `state_dict` gave, at any number of ranks; the others' states don't count."""
        if self._outer is not None:
            self._outer.load_state_dict(state)

    def summary(self) -> dict[str, Any]:
        """On rank 0 as `OuterLoop.summary`; empty on the others."""
        return {} if self._outer is None else self._outer.summary()

    def close(self) -> None:
        """Leave; waits for no other rank."""
        try:
            if self._outer is not None:
                self._outer.close()
        finally:
            if self._lead is not None:
                self._lead.close()


def _tellable(error: BaseException) -> ComposerPrimeError:
    """Rank 0's error as the others raise it: itself when it is one of ours, so that all exit alike."""
    if isinstance(error, ComposerPrimeError):
        return error
    return SiteError(f"rank 0 of this site failed: {type(error).__name__}: {error}")
