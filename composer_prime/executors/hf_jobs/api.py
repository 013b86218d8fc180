"""Requests to Hugging Face Jobs by its own client, with time-outs, repeats and errors that say what to do.

Left alone the client waits for ever, repeats listings only, and tells errors in several lines of HTTP. It is imported
when the first request is made.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.repeating import Busy, patiently

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobInfo, Volume
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30
"""Without a byte from the service for so long, a request counts as lost."""

_JOB = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9a-f]{24})")
_SIGN_IN = "set HF_TOKEN, or sign in with `hf auth login`"


class JobsApi:
    """The jobs of one namespace (a user or an organization). May be used by several threads at once.

    namespace   None: the token's own user
    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN or what `hf auth login` stored)
    """

    def __init__(self, namespace: str | None = None, endpoint: str | None = None, token: str | None = None) -> None:
        self._namespace = namespace
        self._endpoint = endpoint
        self._token = token
        self._lock = threading.Lock()
        self._client: HfApi | None = None

    @property
    def client(self) -> "HfApi":
        """The vendor's client. Raises BadInput where it isn't installed."""
        if self._client is None:
            try:
                import httpx2  # noqa: F401  huggingface_hub's own since 2.0
                from huggingface_hub import HfApi
            except ModuleNotFoundError as error:
                raise BadInput(
                    f"hf-jobs needs a package that isn't installed ({error.name}): pip install 'composer-prime[hf]'"
                ) from error
            self._client = HfApi(endpoint=self._endpoint, token=self._token)
        return self._client

    @property
    def given_namespace(self) -> str | None:
        """The namespace as far as it is known without a request."""
        return self._namespace

    @property
    def namespace(self) -> str:
        """Whose jobs these are; asked once."""
        with self._lock:
            if self._namespace is None:
                self._namespace = str(self.patiently(lambda: self.client.whoami())["name"])
            return self._namespace

    def check_client(self, *, with_secrets: bool) -> None:
        """Raise BadInput when the client isn't installed, or would print secrets."""
        _ = self.client  # says what to install
        from huggingface_hub import constants

        if with_secrets and constants.HF_DEBUG:
            raise BadInput("HF_DEBUG is set, and huggingface_hub then prints requests with their secrets: unset it")

    @property
    def token(self) -> str:
        """The token. Raises BadInput when there is none."""
        _ = self.client  # says what to install
        from huggingface_hub import get_token

        if not (token := self._token or get_token()):
            raise BadInput(f"Hugging Face Jobs needs a token, and there is none: {_SIGN_IN}")
        return token

    def check_login(self) -> None:
        """Raise BadInput when there is no token, or a wrong one and no namespace."""
        _ = self.token
        _ = self.namespace

    def hardware(self) -> list[Any]:
        """What machines there are, as the client's records. One try."""
        return self.once(lambda: self.client.list_jobs_hardware())

    def jobs(self, labels: Mapping[str, str]) -> "list[JobInfo]":
        """Jobs that carry all the labels, ended ones too, oldest first; of two of one moment the smaller id."""
        found = self.once(lambda: list(self._listed(labels)))  # the client itself repeats a listing
        # A service that doesn't know the filter ignores it.
        mine = [job for job in found if labels.items() <= (job.labels or {}).items()]
        return sorted(mine, key=age)

    def _listed(self, labels: Mapping[str, str]) -> "Iterator[JobInfo]":
        yield from self.client.list_jobs(labels=dict(labels), namespace=self.namespace, timeout=REQUEST_TIMEOUT_S)

    def inspect(self, name: str) -> "JobInfo":
        """The job of that name ("namespace/id"). Raises JobUnknown."""
        namespace, job = split(name)
        return self.patiently(lambda: self.client.inspect_job(job_id=job, namespace=namespace))

    def cancel(self, name: str) -> None:
        """Ask for the job's end; it ends later."""
        namespace, job = split(name)
        self.patiently(lambda: self.client.cancel_job(job_id=job, namespace=namespace))

    def run(self, recover: "Callable[[], JobInfo | None]", **request: Any) -> "JobInfo":
        """Start a job. `recover` finds the one that a lost request may have started, before it is made again."""
        return self.patiently(lambda: self.client.run_job(namespace=self.namespace, **request), recover)

    def make_bucket(self, bucket: str) -> None:
        """Make the private bucket namespace/name unless there is one."""
        self.patiently(lambda: self.client.create_bucket(bucket, private=True, exist_ok=True))

    def volume(self, bucket: str, folder: str, mount_path: str) -> "Volume":
        """A folder of a bucket as a job sees it."""
        from huggingface_hub import Volume

        return Volume(type="bucket", source=bucket, path=folder, mount_path=mount_path)

    def log(self, name: str, *, follow: bool) -> Iterator[str]:
        """A job's lines from its log's start, as the client gives them."""
        namespace, job = split(name)
        with self._translated():
            yield from self.client.fetch_job_logs(job_id=job, namespace=namespace, follow=follow)

    def patiently(self, call: Callable[[], T], recover: Callable[[], T | None] = lambda: None) -> T:
        """Make a request, and repeat what may succeed then; `recover` may find its result first."""
        return patiently(lambda: self.once(call), recover)

    def once(self, call: Callable[[], T]) -> T:
        """Make a request. Raises BadInput, JobUnknown, Busy, or ExecutorError."""
        with self._translated():
            self._limit_waiting()
            return call()

    def _limit_waiting(self) -> None:
        """The client's one session never times out; one that somebody set up otherwise is left alone."""
        import httpx2
        from huggingface_hub import get_session

        session = get_session()
        if session.timeout == httpx2.Timeout(None):
            session.timeout = httpx2.Timeout(REQUEST_TIMEOUT_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the client's errors into ours."""
        endpoint = self.client.endpoint
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

        try:
            yield
        except LocalTokenNotFoundError as error:
            raise BadInput(f"Hugging Face Jobs needs a token, and there is none: {_SIGN_IN}") from error
        except OfflineModeIsEnabled as error:
            raise BadInput("HF_HUB_OFFLINE is set, and Hugging Face Jobs can't be reached with it: unset it") from error
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise Busy(f"no answer from {endpoint} ({type(error).__name__}: {error})") from error
        except ValueError as error:  # a page of some proxy instead of an answer
            raise Busy(f"{endpoint} gave no readable answer ({error})") from error

    def _refusal(self, error: "HfHubHTTPError") -> ExecutorError | BadInput:
        """What an HTTP status means here."""
        from huggingface_hub.errors import JobNotFoundError

        status, words = error.response.status_code, _words(error)
        where = f"{self.client.endpoint} answered {status} ({words})"
        if status == 401:
            return BadInput(f"{where}: the Hugging Face token is not valid: {_SIGN_IN}")
        if status == 403:
            return BadInput(
                f"{where}: the token may not start and manage jobs for {self._namespace or 'its user'}: make one that "
                f"may at huggingface.co/settings/tokens, and {_SIGN_IN}"
            )
        if status == 402:
            return BadInput(f"{where}: no credit for Hugging Face Jobs: see huggingface.co/settings/billing")
        if isinstance(error, JobNotFoundError):
            return JobUnknown(f"{where}: Hugging Face Jobs has no such job (any more)")
        if status == 404:
            return BadInput(f"{where}: Hugging Face has no namespace {self._namespace}, or hides it: correct the name")
        if status in (400, 422):
            return BadInput(f"{where}: Hugging Face Jobs does not take this job: correct what it names")
        if status in (408, 429) or status >= 500:
            return Busy(where, _asked_wait_s(error))
        return ExecutorError(where)


def age(job: "JobInfo") -> tuple[float, str]:
    """What sorts jobs from the oldest on, in the same order for everybody."""
    return (job.created_at.timestamp() if job.created_at else 0.0, job.id)


def split(name: str) -> tuple[str, str]:
    """(namespace, id) of a job's name. Raises JobUnknown for what names no job, rather than ask for its URL."""
    match = _JOB.fullmatch(name)
    if match is None:
        raise JobUnknown(f"job ({name}) must be namespace/id with 24 hex digits: Hugging Face Jobs has no other")
    return match.group(1), match.group(2)


def _words(error: "HfHubHTTPError") -> str:
    """What the service said, in one line."""
    said = error.server_message or str(error)
    return next((line.strip().rstrip(".") for line in said.splitlines() if line.strip()), "without a word")


def _asked_wait_s(error: "HfHubHTTPError") -> float:
    from huggingface_hub.utils import parse_ratelimit_headers

    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0
