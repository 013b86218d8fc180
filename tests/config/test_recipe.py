"""What a recipe knows about itself."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.config import RunPaths, models_cache, run_uri, store_uri
from composer_prime.config.toml import to_toml
from composer_prime.errors import ConfigError
from tests.config.recipes import recipe

OUTER = {"inner_steps": 8, "fragments": 2}


def test_rounds_are_whole_outer_steps() -> None:
    assert recipe(outer=OUTER, max_steps=47).rounds == 5
    assert recipe(max_steps=47).rounds == 0


def test_a_recipe_that_prime_rl_trains_is_not_taken_for_an_embedded_one() -> None:
    with pytest.raises(ConfigError, match=r'site\.backend \("prime-rl"\) must be "embedded" here: .* load_any'):
        recipe(site={"backend": "prime-rl"})


def test_one_site_bears_its_own_name_and_several_bear_letters() -> None:
    assert recipe(site={"name": "berlin"}).site_names == ("berlin",)
    assert recipe(sites={"count": 3}).site_names == ("a", "b", "c")


def test_the_bucket_of_a_run_lies_beside_its_sites_unless_the_recipe_names_one(tmp_path: Path) -> None:
    here = recipe(outer=OUTER, output_dir=str(tmp_path))
    assert run_uri(here) == f"{tmp_path}/test/bucket/test"
    assert RunPaths.of(here).bucket == tmp_path / "test" / "bucket"
    assert run_uri(recipe(outer={**OUTER, "store": "s3://bucket/prefix/"})) == "s3://bucket/prefix/test"
    assert run_uri(recipe(outer={**OUTER, "store": "shared"})) == str(Path.cwd() / "shared" / "test")
    assert store_uri(recipe()) is None and run_uri(recipe()) is None


def test_no_two_things_of_a_site_lie_at_the_same_place(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    site, other = run.site("a"), run.site("b")
    places = [
        run.bucket, run.recipe, run.summary, run.reward_plot, site.settings, site.result,
        site.broadcast(1), site.checkpoint(1), site.log("trainer"), site.tape("trainer"),
        site.log("inference"), other.settings,
    ]  # fmt: skip
    assert len(set(places)) == len(places)
    assert all(place.is_relative_to(tmp_path) for place in places)


def test_the_model_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_cache() == tmp_path / "composer-prime" / "models"


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_toml_text_reads_back_to_the_data_it_was_made_of(data: dict) -> None:
    assert tomllib.loads(to_toml(data)) == data
