"""Every error we raise on purpose, in one tree, so that callers catch by cause and the CLI knows what to say.

    ComposerPrimeError
     +-- BadInput                 the person can fix it: one line, exit code 2, no traceback
     |    +-- BadInputs             several of them, a line each
     |    +-- ConfigError           a recipe or an override: unknown key, value out of bounds
     |    +-- ModelError            a model folder that isn't one
     |    +-- EnvError              an environment that can't be imported
     |    +-- FingerprintMismatch   this site's recipe or model differs from the run it wants to join
     |    +-- StoreUnusable         a store that can't be reached or written, or lets two writers win
     |    +-- TeacherRefused        a teacher that can't be used: not there, another tokenizer, no prompt logprobs
     |    +-- PayloadLost           nobody has the payload that a commit takes: the site can't pass its round
     |    +-- SiteRevoked           the run's owner has taken this site's key out of the run
     |    +-- InvitationRefused     an invitation that is forged, expired, revoked, or of another run
     |    +-- MachineUnfit          this machine can't do what the recipe needs
     +-- StoreError               the store failed while in use; a retry may succeed
     |    +-- KeyMissing            no object at that key
     |    +-- RoundWaits            what a commit takes is gone or damaged in the bucket: its round can't be passed now
     +-- TeacherError             a teacher gave no usable answer: it drops out of a mixture
     +-- ProtocolError            the bucket holds what no sound site writes
     |    +-- CorruptObject         an object whose bytes don't match its record
     |    |    +-- PayloadUnsound     they have the hash that it states, and are no sound payload
     |    +-- MasterMismatch        our masters differ from the other sites'
     |    +-- Superseded            another process of our name has a higher incarnation
     |    +-- RunGone               the bucket no longer holds the run we are in
     |    |    +-- RunReplaced        it holds another one
     +-- SiteError                a process of a site failed
     |    +-- ProcessCrashed        carries the last lines of the process's log
     |    +-- SystemRefused         the system takes no more of a process: its disk, a limit or a permission
     +-- ExecutorError            a platform that runs sites failed, after retries
          +-- JobUnknown            the platform has no such job

A message states the value, the limit and the remedy.
"""

import errno
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from composer_prime.visible import MAX_MESSAGE, shown, visible

INSTALL = "in the clone of composer-prime, pip install -e '.[{}]'"
"""The remedy for a missing package, by the extra of ours that brings it."""


class ComposerPrimeError(Exception):
    """Base of every error raised on purpose. Its text shows no control that it may quote (visible.py)."""

    exit_code = 1
    has_lines: ClassVar[bool] = False
    """Whether a message may have several lines, such as the end of a process's log; else they are spelled."""

    def __str__(self) -> str:
        return visible(super().__str__(), MAX_MESSAGE, lines=self.has_lines)


class BadInput(ComposerPrimeError):
    """The person can fix this: shown as one line, exit code 2."""

    exit_code = 2


class BadInputs(BadInput):
    """Several things to fix, a line each."""

    has_lines = True


class Problems:
    """Faults that a person must mend: found one by one, said all at once."""

    def __init__(self) -> None:
        self.found: list[BadInput] = []

    def note(self, problem: BadInput | str) -> None:
        if str(problem) not in map(str, self.found):
            self.found.append(problem if isinstance(problem, BadInput) else BadInput(problem))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep a BadInput that is raised within, and go on."""
        try:
            yield
        except BadInput as error:
            self.note(error)

    def gather(self, *checks: Callable[[], object]) -> None:
        """Make all these checks, and keep what they raise."""
        for check in checks:
            with self.noted():
                check()

    def check(self) -> None:
        """Raise what was found: itself where it is one, else BadInputs, a line for each."""
        if len(self.found) > 1:
            raise BadInputs("\n".join(map(str, self.found)))
        if self.found:
            raise self.found[0]


class ConfigError(BadInput):
    """A recipe or an override is wrong."""


class ModelError(BadInput):
    """A model name or folder can't be loaded."""


class EnvError(BadInput):
    """A verifiers environment can't be imported or resolved; the message holds the real cause."""


class FingerprintMismatch(BadInput):
    """This site's recipe or model differs from the run in the bucket; the message shows the difference."""


class StoreUnusable(BadInput):
    """The store can't be reached or written, or doesn't hold what the protocol needs of it."""


