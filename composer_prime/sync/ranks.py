"""Between the ranks of one site: rank 0 leads and the others follow, over a gloo group of their own (rule 16).

Rank 0 alone decides and knows the bucket; it tells the others what to take part in. Fragments are gathered and
scattered on the training threads, so nothing overtakes the trainer's own collectives.
"""

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from composer_prime.errors import SiteError
from composer_prime.outer.fragments import Fragment
from composer_prime.outer.merge import Change, changed
from composer_prime.sync.parameters import RankedParameters
from composer_prime.sync.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 600.0
"""How long a rank waits for another: as far apart as ranks may come between two steps, a checkpoint's save included."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where it isn't set, gloo takes the address of the host's name: on some machines that is the loopback's."""
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

        Raises SiteError where the ranks don't reach each other.
        """
        self.timeout_s = timeout_s
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            interface = os.environ.get(GLOO_INTERFACE, "not set")
            raise SiteError(
                f"rank {dist.get_rank()} of this site's {dist.get_world_size()} doesn't reach the others over gloo: "
                "where none of them has ended, as their logs would say, set "
                f"{GLOO_INTERFACE} ({interface}) on every node to the network interface by which nodes reach each "
                f"other, as `ip -br address` lists them. {str(error).partition(chr(10))[0]}"
            ) from error
        self.group = cast(dist.ProcessGroup, group)
        self.rank = dist.get_rank(self.group)
        self.num_ranks = dist.get_world_size(self.group)
        self.lost: SiteError | None = None

    def exchange(
        self, command: Command | None = None, *, tokens: int = 0, samples: int = 0, interrupted: bool = False
    ) -> Heard:
        """Every rank gives its numbers, and rank 0 a command or none. Collective. Raises SiteError."""
        with self.together():
            if self.num_ranks == 1:  # a collective would do nothing but wake gloo's thread
                return Heard(tokens, samples, interrupted, command)
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
        """Around collectives: once one has failed the ranks are out of step, and further ones raise at once."""
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

    def change(self, fragment: Fragment, change: Change) -> None:
        self.write(fragment, changed(self.read(fragment), change))

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        return self._params.rounded(fragment, flat)
