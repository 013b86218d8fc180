"""How `[trainer.distill]` gets from a recipe to the trainer, and what is refused on the way."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.distill import DistillConfig, Schedule
from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl.settings import DISTILL, distill_settings
from composer_prime.sites.prime_rl.toml import VERSIONS, SiteFiles, render
from tests.sites.prime_rl.recipes import prime_recipe

TABLE: dict[str, Any] = {"hint_tau": 0.5, "replay_tau": {"start": 0, "end": 1, "steps": 10}, "divergence": "jsd"}
ROUTED: dict[str, Any] = {"enable_router_replay": True}
BIG = {"name": "big", "base_url": "http://10.0.0.5:8000"}
SERVED = {"base_url": "http://10.0.0.6:8000"}
READ = DistillConfig(hint_tau=0.5, replay_tau=Schedule(start=0, end=1, steps=10), divergence="jsd")


def rendered(version: str = "559b447", **tables: Any) -> dict[str, Any]:
    """What `rl` would read."""
    return render(prime_recipe(**tables), version, SiteFiles("b", Path("/runs/b")))


def source(name: str, **env: Any) -> dict[str, Any]:
    """A source that teachers stamp."""
    return {"name": name, "env": {"id": "composer-prime", "taskset": {"id": "reverse-text"}, **env}}


def orchestrator(*sources: dict[str, Any]) -> dict[str, Any]:
    """The table that has these sources."""
    return {"batch_size": 128, "train": {"source": list(sources)}}


def asking(*sources: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """A recipe's tables, of these sources and of the trainer."""
    return {"orchestrator": orchestrator(*sources), "trainer": trainer}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("outer", [{"inner_steps": 10, "fragments": 2}, None])
def test_the_recipes_table_reaches_the_trainer_and_not_upstreams_own_keys(version: str, outer: Any) -> None:
    trainer = rendered(version, trainer={"distill": TABLE}, outer=outer)["trainer"]
    assert "distill" not in trainer
    assert distill_settings({}, trainer["env_vars"]) == READ == distill_settings(trainer["env_vars"])


@pytest.mark.parametrize("trainer", [{}, {"distill": {"top_k": 0}}, {"distill": {"top_k": 0}, **ROUTED}])
def test_where_no_distributions_are_asked_for_nothing_is_said(trainer: dict[str, Any]) -> None:
    said = rendered(trainer=trainer)
    assert DISTILL not in said["trainer"].get("env_vars", {})
    assert distill_settings({}) is None is distill_settings({DISTILL: '{"top_k": 0}'})


def test_the_tables_top_k_is_that_of_every_source_that_teachers_stamp() -> None:
    sources = [source("a", teachers=[BIG]), source("b", teachers=[BIG], top_k=5), {"name": "c", "env": {"id": "other"}}]
    told = rendered(orchestrator=orchestrator(*sources), trainer={"distill": {"top_k": 5}})
    assert [one["env"].get("top_k") for one in told["orchestrator"]["train"]["source"]] == [5, 5, None]
    assert json.loads(told["trainer"]["env_vars"][DISTILL])["top_k"] == 5


def test_a_recipe_for_one_number_a_token_gets_the_runs_size_alone() -> None:
    asked = orchestrator(source("a", teachers=[BIG], stamp_ref_kl=True))
    told = rendered(orchestrator=asked, trainer={"loss": {"kwargs": {"replay_tau": 0.1}}})
    (got,), (given,) = told["orchestrator"]["train"]["source"], asked["train"]["source"]
    size = {"rollouts": told["max_steps"] * 128, "batch": 128}
    assert got == given | {"env": given["env"] | size}
    assert DISTILL not in told["trainer"]["env_vars"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"trainer": {"distill": {"jsd_alpha": 2}}},
            r"\[trainer\.distill\] can't be used: jsd_alpha \(2\) must be less than 1",
        ),
        ({"trainer": {"distill": {"tau": 2}}}, r"\[trainer\.distill\] can't be used: tau isn't a known key"),
        (
            {"trainer": {"distill": {}}, "orchestrator": {"train": {"sampling": {"temperature": 0.7}}}},
            r"orchestrator\.train\.sampling\.temperature \(0\.7\) must be 1",
        ),
        ({"trainer": {"distill": {}, **ROUTED}}, r"trainer\.enable_router_replay must be off"),
        (
            {"trainer": {"distill": {}, "loss": {"kwargs": {"replay_tau": 0.1}}}},
            r"trainer\.loss\.kwargs\.replay_tau \(0\.1\) is for teachers that give one number",
        ),
        (asking(source("a", teachers=[BIG], top_k=8)), r"source a: env\.top_k \(8\) must be .*top_k \(0\)"),
        (asking(source("a", teachers=[BIG], top_k=4), distill={}), r"env\.top_k \(4\) must be .*top_k \(8\)"),
        (
            asking(source("a", teachers=[BIG]), source("b", teachers=[BIG], hints=SERVED), distill={}),
            r"source a stamps 1 stream and b 2, which PRIME-RL can't pack into one batch: give both",
        ),
        (
            asking(source("a", hints=SERVED)),
            r"source a: env\.hints needs \[trainer\.distill\] with top_k of at least 1",
        ),
        (asking(source("a", hints={}), distill={}), r"env\.hints\.base_url must be given"),
        (
            asking(source("a", hints={"teachr": "ema"}), distill={}),
            r"env\.hints can't be used: teachr isn't a known key",
        ),
    ],
)
def test_a_recipe_that_cant_be_distilled_is_refused_in_one_line(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        rendered(**tables)
    assert "\n" not in str(raised.value)


def test_what_isnt_the_table_is_refused_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"COMPOSER_PRIME_DISTILL \(on\) isn't \[trainer\.distill\] as JSON"):
        distill_settings({DISTILL: "on"})
    with pytest.raises(ConfigError, match="say COMPOSER_PRIME_DISTILL in one place"):
        distill_settings({DISTILL: "{}"}, {DISTILL: json.dumps(TABLE)})


def test_a_loss_that_no_table_is_said_to_imports_nothing_of_it() -> None:
    asked = "import sys, composer_prime.sites.prime_rl.outer; print([n for n in sys.modules if 'prime_rl.topk' in n])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