class TeacherRefused(BadInput):
    """A teacher can't be used: it isn't reachable, reads token ids otherwise, or gives no prompt logprobs."""


class PayloadLost(BadInput):
    """What a commit takes has been gone or damaged for so long that nobody seems to have it: restore it."""


class SiteRevoked(BadInput):
    """The run's owner has taken this site's key out of the run."""

    OPENING = "the run's owner revoked site"
    """How the message begins: it goes from one process to another as a line."""

    @classmethod
    def of(cls, site: str) -> "SiteRevoked":
        """The error that says so of a site."""
        return cls(f"{cls.OPENING} {site}: nothing more of it counts; what was merged stays")


class InvitationRefused(BadInput):
    """An invitation to a run doesn't hold: it is no invitation, forged, expired, revoked, or of another run."""


class MachineUnfit(BadInput):
    """This machine can't do what the recipe needs; the message has the numbers."""


class TeacherError(ComposerPrimeError):
    """A served model gave no usable answer to one request."""


class StoreError(ComposerPrimeError):
    """The store failed while in use."""


class KeyMissing(StoreError):
    """No object at that key."""


class RoundWaits(StoreError):
    """What a commit takes is gone or damaged in the bucket; who hasn't passed the round waits until it is restored."""


class ProtocolError(ComposerPrimeError):
    """The bucket holds something that no sound site writes."""


class CorruptObject(ProtocolError):
    """An object's bytes don't match the record that names it."""


class PayloadUnsound(CorruptObject):
    """A payload's bytes are those that were signed, and break their codec, or have another norm: so it is for ever."""


class MasterMismatch(ProtocolError):
    """Our masters differ from those on which the other sites' offers stand."""


class Superseded(ProtocolError):
    """Another process of our site's name holds a higher incarnation."""


class RunGone(ProtocolError):
    """The bucket no longer holds the run that this site takes part in."""


class RunReplaced(RunGone):
    """The bucket holds another run in its place: that doesn't pass."""


class SiteError(ComposerPrimeError):
    """A process of a site failed."""

    has_lines = True


class ProcessCrashed(SiteError):
    """A process ended that should not have; the message carries the last lines of its log."""


class SystemRefused(SiteError):
    """The system takes no more of a process: its disk is full, a limit is reached, or a permission is missing."""

    exit_code = 74
    """As sysexits.h has it for I/O; a launch starts the site again, maybe on a machine that takes more."""

    @classmethod
    def of(
        cls, error: BaseException, folder: Path | None = None, then: str = ", then go on with --resume"
    ) -> "SystemRefused | None":
        """What the system refused, in one line; None for any other error. `folder`: where the process writes."""
        number = error.errno if isinstance(error, OSError) else None
        if not isinstance(error, OSError) or number not in _REMEDIES:
            return None
        value = f"limit {resource.getrlimit(_LIMITS[number])[0]:,}" if number in _LIMITS else ""
        if folder is not None and number in (errno.ENOSPC, errno.EDQUOT):
            value = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"
        place = error.filename or folder or "a file"
        return cls(f"{place}: {error.strerror}{value and f' ({value})'}: {_REMEDIES[number]}{then}")


def remedy_of(error: OSError) -> str | None:
    """What a person does about a refusal of the system; None where it isn't one of those that are known."""
    return _REMEDIES.get(error.errno or 0)


_LIMITS = {errno.EFBIG: resource.RLIMIT_FSIZE, errno.EMFILE: resource.RLIMIT_NOFILE}
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give this user write access or choose another folder"),
    errno.ENOTDIR: "choose another folder",
}


def last_words(error: ComposerPrimeError | OSError, name: str = "error", folder: Path | None = None) -> int:
    """Say on stderr, in one line, what ends this process; its exit code. An error that is a fault of ours is raised."""
    told = error if isinstance(error, ComposerPrimeError) else SystemRefused.of(error, folder)
    if told is None:
        raise error
    text = f"{name}: {told}"  # the redactor may have to open a file that the system refuses
    with suppress(OSError):  # the log may be on the disk that is full
        print(text if isinstance(told, SystemRefused) else shown(text, lines=True), file=sys.stderr, flush=True)
    return told.exit_code


class ExecutorError(ComposerPrimeError):
    """A platform that runs sites failed, after retries; the message says what may still be running there."""

    has_lines = True


class JobUnknown(ExecutorError):
    """The platform has no such job (any more)."""
