"""The recipe in an invitation says nothing about the volunteer's machine, and one that does is refused."""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import recipe_from_data
from composer_prime.config.load import any_from_data
from composer_prime.config.messages import known_names
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe
from composer_prime.config.toml import read_toml, to_toml
from composer_prime.errors import BadInput, ConfigError, InvitationRefused
from composer_prime.volunteers.consent import asked_of
from composer_prime.volunteers.entrance import enter, own_key
from composer_prime.volunteers.folder import VolunteerFolder
from composer_prime.volunteers.join import disclosure
from composer_prime.volunteers.shared_recipe import EMBEDDED, PRIME_RL, Rule, read_shared, refusals, shared_toml
from tests.architecture import REPOSITORY
from tests.config.recipes import minimal
from tests.volunteers.owned_run import OwnedRun, run_recipe

DANGEROUS = {
    "inference": {"python": "/tmp/evil"},
    "output_dir": "/etc",
    "site": {"key_file": "/home/alice/.ssh/id_ed25519"},
    "replay": {"teachers": [{"name": "t", "base_url": "https://evil.example", "api_key_var": "AWS_SECRET_ACCESS_KEY"}]},
    "hints": {"base_url": "https://evil.example", "api_key_var": "AWS_SECRET_ACCESS_KEY"},
    "sites": {"count": 26},
    "clean": True,
}
SOURCE = {"env": {"taskset": {"id": "e"}}}


@pytest.mark.parametrize(("model", "rules"), [(Recipe, EMBEDDED), (PrimeRecipe, PRIME_RL)])
def test_every_field_of_the_schema_is_marked_or_refused(model: type[Recipe], rules: Mapping[str, Rule]) -> None:
    known, allowed = list(known_names(model)), [key.replace("[]", "") for key in rules]
    names = [name for name in known if not any(other.startswith(f"{name}.") for other in known)]
    assert len(names) > 30
    for name in names:
        data: Any = {"site": {"backend": "embedded" if model is Recipe else "prime-rl"}}
        table = data
        for part in name.split(".")[:-1]:
            inner = table.setdefault(part, [{}] if part in ("source", "teachers") else {})
            table = inner[0] if isinstance(inner, list) else inner
        table[name.rpartition(".")[2]] = object()  # right for no rule: what has one says what must stand there
        (refused,) = refusals(data)
        assert bool(refused.limit) == any(f"{key}.".startswith(f"{name}.") for key in allowed), name


def test_what_travels_reads_back_to_the_same_run() -> None:
    recipe = run_recipe(store="s3://bucket", owner="x")
    shared = read_shared(shared_toml(recipe))
    assert shared.outer is not None and recipe.outer is not None
    assert shared.outer == recipe.outer.model_copy(update={"store": None, "owner": None})
    assert shared.model_copy(update={"outer": recipe.outer}) == recipe


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_is_the_machines_own_is_left_out_and_refused(name: str) -> None:
    data = minimal(**{name: DANGEROUS[name]})
    recipe = recipe_from_data(data)
    read_shared(shared_toml(recipe))
    with pytest.raises(InvitationRefused, match="no invitation may hold"):
        read_shared(to_toml(data))


PRIME = {"run": {"name": "r"}, "max_steps": 9, "model": {"name": "m"}, "site": {"backend": "prime-rl"}}
PRIME |= {"outer": {"inner_steps": 4}}
OWN_SETTINGS: list[dict[str, Any]] = [
    {"trainer": {"profile_path": "/home/alice/x"}},
    {"orchestrator": {"buffer": {"load_path": "/etc"}}},
    {"trainer": {"env_vars": {"LD_PRELOAD": "/tmp/evil.so"}}},
    {"weight_broadcast": {"start_command": "evil"}},
    {"slurm": {"job_name": "x"}},
    {"prime_rl": {"command": ["sh", "-c", "evil"]}},
]


@pytest.mark.parametrize("own", OWN_SETTINGS, ids=lambda own: next(iter(own)))
def test_what_prime_rl_s_tables_say_of_a_machine_is_left_out_and_refused(own: dict[str, Any]) -> None:
    data = PRIME | own
    shared = tomllib.loads(shared_toml(any_from_data(data)))
    assert not any(word in str(shared) for word in ("alice", "etc", "evil", "job_name")) and read_shared(
        to_toml(shared)
    )
    with pytest.raises(InvitationRefused, match="no invitation may hold"):
        read_shared(to_toml(data))


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ({"model": {"name": "m", "trust_remote_code": True}}, "model.trust_remote_code"),
        ({"orchestrator": {"model": {"trust_remote_code": True}}}, "orchestrator.model"),
        ({"orchestrator": {"env": [{"id": "e"}]}}, "orchestrator.env"),
        (
            {"orchestrator": {"train": {"source": [SOURCE | {"data_dir": "/data"}]}}},
            "orchestrator.train.source.data_dir",
        ),
        ({"orchestrator": {"model": {"client": {"base_url": "http://10.0.0.1/v1"}}}}, "orchestrator.model"),
    ],
)
def test_what_a_run_can_t_do_without_is_not_left_out_in_silence(own: dict[str, Any], name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"the recipe sets {re.escape(name)} to .*, which no invitation may hold: give a recipe",
    ):
        shared_toml(any_from_data(PRIME | own))
    with pytest.raises(InvitationRefused, match=re.escape(name)):
        read_shared(to_toml(PRIME | own))


