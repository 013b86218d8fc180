"""Requests to Hugging Face Jobs by its own client, with time-outs, repeats and errors that say what to do.

Left alone the client waits for ever, repeats listings only, and tells errors in several lines of HTTP.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx2
from huggingface_hub import HfApi, JobHardwareInfo, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError, OfflineModeIsEnabled

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors.repeating import Busy, first_line, patiently, refusal
from composer_prime.plan.prices import Machine

NAMESPACE_VARIABLE = "COMPOSER_PRIME_HF_NAMESPACE"
REQUEST_TIMEOUT_S = 30
"""Without a byte from the service for so long, a request counts as lost."""

_JOB = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9a-f]{24})")
_SIGN_IN = "set HF_TOKEN, or sign in with `hf auth login`"
_TOKENS = "huggingface.co/settings/tokens"
_REFUSED = "Hugging Face Jobs does not take this job: correct what it names"
_REMEDIES = {
    400: _REFUSED,
    401: f"the Hugging Face token is not valid: {_SIGN_IN}",
    402: "no credit for Hugging Face Jobs: see huggingface.co/settings/billing",
    403: f"the token may not start and manage jobs: make one that may at {_TOKENS}, and {_SIGN_IN}",
    404: f"Hugging Face has no such namespace, or hides it: correct {NAMESPACE_VARIABLE}",
    422: _REFUSED,
}


class JobsApi:
    """The jobs of one namespace (a user or an organization). May be used by several threads at once.

    endpoint, token   None: the client's own (HF_ENDPOINT; HF_TOKEN or what `hf auth login` stored)
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.client = HfApi(endpoint=endpoint, token=token)

    @property
    def token(self) -> str:
        """The token. Raises BadInput when there is none."""
        if not (token := self.client.token or get_token()):
            raise BadInput(f"Hugging Face Jobs needs a token, and there is none: {_SIGN_IN}")
        return str(token)

    @cached_property
    def namespace(self) -> str:
        """Whose jobs these are, the token's own user's where none is named. Raises BadInput when there is no token."""
        _ = self.token
        return os.environ.get(NAMESPACE_VARIABLE) or str(self.ask("whoami")["name"])

    def ask(self, method: str, **arguments: Any) -> Any:
        """The answer of a method of the client, by several tries."""
        return patiently(lambda: self.ask_once(method, **arguments))

    def ask_once(self, method: str, **arguments: Any) -> Any:
        """The same by one try. Raises BadInput, JobUnknown, Busy, or ExecutorError."""
        with self._translated():
            return getattr(self.client, method)(**arguments)

    def items(self, method: str, **arguments: Any) -> Iterator[Any]:
        """What a method gives one by one. The client itself repeats listings, and takes up broken streams of a log."""
        with self._translated():
            yield from getattr(self.client, method)(**arguments)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the client's errors into ours, and limit the waits of its session, which it shares with others."""
        endpoint = self.client.endpoint
        try:
            get_session().timeout = httpx2.Timeout(REQUEST_TIMEOUT_S)
            yield
        except OfflineModeIsEnabled as error:
            raise BadInput("HF_HUB_OFFLINE is set, and Hugging Face Jobs can't be reached with it: unset it") from error
        except HfHubHTTPError as error:
            raise _refusal(endpoint, error) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise Busy(f"no answer from {endpoint} ({type(error).__name__}: {error})") from error
        except ValueError as error:  # a page of some proxy instead of an answer
            raise Busy(f"{endpoint} gave no readable answer ({error})") from error


def place_of(name: str) -> dict[str, Any]:
    """The client's arguments for "namespace/id". Raises JobUnknown for what names no job: it would ask for its URL."""
    if not (match := _JOB.fullmatch(name)):
        raise JobUnknown(f"job ({name}) must be namespace/id with 24 hex digits: Hugging Face Jobs has no other")
    return {"namespace": match[1], "job_id": match[2]}


def flavor_of(hardware: JobHardwareInfo) -> Machine:
    """A machine that the service has, as it tells of it."""
    accelerator = hardware.accelerator
    return Machine(
        name=hardware.name,
        gpu=accelerator.model.replace(" ", "-") if accelerator else "",
        num_gpus=_number(accelerator.quantity) if accelerator else 0,
        usd_per_hour=round(hardware.unit_cost_usd * 60, 2) if hardware.unit_label == "minute" else None,
        cpus=_number(hardware.cpu),
        memory_gb=_number(hardware.ram),
        disk_gb=_number(hardware.ephemeral_storage),
    )


def _number(text: str) -> float:
    """The figure at the start of "142 GB"; 0 where there is none ("N/A"), so that nothing fits by mistake."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0


def _refusal(endpoint: str, error: HfHubHTTPError) -> BadInput | ExecutorError:
    answer = error.response
    where = f"{endpoint} answered {answer.status_code} ({first_line(error.server_message or str(error))})"
    if isinstance(error, JobNotFoundError):
        return JobUnknown(f"{where}: Hugging Face Jobs has no such job (any more)")
    return refusal(where, answer.status_code, _REMEDIES)
