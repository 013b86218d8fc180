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
from composer_prime.sites.prime_rl.toml import DIALECTS, SiteFiles, render
from tests.sites.prime_rl.recipes import prime_recipe

TABLE: dict[str, Any] = {"hint_tau": 0.5, "replay_tau": {"start": 0, "end": 1, "steps": 10}, "divergence": "jsd"}
READ = DistillConfig(hint_tau=0.5, replay_tau=Schedule(start=0, end=1, steps=10), divergence="jsd")


def rendered(version: str = "559b447", **tables: Any) -> dict[str, Any]:
    """What `rl` would read."""
    return render(prime_recipe(**tables), version, SiteFiles("b", Path("/runs/b")))


@pytest.mark.parametrize("version", DIALECTS)
@pytest.mark.parametrize("outer", [{"inner_steps": 10, "fragments": 2}, None])
def test_the_recipes_table_reaches_the_trainer_and_not_upstreams_own_keys(version: str, outer: Any) -> None:
    trainer = rendered(version, trainer={"distill": TABLE}, outer=outer)["trainer"]
    assert "distill" not in trainer
    assert distill_settings({}, trainer["env_vars"]) == READ == distill_settings(trainer["env_vars"])


def test_without_the_table_nothing_is_said() -> None:
    assert DISTILL not in rendered(trainer={})["trainer"].get("env_vars", {})
    assert distill_settings({}) is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trainer": {"distill": {"jsd_alpha": 2}}}, r"\[trainer\.distill\] can't be used: jsd_alpha: .*less than 1"),
        ({"trainer": {"distill": {"tau": 2}}}, r"\[trainer\.distill\] can't be used: tau: "),
        (
            {"trainer": {"distill": {}}, "orchestrator": {"train": {"sampling": {"temperature": 0.7}}}},
            r"orchestrator\.train\.sampling\.temperature \(0\.7\) must be 1",
        ),
        ({"trainer": {"distill": {}, "enable_router_replay": True}}, r"trainer\.enable_router_replay must be off"),
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
