"""What all stores behind a server share: first contact, retries, credentials that expire, and what an answer means."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from os import environ
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from composer_prime.errors import ConfigError, KeyMissing, StoreError, StoreUnusable
from composer_prime.store.base import Backend, is_key
from composer_prime.store.retry import Patience, patience_for, retry

T = TypeVar("T")
Client = Any

CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 20
"""Silence after which a request counts as lost; not a limit on how long a transfer takes."""
FIRST_CONTACT_S = 5
"""For how long a store that has never answered is tried again: a person waits for the error."""
FIRST_ANSWER_S = 20
"""How long first contact may take in all, name look-up and credentials included."""

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


class NoCredentials(Exception):
    """There are none, and why."""


class RemoteStore(Backend):
    """The part of a store that doesn't depend on whose server it is.

    The first use asks the bucket for one name, so that a wrong endpoint, bucket or key is StoreUnusable within 10 s;
    a store that fails after it has answered is StoreError, after RETRY_S of trying. Credentials that are refused then
    are read anew, once at once and again by every later call, so that renewing them heals a run.
    """

    _failures: tuple[type[Exception], ...]
    """What the client raises when an operation fails."""
    _credentials_remedy: str
    """What a person does when the credentials are refused at first contact."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._made: Client = None
        self._connecting = Lock()
        self._reached = False

    @abstractmethod
    def _connect(self) -> Client:
        """A new client, with credentials as the environment has them now."""

    @abstractmethod
    def _look(self, client: Client, left_s: float) -> object:
        """Ask the bucket for a few names, within `left_s` seconds."""

    @abstractmethod
    def _verdict(self, error: Exception) -> Verdict: ...

    @abstractmethod
    def _cause(self, error: Exception) -> str:
        """Why it failed, in the server's words and with its code."""

    @abstractmethod
    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        """Our error for a failure that is not about credentials: `what` failed, why, and what to do about it."""

    def close(self) -> None:
        """See `Store.close`."""
        self._made = None

    def _run(self, act: str, key: str, attempt: Callable[[Client, float], T], *, num_bytes: int | None = 0) -> T:
        """The attempt's result, retried while the failure may pass; our errors instead of the client's.

        attempt     gets a client and the seconds it may take.
        num_bytes   about how many it moves; None when nobody knows.
        """
        if not self._reached:
            self._reach()
        return self._retry(act, key, attempt, patience_for(num_bytes))

    def _reach(self) -> None:
        """Ask for a few names; StoreUnusable when the bucket can't be listed, for whatever reason."""
        try:
            self._retry("first contact", "", self._look, Patience(FIRST_CONTACT_S, FIRST_ANSWER_S))
        except StoreError as error:
            raise StoreUnusable(str(error)) from error
        self._reached = True

    def _retry(self, act: str, key: str, attempt: Callable[[Client, float], T], patience: Patience) -> T:
        num_refused = 0

        def attempt_once(left_s: float) -> T:
            nonlocal num_refused
            client = self._made
            try:
                if client is None:
                    with self._connecting:  # of two clients one would never be closed
                        client = self._made = self._made or self._connect()
                return attempt(client, left_s)
            except self._failures as error:
                if self._verdict(error) is Verdict.REFUSED:
                    num_refused += 1
                    if self._made is client:  # not closed: other threads may be using it
                        self._made = None
                raise

        def may_pass(error: Exception) -> bool:
            verdict = self._verdict(error)
            renewable = verdict is Verdict.REFUSED and self._reached and num_refused == 1
            return renewable or verdict is Verdict.PASSES

        what = f"store={self.uri} act={act!r} key={key}"
        level = logging.WARNING if self._reached else logging.INFO
        try:
            return retry(attempt_once, patience, failures=self._failures, may_pass=may_pass, what=what, level=level)
        except self._failures as error:
            raise self._failure(act, key, error) from error

    def _failure(self, act: str, key: str, error: Exception) -> Exception:
        what = f"{act} of {key} in {self.uri}" if key else f"{act} in {self.uri}"
        if self._verdict(error) is not Verdict.REFUSED:
            return self._translated(what, key, error)
        kind, remedy = (StoreError, _RENEW) if self._reached else (StoreUnusable, self._credentials_remedy)
        return kind(f"{what} failed: {self._cause(error)}: {_ANONYMOUS if is_anonymous() else remedy}")


class Answer(NamedTuple):
    """What a server said of a request that failed. Status 0: none did; then `words` say what happened."""

    status: int
    code: str
    words: str


class Vanished(Exception):
    """What beat our create is not there when we read it back: still being written, or deleted. Worth another try."""


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}  # AWS says 400 to these
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_HIDDEN = "InvalidObjectState"
"""An object that its writer put into an archive: nobody reads it, and no credentials help."""
_HIDDEN_WORDS = "Server Side Encryption"
"""What AWS says (400 InvalidRequest) of an object that its writer encrypted with a key of its own."""


