"""What all stores behind a server share: first contact, retries, credentials that expire, and what an answer means."""

import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from os import environ
from typing import NamedTuple, TypeVar

from composer_prime.errors import KeyMissing, StoreError, StoreUnusable
from composer_prime.store import keys
from composer_prime.store.base import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 20
"""Silence after which a request counts as lost; not a limit on how long a transfer takes."""
FIRST_CONTACT_S = 5
"""For how long a store that has never answered is tried again: a person waits for the error."""
FIRST_ANSWER_S = 20
"""How long first contact may take in all, name look-up and credentials included."""
RETRY_S = 30
"""For how long, after its first failure, an operation on a store that has answered before is tried again."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 4
OPERATION_S = 90
"""Longest that an operation may take in all, tries and pauses included, apart from the bytes it moves."""
SLOWEST_BYTES_PER_S = 2**18
"""A transfer slower than this counts as lost, even when bytes still trickle."""
UNKNOWN_SIZE_S = 3600
"""Longest that reading an object of unknown size may take."""

ANONYMOUS_VARIABLE = "COMPOSER_PRIME_ANONYMOUS"
"""Environment variable; "1": requests to a bucket carry nothing of this machine's user. Set by invitations."""


def is_anonymous() -> bool:
    """Whether no credentials may be looked for, nor sent."""
    return environ.get(ANONYMOUS_VARIABLE) == "1"


_RENEW = "renew the credentials, or let them list, read, write and delete there; they are read again at every retry"
_ANONYMOUS = (
    "the requests carry no credentials, since the invitation holds none for this bucket: ask the run's owner for some, "
    "or add --use-my-aws to sign with your own"
)


class Verdict(Enum):
    """What a failure means for another try."""

    PASSES = "the same request may succeed a moment later"
    REFUSED = "the credentials are missing, wrong or expired"
    LASTS = "the same request would fail again"


class Answer(NamedTuple):
    """What a server said of a request that failed. Status 0: none did; then `words` say what happened."""

    status: int
    code: str
    words: str

    @property
    def passes(self) -> bool:
        """Whether the server may answer otherwise a moment later."""
        status = self.status
        return status in (408, 409, 425, 429) or (status >= 500 and status != 501) or self.code == "SlowDown"


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}  # AWS says 400 to these
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_HIDDEN = "InvalidObjectState"
"""An object that its writer put into an archive: nobody reads it, and no credentials help."""
_HIDDEN_WORDS = "Server Side Encryption"
"""What AWS says (400 InvalidRequest) of an object that its writer encrypted with a key of its own."""


