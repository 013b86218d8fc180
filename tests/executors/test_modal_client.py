"""Modal's errors become ours: one line with the remedy, and no giving up while Modal is only busy."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from composer_prime.errors import BadInput, ExecutorError, JobUnknown
from composer_prime.executors import services

pytest.importorskip("modal")
import modal

from composer_prime.executors.modal import ModalExecutor
from composer_prime.executors.modal_deploy import Connection, explained

known = modal.exception


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between requests, which aren't waited for."""
    waited: list[float] = []
    monkeypatch.setattr(services, "time", SimpleNamespace(sleep=waited.append, monotonic=time.monotonic))
    return waited


def failing(*errors: Exception) -> Iterator[str]:
    """Raises one after the other, then answers."""
    yield from errors  # type: ignore[misc]
    yield "answer"


def asked(*errors: Exception) -> str:
    left = failing(*errors)

    def request() -> str:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    return Connection().ask("the thing", request)


@pytest.mark.parametrize(
    "kind",
    ["ResourceExhaustedError", "ServiceError", "InternalError", "ConnectionError", "ConflictError", "RemoteError"],
)
def test_a_modal_that_fails_by_itself_is_asked_again(kind: str) -> None:
    assert asked(*[getattr(known, kind)("busy")] * 5) == "answer"


def test_a_cut_connection_is_made_again() -> None:
    from grpclib.exceptions import StreamTerminatedError

    assert asked(StreamTerminatedError("Connection lost"), ConnectionResetError("reset by peer")) == "answer"


def test_a_modal_that_stays_busy_is_given_up_with_one_line(waits: list[float]) -> None:
    with pytest.raises(ExecutorError, match=r"^the thing: Modal failed \(ServiceError: try\s+again\); look at https"):
        asked(*[known.ServiceError("try\nagain")] * 6)
    assert waits == list(services.PAUSES_S)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (known.AuthError("Token missing"), BadInput, "modal token set.*MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"),
        (known.PermissionDeniedError("no"), BadInput, "refuses it .*token of a member"),
        (known.InvalidError("gpu"), BadInput, "the thing: Modal refuses it"),
        (known.VersionError("old"), BadInput, "pip install --upgrade modal"),
        (known.ImageBuildError("no such image", "im-1"), BadInput, "refuses it .*check the image's name"),
        (known.NotFoundError("fc-1"), JobUnknown, "the thing: Modal has no such thing"),
    ],
)
def test_what_cannot_be_mended_by_asking_again_is_explained_at_once(
    error: Exception, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        asked(error)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_every_error_of_the_client_has_an_explanation() -> None:
    kinds = [kind for kind in vars(known).values() if isinstance(kind, type) and issubclass(kind, known.Error)]
    assert len(kinds) > 30
    for kind in kinds:
        error = kind("text", "im-1") if kind is known.ImageBuildError else kind("text")
        assert isinstance(explained(error, "the thing"), BadInput | ExecutorError)


@pytest.mark.parametrize("ask", [ModalExecutor().log_in, lambda: Connection().client], ids=["check", "connection"])
def test_no_token_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(modal.config, "_user_config", {})
    with pytest.raises(BadInput, match=r"no token.*: run `modal token set`, or set MODAL_TOKEN_ID"):
        ask()


def test_a_token_is_enough_to_be_checked_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-1")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-1")
    monkeypatch.setenv("MODAL_SERVER_URL", "http://127.0.0.1:1")
    ModalExecutor().log_in()