class BucketStore(RemoteStore):
    """A store over a bucket whose client makes plain requests, and says by `_answer` why one failed."""

    _endpoint: str
    """Whom a person should look for when nobody answers."""

    @abstractmethod
    def _fetch(self, client: Client, key: str, left_s: float, span: tuple[int, int] | None) -> bytes:
        """An object's bytes, or those from the first to the last of `span`."""

    @abstractmethod
    def _store(self, client: Client, key: str, data: bytes | memoryview, left_s: float, *, if_absent: bool) -> None:
        """Write an object, whole or not at all."""

    @abstractmethod
    def _names(self, client: Client, prefix: str, left_s: float) -> list[str]:
        """Names among which are all that start with the prefix."""

    @abstractmethod
    def _remove(self, client: Client, key: str, left_s: float) -> None: ...

    @abstractmethod
    def _answer(self, error: Exception) -> Answer: ...

    def _create(self, key: str, data: bytes) -> bool:
        def attempt(client: Client, left_s: float) -> bool:
            try:
                self._store(client, key, data, left_s, if_absent=True)
                return True
            except self._failures as error:
                if self._answer(error).status not in (409, 412):
                    raise
            try:
                return self._fetch(client, key, left_s, (0, len(data))) == data
            except self._failures as error:
                status = self._answer(error).status
                if status == 404:
                    raise Vanished("what was there first has vanished") from error
                if status == 416:  # nothing stands there, in no bytes
                    return not data
                raise

        return self._run("create", key, attempt, num_bytes=2 * len(data))

    def _put(self, key: str, data: bytes | memoryview) -> None:
        def attempt(client: Client, left_s: float) -> None:
            self._store(client, key, data, left_s, if_absent=False)

        self._run("put", key, attempt, num_bytes=len(data))

    def _read(self, key: str, span: tuple[int, int] | None) -> bytes:
        if span is None:
            return self._run("get", key, lambda client, left_s: self._fetch(client, key, left_s, None), num_bytes=None)
        start, length = span
        last = start + max(length, 1) - 1  # HTTP can't ask for no byte, and a missing object must still be noticed

        def attempt(client: Client, left_s: float) -> bytes:
            try:
                return self._fetch(client, key, left_s, (start, last))[:length]
            except self._failures as error:
                if self._answer(error).status == 416:
                    return b""
                raise

        return self._run("get", key, attempt, num_bytes=length)

    def _list(self, prefix: str) -> list[str]:
        return self._run("list", prefix, lambda client, left_s: self._names(client, prefix, left_s))

    def _delete(self, key: str) -> None:
        with suppress(KeyMissing):
            self._run("delete", key, lambda client, left_s: self._remove(client, key, left_s))

    def _verdict(self, error: Exception) -> Verdict:
        status, code, _ = self._answer(error)
        if status in (401, 403) and not code:  # what isn't the service's own word is no word on the keys
            return Verdict.PASSES
        if code in _EXPIRED or (status in (401, 403) and code not in _ELSEWHERE and code != _HIDDEN):
            return Verdict.REFUSED
        if not status:
            return Verdict.LASTS if isinstance(error, ValueError) else Verdict.PASSES
        passes = status in (408, 409, 425, 429) or (status >= 500 and status != 501) or code == "SlowDown"
        return Verdict.PASSES if passes or (status == 404 and not code) else Verdict.LASTS

    def _cause(self, error: Exception) -> str:
        status, code, words = self._answer(error)
        return f"{words} ({code or status or type(error).__name__})"

    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        status, code, words = self._answer(error)
        if status == 301 or code in _ELSEWHERE:
            return StoreUnusable(f"{what} failed: {words} ({code}): set AWS_DEFAULT_REGION to the bucket's region")
        if code and status == 404:
            if code in ("NoSuchBucket", "ContainerNotFound") or not key:
                return StoreUnusable(f"{what} failed: there is no such bucket: make it or correct the URI")
            return KeyMissing(f"no object at {key} in {self.uri}")
        if code == _HIDDEN or (code == "InvalidRequest" and _HIDDEN_WORDS in words):
            return KeyMissing(f"no object that anybody can read at {key} in {self.uri}: {words} ({code})")
        if not status or not code:
            return StoreError(
                f"{what} failed: no sound answer from {self._endpoint} ({status or type(error).__name__}: {words}): "
                "check the network and the endpoint, then try again"
            )
        return StoreError(f"{what} failed: {self._cause(error)}: check the store's log")


def check_prefix_in_uri(prefix: str, spelled: str) -> None:
    """ConfigError unless `prefix` is '' or spelled like a key; `spelled` shows the URI's form."""
    if prefix and not is_key(prefix):
        raise ConfigError(
            f"store prefix ({prefix!r}) must be segments of ASCII letters, digits, '_', '.', '-' joined by '/': "
            f"write {spelled}"
        )
