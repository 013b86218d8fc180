"""The tables of teacher streams: what they mean, and which mistakes are named."""

import tomllib
from typing import Any

import pytest

from composer_prime.config import recipe_from_data
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError
from tests.config.recipes import minimal, recipe

LOSS = {"loss": {"kwargs": {"replay_tau": 0.1}}}


def teacher(**settings: Any) -> dict[str, Any]:
    return {"name": "big", "base_url": "http://host:8000", **settings}


def test_a_recipe_with_teachers_reads_back_from_its_toml_and_one_without_has_no_streams() -> None:
    tables = {"replay": {"teachers": [teacher(weight=2.5)]}, "hints": {"templates": {"error": "{tool}: {error}"}}}
    original = recipe(trainer=LOSS, **tables)
    assert original.has_streams
    assert recipe_from_data(tomllib.loads(to_toml(original.to_data()))) == original
    assert not recipe().has_streams
    assert recipe(trainer=LOSS, hints={}).has_streams


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_teachers_address_is_the_servers_root(url: str) -> None:
    (table,) = recipe(trainer=LOSS, replay={"teachers": [teacher(base_url=url)]}).replay.teachers
    assert table.base_url == "http://host:8000"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"replay": {"teachers": [teacher(base_url="host:8000")]}}, r"base_url \(host:8000\) must be http://host:port"),
        ({"replay": {"teachers": [teacher(name="Big One")]}}, r"teacher name \('Big One'\) must be 1 to 32 of"),
        ({"replay": {"teachers": [teacher(), teacher()]}}, "names must differ, but big is given twice: rename one"),
        ({"replay": {"teachers": [teacher(weight=0)]}}, r"weight \(0\)"),
        ({"replay": {"teachers": [teacher(timeout_s=0)]}}, r"timeout_s \(0\)"),
        ({"replay": {"teachers": [teacher(temperature=1)]}}, "temperature"),
        ({"hints": {"templates": {"error": "{cause}"}}}, r"names \{cause\}, but there are \{error\} and \{tool\}"),
        ({"hints": {"templates": {"error": "{"}}}, "can't be read: .*: double a brace that is meant"),
        ({"hints": {"templates": {"syntax": "x"}}}, "syntax"),
    ],
)
def test_a_mistake_in_a_teachers_table_is_one_clear_line(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        recipe_from_data(minimal(trainer=LOSS, **tables))
    assert "\n" not in str(error.value)


def test_teachers_that_nothing_would_use_are_refused() -> None:
    tables = {"replay": {"teachers": [teacher()]}}
    with pytest.raises(ConfigError, match=r"trainer.loss.kwargs.replay_tau \(0\) must be above 0"):
        recipe_from_data(minimal(**tables))
    recipe(trainer={"loss": {"import_path": "my.loss"}}, **tables)


def test_streams_are_refused_at_a_temperature_at_which_teachers_are_not_scored() -> None:
    data = minimal(trainer=LOSS, hints={})
    data["orchestrator"]["train"]["sampling"] = {"temperature": 0.7}
    with pytest.raises(ConfigError, match=r"temperature \(0.7\) must be 1 with replay.teachers or hints"):
        recipe_from_data(data)
