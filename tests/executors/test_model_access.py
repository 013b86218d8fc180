"""A model that the hub won't give to the jobs is refused before they are started; a hub that is away isn't fatal."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import BadInput
from composer_prime.launch.plan import LaunchPlan, plan_launch
from composer_prime.launch.preflight import access_lines
from tests.executors.launches import small_recipe
from tests.servers.in_thread import serving_handler
from tests.servers.weed import free_ports

MODEL = "meta/gated-7B"
TOKEN, STRANGERS = "hf_token-of-a-member", "hf_token-of-a-stranger"


@dataclass
class Hub:
    """One model and who may read it, answered as the hub answers `auth-check`; `broken` answers 503."""

    url: str = ""
    gated: bool = True
    broken: bool = False
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str | None) -> tuple[int, str]:
        """Its status, and its X-Error-Code."""
        self.asked.append(path)
        if self.broken:
            return 503, ""
        if path == "/api/models/meta/renamed/auth-check":
            return 307, ""
        if path != f"/api/models/{MODEL}/auth-check":
            return (401 if authorization is None else 404), "RepoNotFound"
        if not self.gated or authorization == f"Bearer {TOKEN}":
            return 200, ""
        return (401 if authorization is None else 403), "GatedRepo"


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = hub.answer(self.path, self.headers.get("Authorization"))
            body = json.dumps({"error": code} if code else {}).encode()
            self.send_response(status)
            if status == 307:
                self.send_header("Location", f"/api/models/{MODEL}/auth-check")
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with serving_handler(Handler) as hub.url:
        yield hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as hub:
        yield hub


def planned(url: str, on: str = "modal", token: str | None = None, model: str = MODEL) -> LaunchPlan:
    environment = {"HF_ENDPOINT": url} | ({} if token is None else {"HF_TOKEN": token})
    return plan_launch(small_recipe(model={"name": model}), on, environment=environment)


def refusal(plan: LaunchPlan) -> str:
    with pytest.raises(BadInput) as refused:
        list(access_lines(plan))
    said = str(refused.value)
    assert "\n" not in said and TOKEN not in said and STRANGERS not in said
    return said


def test_a_model_that_the_token_may_read_is_no_matter(hub: Hub) -> None:
    assert list(access_lines(planned(hub.url, token=TOKEN))) == []
    assert hub.asked == [f"/api/models/{MODEL}/auth-check"]


def test_a_model_that_everybody_may_read_needs_no_token(hub: Hub) -> None:
    hub.gated = False
    assert list(access_lines(planned(hub.url))) == []


def test_a_model_that_was_renamed_is_found_under_its_new_name(hub: Hub) -> None:
    assert list(access_lines(planned(hub.url, token=TOKEN, model="meta/renamed"))) == []
    assert "GatedRepo" in refusal(planned(hub.url, token=STRANGERS, model="meta/renamed"))


@pytest.mark.parametrize("on", ["modal", "hf-jobs"])
@pytest.mark.parametrize(("token", "status"), [(None, 401), (STRANGERS, 403)])
def test_a_gated_model_is_refused_with_its_terms_address(hub: Hub, on: str, token: str | None, status: int) -> None:
    said = refusal(planned(hub.url, on, token))
    assert f"model.name ({MODEL})" in said and f"{status} GatedRepo" in said
    assert f"accept its terms at {hub.url}/{MODEL}" in said and "HF_TOKEN" in said


@pytest.mark.parametrize(("token", "status"), [(None, 401), (TOKEN, 404)])
def test_a_model_that_is_not_there_or_private_is_refused(hub: Hub, token: str | None, status: int) -> None:
    said = refusal(planned(hub.url, token=token, model="meta/none"))
    assert f"{status} RepoNotFound" in said and "correct the name" in said


def test_a_hub_that_gives_no_answer_is_said_and_not_fatal(hub: Hub) -> None:
    hub.broken = True
    (line,) = access_lines(planned(hub.url))
    assert "not checked" in line and "503" in line
    (port,) = free_ports(1)
    (line,) = access_lines(planned(f"http://127.0.0.1:{port}"))
    assert "not checked" in line and "doesn't answer: ConnectError" in line


@pytest.mark.parametrize("on", ["ssh:gpu1", "local"])
def test_a_machine_of_ones_own_without_the_token_may_have_a_login_there(hub: Hub, on: str) -> None:
    (line,) = access_lines(planned(hub.url, on))
    assert "not certain" in line and "GatedRepo" in line
    refusal(planned(hub.url, on, STRANGERS))


@pytest.mark.parametrize("model", ["tiny", "folder"])
def test_models_that_are_not_the_hubs_are_not_asked_for(hub: Hub, tmp_path: Path, model: str) -> None:
    name = str(tmp_path) if model == "folder" else model
    assert list(access_lines(planned(hub.url, "local", model=name))) == [] and hub.asked == []


def test_launch_starts_nothing_for_a_gated_model(
    cli, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", STRANGERS)
    places = ("--output_dir", tmp_path / "out", "--model.name", MODEL)
    answer = cli("launch", "recipes/local/two_sites.toml", "--on", "local", *places)
    assert answer.code == 2 and "403 GatedRepo" in answer.err and len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
