"""A site's settings: what the recipe leaves to be decided, and that every process reads the same."""

import zlib
from pathlib import Path

from composer_prime.config import Recipe, SiteSettings, settle_site
from tests.config.recipes import recipe

OUTER = {"inner_steps": 8, "fragments": 2}


def settle(recipe: Recipe, site: str) -> SiteSettings:
    return settle_site(recipe, site, inference_port=8000, model_dir=Path("model"), resume=False)


def test_settings_read_back_as_they_were_written(tmp_path: Path) -> None:
    settings = settle(recipe(outer=OUTER, output_dir=str(tmp_path), sites={"count": 2}), "b")
    folder = settings.save()
    assert folder == tmp_path / "test" / "sites" / "b"
    assert SiteSettings.load(folder) == settings
    assert settings.paths.root == folder


def test_settings_mean_the_same_in_another_working_folder(tmp_path: Path) -> None:
    settings = settle(recipe(outer=OUTER, inference={"python": ".venv-vllm/bin/python"}), "a")
    python = settings.recipe.inference.python
    assert python is not None and python.is_absolute()
    assert settings.recipe.output_dir.is_absolute() and settings.model_dir.is_absolute()
    assert settings.run_uri == f"{Path.cwd()}/outputs/test/bucket/test"


def test_sites_of_a_run_take_a_shard_and_a_seed_each_and_so_do_joiners() -> None:
    two = recipe(sites={"count": 2})
    settled = {site: settle(two, site) for site in ("a", "b", "c", "d")}
    assert [settled[site].data_shard for site in "abcd"] == [0, 1, 2, 3]
    assert [settled[site].num_shards for site in "abcd"] == [2, 2, 3, 4]
    assert len({settings.sampling_seed for settings in settled.values()}) == 4
    assert settle(two, "berlin").data_shard == 2
    assert settled["c"].site_names == ("a", "b")


def test_seeds_follow_the_run_and_not_the_machine() -> None:
    assert settle(recipe(), "a").sampling_seed == zlib.crc32(b"0/a")
    assert settle(recipe(run={"name": "test", "seed": 1}), "a").sampling_seed == zlib.crc32(b"1/a")


def test_overrides_decide_shard_and_seed() -> None:
    overridden = recipe(sites={"count": 2, "overrides": {"b": {"data_shard": 6, "sampling_seed": 9}}})
    assert (settle(overridden, "b").data_shard, settle(overridden, "b").sampling_seed) == (6, 9)
    assert settle(overridden, "a").num_shards == settle(overridden, "b").num_shards == 7
    assert settle(overridden, "a").data_shard == 0
