"""A model's chat template that loops ends: before anything is trained, and with whatever request makes it loop."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from composer_prime.errors import ModelError
from composer_prime.sites.embedded.inference import app
from composer_prime.sites.embedded.inference.app import Server
from composer_prime.sites.embedded.inference.serve import load_tokenizer
from tests.sites.tiny_folder import save_random_tiny

TURN = "{% for i in range(99999) %}" * 4 + "{% set x = i %}" + "{% endfor %}" * 4
LOOPS = {
    "loops": TURN,
    "a macro's": "{% macro a(n) %}{{ a(n + 1) ~ a(n + 1) if n < 60 else '' }}{% endmacro %}{{ a(0) }}",
    "a filter's": "{% for i in range(99999) %}{{ range(99999)|map('string')|select('eq', 'x')|list }}{% endfor %}",
    "random text": "{% for i in range(99999) %}{{ lipsum(n=1000) }}{% endfor %}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_tiny(tmp_path / "model")


def with_template(folder: Path, text: str) -> Path:
    (folder / "chat_template.jinja").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TEMPLATE_S", 1.0)


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_a_template_that_loops_is_refused_as_its_model_is_loaded(folder: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"chat template .* more than 1 s") as said:
        load_tokenizer(with_template(folder, text))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("text", ["{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{% if %}", "{{ messages[9].role }}"])
def test_a_template_that_wants_other_messages_is_loaded(folder: Path, text: str) -> None:
    assert load_tokenizer(with_template(folder, text)) is not None


class FakeEngine:
    max_model_len = 64


@pytest.mark.parametrize(
    "text", [TURN, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"], ids=["it loops", "it calls itself"]
)
def test_a_request_that_makes_it_loop_is_answered(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(with_template(folder, "{% if messages|length > 1 %}" + text + "{% endif %}x"))
    engine: Any = FakeEngine()
    server = Server(engine, "tiny", tokenizer)
    server.is_ready = True

    async def ask() -> httpx.Response:
        routes = server.app(lambda app: None)  # pyright: ignore[reportArgumentType] (never entered)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://127.0.0.1") as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}] * 2}
            return await client.post("/v1/chat/completions", json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"]
