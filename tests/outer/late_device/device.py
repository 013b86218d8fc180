"""The simulated device in a process of its own: registering a backend changes torch for a whole process.

`LateDevice` is the device as claims see it; `Process` runs claims in a child that has it, one after another.
"""

import ctypes
import faulthandler
import multiprocessing
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

NAME = "late"
NUM_DEVICES = 2
"""kDevices in streams.h."""
PAUSE_S = 0.05
DELAY_S = 0.002
LIMIT_S = 600
"""For one claim: a deadlock is what bugs here look like."""


class LateDevice:
    """The devices of this process, from a library that was built for this torch."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.late_close.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.late_close.restype = ctypes.c_int64
        self._library.late_open.argtypes = [ctypes.c_int64]
        self._library.late_num_reused.restype = ctypes.c_int64
        rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.__future__.set_swap_module_params_on_conversion(True)  # else a model that moves here unties its weights
        self.delay(DELAY_S)

    @property
    def count(self) -> int:
        return NUM_DEVICES

    @property
    def num_reused(self) -> int:
        """How often freed memory was handed out again, pinned or a device's."""
        return self._library.late_num_reused()

    def at(self, index: int) -> torch.device:
        return torch.device(NAME, index)

    def delay(self, delay_s: float) -> None:
        """Set how long each piece of work waits when its turn has come."""
        self._library.late_set_delay_us(ctypes.c_int64(round(1e6 * delay_s)))

    def pause(self, stream: torch.Stream) -> None:
        gate = self._library.late_close(stream.device_index, stream.stream_id)
        threading.Timer(PAUSE_S, self._library.late_open, [gate]).start()

    @contextmanager
    def held(self, stream: torch.Stream) -> Iterator[None]:
        gate = self._library.late_close(stream.device_index, stream.stream_id)
        try:
            yield
        finally:
            self._library.late_open(gate)

    def settle(self) -> None:
        """Leave nothing behind for the next claim."""
        for index in range(self.count):
            torch.accelerator.synchronize(index)
            assert torch.accelerator.current_stream(index).stream_id == 0, "a claim left its stream current"
        assert torch.accelerator.current_device_index() == 0, "a claim left its device current"


def _module() -> types.ModuleType:
    """What torch asks of a backend's Python module."""
    module = types.ModuleType(f"torch.{NAME}")
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "_lazy_init": None,  # without it torch 2.11 takes the device for unused, and `synchronize` doesn't wait
        "device_count": NUM_DEVICES,
        "manual_seed_all": None,  # called with the seed; it has no randomness of its own
    }
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    setattr(module, "current_device", torch.accelerator.current_device_index)  # noqa: B010
    return module


Claim = Callable[[LateDevice], None]


class Process:
    """A child with the device. One in which a claim failed, hung or crashed is replaced for the next."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._child: BaseProcess | None = None

    def failure(self, claim: Claim) -> str | None:
        """Run a claim, which is a function of a module; what went wrong, None when nothing did."""
        if self._child is None:
            self._start()
        try:
            self._pipe.send(claim)
            failure = self._pipe.recv() if self._pipe.poll(LIMIT_S) else f"nothing for {LIMIT_S} s: it was ended"
        except (EOFError, OSError) as error:
            failure = f"the child died: {error!r}"
        if failure is not None:
            self.end()
        return failure

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(theirs, self._library), daemon=True)
        child.start()
        theirs.close()
        self._child = child

    def end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()
            self._child = None


def _serve(pipe: Connection, library: Path) -> None:
    device = LateDevice(library)
    warnings.simplefilter("error")
    while True:
        claim: Claim = pipe.recv()
        faulthandler.dump_traceback_later(LIMIT_S - 5)
        try:
            claim(device)
            device.settle()
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
        faulthandler.cancel_dump_traceback_later()
