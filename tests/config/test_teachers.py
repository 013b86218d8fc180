"""The tables of teacher streams: what they mean, and which mistakes are named."""

import tomllib
from typing import Any

import pytest

from composer_prime.config import recipe_from_data
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError
from tests.config.recipes import minimal, recipe


def teacher(**settings: Any) -> dict[str, Any]:
    return {"name": "big", "base_url": "http://host:8000", **settings}


def test_a_recipe_with_teachers_reads_back_from_its_toml_and_one_without_has_no_streams() -> None:
    tables = {"replay": {"teachers": [teacher(weight=2.5)]}, "hints": {"templates": {"error": "{tool}: {error}"}}}
    original = recipe(**tables)
    assert original.has_streams
    assert recipe_from_data(tomllib.loads(to_toml(original.to_data()))) == original
    assert not recipe().has_streams
    assert recipe(hints={}).has_streams


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_teachers_address_is_the_servers_root(url: str) -> None:
    (table,) = recipe(replay={"teachers": [teacher(base_url=url)]}).replay.teachers
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
        ({"hints": {"teacher": "live"}}, 'use "frozen", or say that you know with hints.allow_live = true'),
        (
            {"hints": {"teacher": "live", "allow_live": True, "base_url": "http://host:8000"}},
            r"hints.base_url \(http://host:8000\) is for teacher = .frozen.: leave it out",
        ),
        (
            {"hints": {"teacher": "ema", "base_url": "http://host:8000"}},
            r"hints.base_url \(http://host:8000\) is for teacher = .frozen.: leave it out with .ema.",
        ),
        ({"hints": {"ema_decay": 0.9}}, r"hints.ema_decay \(0.9\) is for teacher = .ema., and it is .frozen.: leave"),
        ({"hints": {"teacher": "ema", "ema_decay": 1.0}}, r"hints.ema_decay \(1.0\)"),
        ({"hints": {"teacher": "ema", "ema_decay": 0.0}}, r"hints.ema_decay \(0.0\)"),
        (
            {"hints": {"teacher": "ema"}, "inference": {"engine": "vllm"}},
            r"hints.teacher \(.ema.\) needs a server that holds two models, .*: use the transformers engine, or",
        ),
        ({"hints": {}, "inference": {"engine": "vllm"}}, "hints.base_url must be given with inference.engine = .vllm."),
        ({"trainer": {"distill": {"top_k": 65}}}, r"top_k \(65\)"),
        ({"trainer": {"distill": {"hint_tau": -1.0}}}, r"hint_tau \(-1.0\) must be a number from 0"),
        (
            {"trainer": {"distill": {"hint_tau": "much"}}},
            r"hint_tau.number \(much\) must be a valid number: correct it",
        ),
        (
            {"trainer": {"distill": {"hint_tau": {"start": 1, "end": -1, "steps": 5}}}},
            r"hint_tau.schedule.end \(-1\) must be greater than or equal to 0: raise it$",
        ),
        ({"trainer": {"distill": {"hint_tau": {"start": 1, "end": 0}}}}, r"hint_tau.schedule.steps is missing: add it"),
        ({"hints": {}, "trainer": {"distill": {"top_k": 0}}}, r"top_k \(0\) must be at least 1 with hints"),
        ({"hints": {"model": "big"}}, r"hints.model \(big\) is for the server at hints.base_url, and there is none"),
        ({"hints": {"api_key_var": "KEY"}}, r"hints.api_key_var \(KEY\) is for the server at .*: give base_url, or"),
        (
            {"trainer": {"distill": {"jsd_alpha": 0.3}}},
            r"jsd_alpha \(0.3\) is for divergence = .jsd., and it is .forward_kl.: leave it out",
        ),
    ],
)
def test_a_mistake_in_a_teachers_table_is_one_clear_line(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        recipe_from_data(minimal(**tables))
    assert "\n" not in str(error.value)


def test_the_weight_that_fits_the_teachers_answers_is_the_one_that_counts() -> None:
    teachers = {"replay": {"teachers": [teacher()]}}
    sampled, none = {"loss": {"kwargs": {"replay_tau": 0.1}}}, {"distill": {"top_k": 0}}
    assert recipe(trainer=sampled | none, **teachers).trainer.distill.top_k == 0
    with pytest.raises(
        ConfigError, match=r"trainer.loss.kwargs.replay_tau \(0\) must be above 0 with replay.teachers and"
    ):
        recipe_from_data(minimal(trainer=none, **teachers))
    with pytest.raises(
        ConfigError, match=r"replay_tau \(0.1\) is for teachers that give one number a token: set trainer"
    ):
        recipe_from_data(minimal(trainer=sampled, **teachers))


def test_one_number_a_token_serves_the_kl_to_a_reference_as_well_as_replay() -> None:
    teachers = {"replay": {"teachers": [teacher()]}}
    reference, none = {"loss": {"kwargs": {"ref_kl_tau": 0.1}}}, {"distill": {"top_k": 0}}
    assert recipe(trainer=reference | none, **teachers).trainer.loss.kwargs == {"ref_kl_tau": 0.1}
    with pytest.raises(
        ConfigError, match=r"ref_kl_tau \(0.1\) is for teachers that give one number a token: set"
    ) as said:
        recipe_from_data(minimal(trainer=reference, **teachers))
    assert "\n" not in str(said.value)


NOTHING = {"start": 0.0, "end": 0.0, "steps": 9}
TEACHERS = {"replay": {"teachers": [teacher()]}}


@pytest.mark.parametrize(
    ("weights", "tables", "names"),
    [
        ({"hint_tau": 0.0, "replay_tau": 0.0}, {"hints": {}, **TEACHERS}, "hint_tau and replay_tau"),
        ({"hint_tau": 0.0}, {"hints": {}}, "hint_tau"),
        ({"hint_tau": NOTHING}, {"hints": {}}, "hint_tau"),
        ({"replay_tau": 0.0}, TEACHERS, "replay_tau"),
    ],
)
def test_teachers_from_whom_nothing_is_learned_are_refused_in_one_line(
    weights: dict[str, Any], tables: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.distill.{names} \(0\) must not be 0 at every step") as said:
        recipe_from_data(minimal(trainer={"distill": weights}, **tables))
    assert "\n" not in str(said.value)


def test_a_stream_may_be_off_beside_one_that_is_on_or_begins_later() -> None:
    assert recipe(trainer={"distill": {"hint_tau": 0.0}}, hints={}, **TEACHERS).trainer.distill.hint_tau == 0
    assert recipe(trainer={"distill": {"hint_tau": NOTHING | {"end": 1.0}}}, hints={}).has_streams
    assert not recipe(trainer={"distill": {"hint_tau": 0.0, "replay_tau": 0.0}}).has_streams