class RemoteStore(Store):
    """A store over plain requests to a server; a subclass makes them, and says by `_answer` why one failed.

    The first use asks the server for one name, so that a wrong endpoint, bucket or key is StoreUnusable within 10 s;
    a store that fails after it has answered is StoreError, after RETRY_S of trying. Credentials that are refused then
    are read anew, once at once and again by every later call, so that renewing them heals a run.
    """

    _failures: tuple[type[Exception], ...]
    """What the client raises when an operation fails, and OSError."""
    _credentials_remedy: str
    """What a person does when the credentials are refused at first contact."""
    _endpoint: str
    """Whom a person should look for when nobody answers."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._reached = False

    def _renew(self) -> None:
        """Read the credentials, as the environment has them then, before the next try."""
        return

    def _look(self, left_s: float) -> object:
        """Ask the server for little, within `left_s` seconds."""
        return self._names(keys.probe(""), left_s)

    @abstractmethod
    def _fetch(self, key: str, left_s: float, span: tuple[int, int] | None) -> bytes:
        """An object's bytes, or those from the first to the last of `span`."""

    @abstractmethod
    def _store(self, key: str, data: bytes | memoryview, left_s: float, *, if_absent: bool) -> None:
        """Write an object, whole or not at all. Status 412: something stands there, and it may not be overwritten."""

    @abstractmethod
    def _names(self, prefix: str, left_s: float) -> list[str]:
        """Names among which are all that start with the prefix."""

    @abstractmethod
    def _remove(self, key: str, left_s: float) -> None: ...

    @abstractmethod
    def _answer(self, error: Exception) -> Answer: ...

    def _create(self, key: str, data: bytes) -> bool:
        return self._write("create", key, data)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        if not self._write("put", key, data):
            raise StoreError(f"put of {key} in {self.uri} failed: other bytes stand there, and it is written once")

    def _write(self, act: str, key: str, data: bytes | memoryview) -> bool:
        """Whether the bytes stand at the key: written now, or by our own first try."""
        is_create = act == "create"

        def attempt(left_s: float) -> bool:
            try:
                self._store(key, data, left_s, if_absent=is_create)
                return True
            except self._failures as error:
                status = self._answer(error).status
                if status != 412 and not (status == 409 and is_create):
                    raise
            try:
                return self._fetch_up_to(key, left_s, 0, len(data) + 1) == data
            except self._failures as error:
                if self._answer(error).status == 404:
                    raise ConnectionError("what was there first isn't written yet, or is gone") from error
                raise

        return self._run(act, key, attempt, num_bytes=2 * len(data) if is_create else len(data))

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        if span is None:
            return self._run("get", key, lambda left_s: self._fetch(key, left_s, None), num_bytes=None)
        return self._run("get", key, lambda left_s: self._fetch_up_to(key, left_s, *span), num_bytes=span[1])

    def _fetch_up_to(self, key: str, left_s: float, start: int, length: int) -> bytes:
        last = start + max(length, 1) - 1  # HTTP can't ask for no byte, and a missing object must still be noticed
        try:
            return self._fetch(key, left_s, (start, last))[:length]
        except self._failures as error:
            if self._answer(error).status == 416:  # past the end
                return b""
            raise

    def _list(self, prefix: str) -> list[str]:
        return self._run("list", prefix, lambda left_s: self._names(prefix, left_s))

    def _delete(self, key: str) -> None:
        with suppress(KeyMissing):
            self._run("delete", key, lambda left_s: self._remove(key, left_s))

    def _run(self, act: str, key: str, attempt: Callable[[float], T], *, num_bytes: int | None = 0) -> T:
        """The result of an attempt that may take so many seconds and moves about `num_bytes` (None: nobody knows)."""
        if not self._reached:
            self.introduce()
        deadline_s = UNKNOWN_SIZE_S if num_bytes is None else OPERATION_S + num_bytes / SLOWEST_BYTES_PER_S
        return self._retry(act, key, attempt, RETRY_S, deadline_s)

    def introduce(self) -> None:
        try:
            self._retry("first contact", "", self._look, FIRST_CONTACT_S, FIRST_ANSWER_S)
        except StoreError as error:
            raise StoreUnusable(str(error)) from error
        self._reached = True

    def _retry(self, act: str, key: str, attempt: Callable[[float], T], retry_s: float, deadline_s: float) -> T:
        """Try until `retry_s` after the first failure, and `deadline_s` in all.

        Pauses grow and are drawn at random, so that sites which lost the same server don't come back to it together.
        """
        deadline = time.monotonic() + deadline_s
        give_up_at, longest_pause, num_refused = None, FIRST_PAUSE_S, 0
        while True:
            try:
                return attempt(max(deadline - time.monotonic(), 0.001))
            except self._failures as error:
                verdict, now = self._verdict(error), time.monotonic()
                may_pass = verdict is Verdict.PASSES
                if verdict is Verdict.REFUSED:
                    num_refused += 1
                    may_pass = self._reached and num_refused == 1
                    self._renew()
                pause = random.uniform(longest_pause / 2, longest_pause)
                give_up_at = min(deadline, now + retry_s) if give_up_at is None else give_up_at
                if not may_pass or now + pause > give_up_at:
                    raise self._failure(f"{act}{key and f' of {key}'} in {self.uri} failed", key, error) from error
                cause = str(error).partition("\n")[0] or type(error).__name__
                level, what = logging.WARNING if self._reached else logging.INFO, f"act={act!r} key={key}"
                log.log(level, "store=%s %s retry_in_s=%.2f cause=%r", self.uri, what, pause, cause)
            time.sleep(pause)
            longest_pause = min(2 * longest_pause, MAX_PAUSE_S)

    def _verdict(self, error: Exception) -> Verdict:
        answer = self._answer(error)
        status, code, _ = answer
        if not status:
            return Verdict.LASTS if isinstance(error, ValueError) else Verdict.PASSES
        if status in (401, 403, 404) and not code:  # what isn't the service's own word is no word on keys or objects
            return Verdict.PASSES
        if code in _EXPIRED or (status in (401, 403) and code not in _ELSEWHERE and code != _HIDDEN):
            return Verdict.REFUSED
        return Verdict.PASSES if answer.passes else Verdict.LASTS

    def _failure(self, what: str, key: str, error: Exception) -> Exception:
        """Our error for a failure: what failed, why, and what to do about it."""
        status, code, words = self._answer(error)
        cause = f"{what}: {words} ({code or status or type(error).__name__})"
        if self._verdict(error) is Verdict.REFUSED:
            kind, remedy = (StoreError, _RENEW) if self._reached else (StoreUnusable, self._credentials_remedy)
            return kind(f"{cause}: {_ANONYMOUS if is_anonymous() else remedy}")
        if status == 301 or code in _ELSEWHERE:
            return StoreUnusable(f"{cause}: set AWS_DEFAULT_REGION to the bucket's region")
        if code and status == 404:
            if code in ("NoSuchBucket", "ContainerNotFound") or not key:
                return StoreUnusable(f"{what}: there is no such bucket: make it or correct the URI")
            return KeyMissing(f"no object at {key} in {self.uri}")
        if code == _HIDDEN or (code == "InvalidRequest" and _HIDDEN_WORDS in words):
            return KeyMissing(f"no object that anybody can read at {key} in {self.uri}: {words} ({code})")
        if not status or not code:
            return StoreError(
                f"{what}: no sound answer from {self._endpoint} ({status or type(error).__name__}: {words}): "
                "check the network and the endpoint, then try again"
            )
        return StoreError(f"{cause}: check the store's log")
