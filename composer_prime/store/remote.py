"""What all stores behind a server share: first contact, retries, a client per process, and credentials that expire.

A backend brings a client and says what its failures mean; S3Store and GCSStore are such backends.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from composer_prime.errors import ConfigError, StoreError, StoreUnusable
from composer_prime.store.base import is_key
from composer_prime.store.retry import Patience, patience_for, retry

T = TypeVar("T")
Client = Any  # an fsspec file system; its synchronous methods are made by wrappers that lose their types

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
    return os.environ.get(ANONYMOUS_VARIABLE) == "1"


class Verdict(Enum):
    """What a failure means for another try."""

    PASSES = "the same request may succeed a moment later"
    REFUSED = "the credentials are missing, wrong or expired"
    LASTS = "the same request would fail again"


class RemoteStore(ABC):
    """The part of a store that doesn't depend on whose server it is.

    The first use asks the bucket for one name, so that a wrong endpoint, bucket or key is StoreUnusable within 10 s;
    a store that fails after it has answered is StoreError, after RETRY_S of trying. Credentials that are refused then
    are read anew, once at once and again by every later call, so that renewing them heals a run. Usable after a fork.
    """

    _failures: tuple[type[Exception], ...]
    """What the client raises when an operation fails."""
    _credentials_remedy: str
    """What a person does when the credentials are refused at first contact."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._clients: dict[int, Client] = {}  # by process: a client's event loop does not survive a fork
        self._reached = False

    @abstractmethod
    def _connect(self) -> Client:
        """A new client, with credentials as the environment has them now."""

    @abstractmethod
    def _disconnect(self, client: Client) -> None:
        """Close the client's connections."""

    @abstractmethod
    def _look(self, client: Client, left_s: float) -> object:
        """Ask the bucket for one name, within `left_s` seconds."""

    @abstractmethod
    def _verdict(self, error: Exception) -> Verdict: ...

    @abstractmethod
    def _cause(self, error: Exception) -> str:
        """Why it failed, in the server's words and with its code."""

    @abstractmethod
    def _translated(self, what: str, key: str, error: Exception) -> Exception:
        """Our error for a failure that is not about credentials: `what` failed, why, and what to do about it."""

    def close(self) -> None:
        client = self._clients.pop(os.getpid(), None)
        if client is not None and self._reached:
            self._disconnect(client)

    def _run(self, act: str, key: str, attempt: Callable[[Client, float], T], *, num_bytes: int | None = 0) -> T:
        """The attempt's result, retried while the failure may pass; our errors instead of the client's.

        attempt     gets a client and the seconds it may take.
        num_bytes   about how many it moves; None when nobody knows.
        """
        if not self._reached:
            self._reach()
        return self._retry(act, key, attempt, patience_for(num_bytes))

    def _reach(self) -> None:
        """Ask for one name; StoreUnusable when the bucket can't be listed, for whatever reason."""
        try:
            self._retry("first contact", "", self._look, Patience(FIRST_CONTACT_S, FIRST_ANSWER_S))
        except StoreError as error:
            raise StoreUnusable(str(error)) from error
        self._reached = True

    def _retry(self, act: str, key: str, attempt: Callable[[Client, float], T], patience: Patience) -> T:
        num_refused = 0

        def attempt_once(left_s: float) -> T:
            nonlocal num_refused
            client = None
            try:
                client = self._client()
                return attempt(client, left_s)
            except self._failures as error:
                if self._verdict(error) is Verdict.REFUSED:
                    num_refused += 1
                    self._forget(client)
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
        if is_anonymous():
            return (StoreError if self._reached else StoreUnusable)(
                f"{what} failed: {self._cause(error)}: the requests carry no credentials, since the invitation holds "
                "none for this bucket: ask the run's owner for some, or add --use-my-aws to sign with your own"
            )
        if not self._reached:
            return StoreUnusable(f"{what} failed: {self._cause(error)}: {self._credentials_remedy}")
        return StoreError(
            f"{what} failed: {self._cause(error)}: renew the credentials, or let them list, read, write and delete "
            "there; they are read again at every retry"
        )

    def _client(self) -> Client:
        pid = os.getpid()
        client = self._clients.get(pid)
        return client if client is not None else self._clients.setdefault(pid, self._connect())

    def _forget(self, client: Client) -> None:
        """Let the next try make a new client. The old one isn't closed: other threads may be using it."""
        pid = os.getpid()
        if client is not None and self._clients.get(pid) is client:
            self._clients.pop(pid, None)


def check_prefix_in_uri(prefix: str, spelled: str) -> None:
    """ConfigError unless `prefix` is '' or spelled like a key; `spelled` shows the URI's form."""
    if prefix and not is_key(prefix):
        raise ConfigError(
            f"store prefix ({prefix!r}) must be segments of ASCII letters, digits, '_', '.', '-' joined by '/': "
            f"write {spelled}"
        )
