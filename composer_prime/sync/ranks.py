"""A site of several ranks: rank 0 leads the outer loop, the others follow it from step to step (rule 16).

Rank 0 alone decides and knows the bucket. It tells the others what to take part in over a gloo group of their own;
fragments are gathered and scattered on the training threads, so nothing overtakes the trainer's own collectives.
"""

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_prime.config.settings import SiteSettings
from composer_prime.errors import ComposerPrimeError, ConfigError, SiteError
from composer_prime.outer.fragments import Fragment, trainable
from composer_prime.sync.parameters import RankedParameters
from composer_prime.sync.runtime import Runtime, ThreadRuntime
from composer_prime.sync.site_clock import OuterLoop, OuterReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 600.0
"""How long a rank waits for another: as far apart as ranks may come between two steps, a checkpoint's save included."""
SIGN_S = 5.0
"""Seconds between the signs of life that a busy rank 0 gives, which also bring it the others' interrupts."""
SIGNS_PER_TIMEOUT = 4
"""Signs within the time-out, at least."""


@dataclass(frozen=True)
class Command:
    """What rank 0 tells the others: take part in moving a fragment, or the result or error that it has ended with."""

    kind: Literal["gather", "scatter", "done", "failed"]
    what: Any


@dataclass(frozen=True)
class Heard:
    """What every rank knows after an exchange: the sums over all ranks, and rank 0's command if it gave one."""

    tokens: int
    samples: int
    interrupted: bool
    command: Command | None


class Ranks:
    """All ranks of the default process group as one site, on a gloo group of their own."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """Collective over the default process group.

        timeout_s  how long a rank waits for another that is late, before all give the site up
        """
        self.timeout_s = timeout_s
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        self.rank = dist.get_rank(self.group)
        self.num_ranks = dist.get_world_size(self.group)
        self.lost: SiteError | None = None

    def exchange(
        self, command: Command | None = None, *, tokens: int = 0, samples: int = 0, interrupted: bool = False
    ) -> Heard:
        """Every rank gives its numbers, and rank 0 a command or none. Collective. Raises SiteError."""
        with self.together():
            message = b"" if command is None else pickle.dumps(command)
            header = torch.tensor([len(message), tokens, samples, int(interrupted)])
            dist.all_reduce(header, group=self.group)
            length, tokens, samples, interrupts = header.tolist()
            if length and self.rank:
                body = torch.empty(length, dtype=torch.uint8)
                dist.broadcast(body, group=self.group, group_src=0)
                command = pickle.loads(body.numpy().tobytes())
            elif length:
                dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), group=self.group, group_src=0)
        return Heard(tokens, samples, interrupts > 0, command)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around collectives: when one fails, the ranks are out of step for good: further ones raise at once."""
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            self.lost = SiteError(
                f"rank {self.rank} of this site's {self.num_ranks} lost the others (one died, or was late by more than "
                f"the limit of {self.timeout_s:g} s): look at the other ranks' logs, then restart the site. {error}"
            )
            raise self.lost from error
        except BaseException as error:
            self.lost = SiteError(f"rank {self.rank} of this site left a collective: {error!r}")
            raise


class Lead:
    """Rank 0's hold on the others from `begin` to `end`. While it is busy with the bucket they get signs of life."""

    def __init__(self, ranks: Ranks, runtime: Runtime, wake: Callable[[], None]) -> None:
        """wake: frees the training thread from a wait; called when a rank is lost, or wants to stop"""
        self._ranks = ranks
        self._runtime = runtime
        self._wake = wake
        self._every_s = min(SIGN_S, ranks.timeout_s / SIGNS_PER_TIMEOUT)
        self._turn = runtime.condition()  # held through each exchange and what it starts: one at a time
        self._listening = False
        self._stop = False
        self._spoke_at = 0.0
        self._task = runtime.spawn("outer-ranks", self._give_signs) if ranks.num_ranks > 1 else None

    def begin(self, tokens: int, samples: int) -> Heard:
        """Wait for the others to listen; the sums of what was trained."""
        with self._turn:
            heard = self._ranks.exchange(tokens=tokens, samples=samples)
            self._listening, self._spoke_at = True, self._runtime.now()
            self._turn.notify_all()
        if heard.interrupted:
            self._wake()
        return heard

    def tell(self, command: Command, act: Callable[[], T]) -> T:
        """Have the others do their part of a command, and do one's own."""
        with self._turn:
            self._ranks.exchange(command)
            with self._ranks.together():
                done = act()
            self._spoke_at = self._runtime.now()
            return done

    def end(self, command: Command) -> None:
        """Let the others go."""
        with self._turn:
            self._listening = False
            self._ranks.exchange(command)

    def close(self) -> None:
        """Give no more signs."""
        with self._turn:
            self._stop = True
            self._turn.notify_all()
        if self._task is not None:
            self._task.join(timeout=self._ranks.timeout_s)

    def _give_signs(self) -> None:
        with self._turn:
            while not self._stop:
                left = self._spoke_at + self._every_s - self._runtime.now()
                if not self._listening or self._ranks.lost is not None:
                    self._turn.wait()
                elif left > 0:
                    self._turn.wait(timeout=left)
                else:
                    self._give_sign()

    def _give_sign(self) -> None:
        try:
            interrupted = self._ranks.exchange().interrupted
        except SiteError as error:  # raised on the training thread, by its next word to the others
            logger.error("rank_lost error=%s", error)
            interrupted = True
        self._spoke_at = self._runtime.now()
        if interrupted:
            self._wake()


class LedParameters:
    """All ranks' parameters as rank 0's outer loop sees them."""

    def __init__(self, lead: Lead, params: RankedParameters) -> None:
        self._lead = lead
        self._params = params

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._params.shapes()

    def read(self, fragment: Fragment) -> Tensor:
        flat = self._lead.tell(Command("gather", fragment), partial(self._params.gather, fragment))
        assert flat is not None
        return flat

    def write(self, fragment: Fragment, flat: Tensor) -> Tensor:
        held = self._lead.tell(Command("scatter", fragment), partial(self._params.scatter, fragment, flat))
        assert held is not None
        return held

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        return self._params.rounded(fragment, flat)


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
