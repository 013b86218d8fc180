"""The models that composer-prime knows by name, as their table has them."""

import json
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from composer_prime.config.recipe import TINY_MODELS
from tiny_policy.built_in import models


def test_the_names_are_those_that_a_recipe_may_say() -> None:
    assert tuple(models.BUILT_IN) == TINY_MODELS


def test_each_has_a_key_of_its_own_that_begins_with_its_name() -> None:
    keys = {name: models.key(name) for name in TINY_MODELS}
    assert len({key.rpartition("-")[2] for key in keys.values()}) == len(keys)
    assert all(key.startswith(f"{name}-v{models.VERSION}-") for name, key in keys.items())


def test_what_describes_one_is_its_configuration_and_a_tokenizer_of_that_size(tmp_path: Path) -> None:
    for name in TINY_MODELS:
        models.describe(name, tmp_path / name)
        assert not list((tmp_path / name).glob("*.safetensors"))
        rows = json.loads((tmp_path / name / "config.json").read_text())["vocab_size"]
        assert AutoConfig.from_pretrained(tmp_path / name).vocab_size == rows
        assert len(AutoTokenizer.from_pretrained(tmp_path / name)) == rows
