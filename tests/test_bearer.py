"""One door in: every route of every HTTP server of ours wants the token, but /health."""

import asyncio
import contextlib
import os
import stat

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from composer_prime.bearer import OnlyWithToken, headers, is_local, user_token
from composer_prime.sites.embedded.inference.app import Server
from composer_prime.teachers.served import ServedModel
from composer_prime.traces.serve import Library, ReplayServer
from composer_prime.traces.turns import Turn


@contextlib.asynccontextmanager
async def no_lifespan(app: Starlette):
    yield


APPS = {
    "a site's inference": lambda: Server(None, "tiny", None).app(no_lifespan),  # type: ignore[arg-type]
    "stored turns": lambda: ReplayServer(Library([Turn([1], [3], None)]), "replay").app(),
}


@pytest.mark.parametrize("name", APPS)
def test_every_route_but_health_wants_the_token(name: str) -> None:
    app = APPS[name]()
    client = TestClient(OnlyWithToken(app, "right"), base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
    asked = 0
    for route in app.routes:
        assert isinstance(route, Route)
        for method in route.methods or ():
            is_open = (method, route.path) == ("GET", "/health")
            for wrong in ({}, headers("wrong"), headers("")):
                assert (client.request(method, route.path, headers=wrong).status_code == 401) is not is_open, route
            assert client.request(method, route.path, headers={"Host": "evil.example"}).status_code == 403
            assert client.request(method, route.path, headers=headers("right")).status_code not in (401, 403)
            asked += 1
    assert asked >= len(app.routes) > 2
    assert client.get("/v1/models/", headers={}).status_code == 401, "nor a path beside them"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000/v1"])
def test_a_teacher_on_this_machine_is_asked_with_the_users_token(url: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token = user_token()
    assert len(token) > 40 and user_token() == token and is_local(url)
    file = tmp_path / "composer-prime" / "token"
    assert [stat.S_IMODE(os.stat(each).st_mode) for each in (file, file.parent)] == [0o600, 0o700]
    assert list(file.parent.iterdir()) == [file]
    for model, sent in ((ServedModel(url), f"Bearer {token}"), (ServedModel("https://api.example.org"), None)):
        assert model._http.headers.get("Authorization") == sent
        asyncio.run(model.close())
