"""`composer-prime plan`: every recipe we ship can be read and planned, and the plan's numbers are right."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from composer_prime.cli.plan import plan_lines
from composer_prime.config import load_any, load_recipe, recipe_from_data
from composer_prime.launch.plan import plan_launch
from composer_prime.launch.preflight import bucket_lines
from composer_prime.outer.codecs import CODECS
from tests.architecture import REPOSITORY

RECIPES = sorted((REPOSITORY / "recipes").rglob("*.toml"))
LOCAL = sorted((REPOSITORY / "recipes/local").glob("*.toml"))
TWO_SITES = REPOSITORY / "recipes/local/two_sites.toml"


@pytest.mark.parametrize("path", LOCAL, ids=lambda path: path.name)
def test_every_local_recipe_is_read_and_planned(path: Path) -> None:
    recipe = load_recipe(path)
    resolved, *rest = plan_lines(recipe)
    assert recipe_from_data(tomllib.loads(resolved)) == recipe
    assert any("parameters" in line for line in rest)


def test_every_recipe_stands_in_the_table() -> None:
    table = (REPOSITORY / "recipes/README.md").read_text()
    assert len(RECIPES) >= 3
    assert [path.name for path in RECIPES if f"]({path.relative_to(REPOSITORY / 'recipes')})" not in table] == []


def test_recipes_bear_names_of_their_own() -> None:
    names = [load_any(path).run.name for path in RECIPES]
    assert len(set(names)) == len(names)


def test_fragments_add_up_to_the_tiny_model() -> None:
    lines = list(plan_lines(load_recipe(TWO_SITES)))
    rows = [line.split() for line in lines[1:] if line.strip()[:1].isdigit()]
    numel = [int(row[1].replace(",", "")) for row in rows]
    total = next(line.split() for line in lines if line.strip().startswith("all"))
    assert len(rows) == 2 and sum(numel) == int(total[1].replace(",", "")) == 427_904
    assert total[2:4] == ["1.71", "MB"]


@pytest.mark.parametrize(("sites", "down"), [(1, "434.59 kB"), (2, "434.59 kB"), (4, "1.30 MB")])
def test_a_site_sends_a_byte_a_parameter_and_fetches_every_other_sites(sites: int, down: str) -> None:
    lines = plan_lines(load_recipe(TWO_SITES, ["--sites.count", str(sites)]))
    (line,) = [line for line in lines if line.endswith("<- outer.codec")]
    assert line.split() == ["int8", "434.59", "kB", *down.split(), "<-", "outer.codec"]


def test_long_models_are_abbreviated() -> None:
    from composer_prime.cli.plan import _abbreviated

    names = [f"model.layers.{layer}.mlp.{part}.weight" for layer in range(40) for part in ("up", "down")]
    assert _abbreviated(names) == ("model.layers.0 (2), model.layers.1 (2), model.layers.2 (2), and 37 more")


def test_a_learning_rate_that_hardly_moves_a_small_model_is_warned_of() -> None:
    def warned(*overrides: str) -> list[str]:
        recipe = load_recipe(TWO_SITES, overrides)
        return [line for line in plan_lines(recipe) if line.startswith("warning: trainer.optim.lr")]

    assert warned() == [] == warned("--trainer.optim.lr", "1e-5")
    assert (
        "trainer.optim.lr (1e-06) hardly moves a model of 427,904 parameters" in warned("--trainer.optim.lr", "1e-6")[0]
    )


def test_a_model_folder_plans_without_its_weights(tmp_path: Path) -> None:
    from composer_prime.sites.embedded.model import named_shapes
    from tiny_policy.qwen3 import tiny_config

    tiny_config().save_pretrained(tmp_path)
    assert named_shapes(str(tmp_path)) == named_shapes("tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_link_adds_seconds_of_every_codec_and_a_round_is_unknown_without_the_steps() -> None:
    def rows(*arguments: float) -> dict[str, list[str]]:
        recipe = load_recipe(TWO_SITES, ["--sites.count", "4"])
        lines = [line.split() for line in plan_lines(recipe, *arguments)]
        return {words[0]: words[5:8] for words in lines if len(words) > 7 and words[0] in CODECS}

    assert set(rows(10.0)) == set(CODECS)
    assert rows(10.0)["int8"] == ["0.348", "1.043", "unknown"], "434.59 kB up, three times that down"
    assert rows(10.0, 0.03)["int8"] == ["0.348", "1.043", "1.043"], "the link is what takes longest"
    assert rows(10.0, 0.2)["int8"] == ["0.348", "1.043", "2.400"], "the twelve steps are"


def test_sites_beyond_gather_sites_fetch_merged_parts_instead() -> None:
    def down(sites: int) -> list[str]:
        lines = plan_lines(load_recipe(TWO_SITES, ["--sites.count", str(sites)]))
        return next(line.split() for line in lines if line.endswith("<- outer.codec"))[3:5]

    assert down(4) == ["1.30", "MB"] and down(16)[1] == "kB"  # 15 sixteenths of a payload, and the merged ones


def test_the_link_is_an_option_beside_the_overrides(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "composer_prime.cli.main", "plan", str(TWO_SITES)]
    arguments = ["--link-mbit", "50", "--outer.codec", "topk", "--step-s", "0.5"]
    subprocess.run([*command, *arguments], check=True)
    printed = capfd.readouterr().out
    assert 'codec = "topk"' in printed and "over 50 Mbit/s each way, inner steps of 0.5 s" in printed


def test_the_plan_says_what_a_site_fetches_that_joins_and_what_it_holds() -> None:
    def said(*overrides: str) -> str:
        return "\n".join(plan_lines(load_recipe(TWO_SITES, list(overrides))))

    assert "a site that joins fetches 1.71 MB of masters at most" in said()
    assert "a site that joins fetches 3.42 MB of masters at most" in said("--outer.momentum", "0.9")
    assert "memory of a site: 11.98 MB; forward passes on top, unknown" in said()  # 28 bytes a parameter


@pytest.mark.parametrize(
    ("codec", "max_steps", "warned"), [("topk", 199, True), ("topk", 200, False), ("int4", 8, False)]
)
def test_topk_with_few_rounds_is_warned_of_beside_the_output(cli, codec: str, max_steps: int, warned: bool) -> None:
    steps = ("--max_steps", max_steps, "--outer.inner_steps", 8, "--outer.sync_delay", 1)
    answer = cli("plan", TWO_SITES, "--outer.codec", codec, *steps)
    assert answer.code == 0 and "warning" not in answer.out
    assert ("gives 24 rounds" in answer.err and 'outer.codec "int4"' in answer.err) == warned


@pytest.mark.parametrize("sites", [2, 4])
def test_a_bucket_that_charges_egress_has_the_launchs_line_on_its_cost(sites: int) -> None:
    overrides = ["--outer.store", "s3://bucket/runs", "--sites.count", str(sites), "--max_steps", "400000"]
    recipe = load_recipe(TWO_SITES, overrides)
    (line,) = [line for line in plan_lines(recipe) if line.startswith("bucket traffic")]
    launched = plan_launch(recipe, "modal", environment={})
    assert [line] == list(bucket_lines(launched))
    priced = re.search(r"fetch (\S+) GB in (\d+) rounds, joins not counted, \$(\S+) where egress is charged", line)
    assert priced is not None and int(priced[2]) == recipe.rounds
    gb = recipe.rounds * sites * (sites - 1) * 434_590 / 1e9
    assert float(priced[1]) == pytest.approx(gb, rel=1e-4) and gb > 10
    assert float(priced[3]) == pytest.approx(gb * 0.09, rel=1e-3)


def test_a_store_that_is_a_folder_costs_nothing_and_nothing_is_said() -> None:
    for store in ([], ["--outer.store", "runs"], ["--outer.store", "file:///runs"]):
        assert not any("bucket traffic" in line for line in plan_lines(load_recipe(TWO_SITES, store)))