def test_a_volunteer_is_told_what_prime_rl_will_run(run: OwnedRun, tmp_path: Path) -> None:
    agent = {"harness": {"id": "rlm"}, "runtime": {"type": "subprocess"}}
    orchestrator = {"train": {"source": [{"name": "one", "env": {"taskset": {"id": "reverse-text"}, "agent": agent}}]}}
    recipe = any_from_data(PRIME | {"orchestrator": orchestrator})
    invitation = run.invite()
    entrance, folder = enter(invitation, run.store, own_key(invitation, None)), VolunteerFolder(tmp_path, "alice")
    said = "\n".join(disclosure(invitation, entrance, recipe, folder))
    assert "PRIME-RL; environments reverse-text; and what a model says to rlm. The model is m." in said


@pytest.mark.parametrize(
    ("source", "asked"), [({}, ("bash", "prime")), ({"agent": {"harness": {"id": "null"}}}, ("prime",))]
)
def test_what_verifiers_takes_where_prime_rl_s_recipe_says_nothing_counts_as_said(
    source: dict[str, Any], asked: tuple[str, ...]
) -> None:
    orchestrator = {"train": {"source": [{"env": {"taskset": {"id": "reverse-text"}} | source}]}}
    assert asked_of(any_from_data(PRIME | {"orchestrator": orchestrator})).harnesses == asked


@pytest.mark.parametrize(
    "text", ["not = [toml", "nothing = 1\n", "", "a = " + "[" * 9000, "a = " + "9" * 9000, "a" * 2**17]
)
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_shared(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def documented() -> dict[str, Any]:
    """The recipe's tables that docs/teachers.md shows, but for the teacher, whose address is a private network's."""
    text = (REPOSITORY / "docs/teachers.md").read_text().partition("## In a recipe of the embedded site")[2]
    data = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])
    assert data["hints"]["templates"] and isinstance(data["trainer"]["distill"]["replay_tau"], dict)
    return {name: table for name, table in data.items() if name != "replay"}


def test_the_documented_hints_and_schedules_travel_and_read_back_to_the_same_run() -> None:
    recipe = recipe_from_data(minimal(**documented()))
    assert read_shared(shared_toml(recipe)) == recipe
    weights = {"hint_tau": {"start": 1.0, "end": 0.0, "steps": 7}, "replay_tau": 0.0}
    scheduled = recipe_from_data(minimal(hints={"teacher": "ema", "ema_decay": 0.9}, trainer={"distill": weights}))
    assert read_shared(shared_toml(scheduled)) == scheduled


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ({"start": -1.0, "end": 0.1, "steps": 5}, "hint_tau.start to -1.0, which must be a number from 0 to 1000"),
        ({"start": 1.0, "end": 1e9, "steps": 5}, "hint_tau.end to 1000000000.0, which must be a number from 0 to 1000"),
        ({"start": math.nan, "end": 0.1, "steps": 5}, "hint_tau.start to nan, which must be a number"),
        ({"start": 1.0, "end": math.inf, "steps": 5}, "hint_tau.end to inf, which must be a number"),
        ({"start": 1.0, "end": 0.1, "steps": 0}, "hint_tau.steps to 0, which must be a whole number from 1"),
        ({"start": 1.0, "end": 0.1, "steps": 10**12}, "hint_tau.steps to 1000000000000, which must be a whole number"),
        ({"start": 1.0, "end": 0.1, "steps": 5, "path": "/etc"}, "hint_tau.path to '/etc', which no invitation may"),
        ({"start": {"start": 1.0}, "end": 0.1, "steps": 5}, "hint_tau.start to a table, which must be a number"),
        ([1.0, 0.1], "hint_tau to a list, which must be a number from 0 to 1000"),
        (2.0, "ema_decay to 2.0, which must be a number from 0 to 1"),
    ],
)
def test_a_schedule_or_decay_beyond_its_range_is_refused_in_one_line(weight: Any, said: str) -> None:
    decay = {"teacher": "ema", "ema_decay": weight} if said.startswith("ema") else {}
    distill = {} if decay else {"distill": {"hint_tau": weight}}
    with pytest.raises(InvitationRefused, match=re.escape(said)) as refused:
        read_shared(to_toml(minimal(hints=decay, trainer=distill)))
    assert "\n" not in str(refused.value)


def test_the_live_teacher_is_refused_when_an_invitation_is_written_and_when_it_is_read() -> None:
    data = minimal(hints={"teacher": "live", "allow_live": True})
    with pytest.raises(
        ConfigError, match=r"the recipe sets hints\.teacher to 'live', which must be one of frozen, ema"
    ):
        shared_toml(recipe_from_data(data))
    with pytest.raises(InvitationRefused, match=r"hints\.allow_live to True, which must be false"):
        read_shared(to_toml(minimal(hints={"allow_live": True})))


DEEP = {
    "one dotted key": ".".join(["a"] * 32_000) + " = 1",
    "many": "\n".join(".".join(["a"] * 300) + f".b{number} = 1" for number in range(100)),
    "quoted and spaced": " . ".join(["'a.b'"] * 8_000) + " = 1",
    "a table's name": "[" + ".".join(["a"] * 32_000) + "]",
    "in a list": 'x = [ """\n\' """, {' + ".".join(["a"] * 20_000) + " = '1'} ]",
    "inline tables": "x = " + "{a = " * 10_000,
    "inline tables that end": "x = " + "{a = " * 180 + "1" + "}" * 180,
    "lists": "x = " + "[" * 30_000,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_toml_is_refused_before_it_is_read(text: str) -> None:
    with pytest.raises(BadInput, match=r"more than 200 dots|nested too deep|sets x\b") as said:
        read_shared(text)
    assert "\n" not in str(said.value)


def test_a_recipe_in_a_bucket_is_read_by_the_same_limit() -> None:
    with pytest.raises(ValueError, match="more than 200 dots"):
        read_toml(DEEP["one dotted key"])
