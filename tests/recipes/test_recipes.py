"""The recipes for clusters: each is read, planned from its model's published shapes, and rendered for every version."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_prime.cli.plan import plan_lines
from composer_prime.config import PrimeRecipe, any_from_data, load_any
from composer_prime.config.prime_rl import PORTS
from composer_prime.config.toml import to_toml
from composer_prime.sites.embedded.folder import flat
from composer_prime.sites.prime_rl.placement import Ports
from composer_prime.sites.prime_rl.toml import LOSS_PATH, VERSIONS, SiteFiles, render
from tests.architecture import REPOSITORY

RECIPES = sorted(path for room in ("cluster", "multi_site") for path in (REPOSITORY / "recipes" / room).glob("*.toml"))
MODELS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())["models"]

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
every_version = pytest.mark.parametrize("version", VERSIONS)


def load(path: Path, *overrides: str) -> PrimeRecipe:
    recipe = load_any(path, overrides)
    assert isinstance(recipe, PrimeRecipe)
    return recipe


def published(name: str, folder: Path) -> Path:
    """A model folder that has the published configuration and nothing else."""
    config = {key: value for key, value in MODELS[name].items() if key != "parameters"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def files(recipe: PrimeRecipe) -> SiteFiles:
    return SiteFiles("b", Path("/runs/b"), ports=Ports.starting_at(12200) if recipe.sites.count > 1 else None)


def test_there_are_recipes_for_one_node_several_and_a_chart_and_for_two_and_four_clusters() -> None:
    assert [f"{path.parent.name}/{path.stem}" for path in RECIPES] == [
        "cluster/math_4b", "cluster/reverse_text", "cluster/reverse_text_k8s", "cluster/swe_30b_a3b_slurm",
        "multi_site/math_4b_4", "multi_site/reverse_text_2", "multi_site/swe_30b_a3b_2",
    ]  # fmt: skip


@every_recipe
def test_a_recipe_says_its_hardware_and_that_it_was_not_run(path: Path) -> None:
    comment = " ".join(
        line.removeprefix("# ") for line in path.read_text().split("\n\n")[0].splitlines() if line[:1] == "#"
    )
    assert "Hardware: " in comment and "GPUs" in comment and "Not run by us" in comment


@every_recipe
def test_a_recipe_is_planned_from_the_published_shapes(path: Path, tmp_path: Path) -> None:
    written = load(path)
    recipe = load(path, "--model.name", str(published(written.model.name, tmp_path / "model")))
    resolved, *lines = plan_lines(recipe, link_mbit=1000.0, step_s=30.0)
    assert any_from_data(tomllib.loads(resolved)) == recipe
    lines = [line for line in lines if not line.startswith("listens: ")]
    total = f"{MODELS[written.model.name]['parameters']:,}"
    if written.outer is None:
        assert lines == [f"no outer loop: one site trains {total} parameters alone"]
        return
    fragments = [line.split() for line in lines if line.strip()[:1].isdigit() and "," in line.split()[1]]
    assert len(fragments) == written.outer.fragments
    assert f"{sum(int(row[1].replace(',', '')) for row in fragments):,}" == total
    assert any(line.split()[:2] == ["all", total] for line in lines)
    assert sum(line.endswith("<- outer.codec") for line in lines) == 1
    (memory,) = re.findall(r"; (.+) of the host beside PRIME-RL's own", "\n".join(lines))
    assert f"{memory} of host memory for the outer loop" in path.read_text().replace("\n# ", " ")
    num_sites = max(2, written.sites.count, len(written.sites.overrides))
    assert any(line.endswith(f"per round and site, {num_sites} sites:") for line in lines)


@every_recipe
@every_version
def test_a_recipe_is_rendered_for_every_version(path: Path, version: str) -> None:
    recipe = load(path)
    data = render(recipe, version, files(recipe))
    assert tomllib.loads(to_toml(data)) == data
    settings = flat(data)
    assert settings["trainer.loss.import_path"] == LOSS_PATH
    assert settings["model.name"] == recipe.model.name and settings["max_steps"] == recipe.max_steps
    in_outer = settings.get("trainer.env_vars.COMPOSER_PRIME_OUTER", "").rpartition("/")[2]
    assert in_outer == (recipe.run.name if recipe.outer else "")
    sources = data["orchestrator"]["train"]["source"]
    assert len(sources) == len(recipe.upstream["orchestrator"]["train"]["source"])


@every_recipe
def test_no_recipe_names_its_ports_or_its_credentials(path: Path) -> None:
    recipe = load(path)
    assert [name for name in PORTS if recipe.upstream_value(name) is not None] == []
    assert not any(word in path.read_text() for word in ("AWS_", "SECRET", "env_vars"))
