"""The recipe in an invitation says nothing about the volunteer's machine, and one that does is refused."""

import pytest

from composer_prime.config import recipe_from_data
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, ConfigError, InvitationRefused
from composer_prime.volunteers.shared_recipe import read_shared, shared_toml
from tests.config.recipes import minimal
from tests.volunteers.owned_run import run_recipe

DANGEROUS = {
    "inference": {"python": "/tmp/evil"},
    "output_dir": "/etc",
    "site": {"key_file": "/home/alice/.ssh/id_ed25519"},
    "replay": {"teachers": [{"name": "t", "base_url": "https://evil.example", "api_key_var": "AWS_SECRET_ACCESS_KEY"}]},
    "sites": {"count": 26},
    "clean": True,
}
LOUD = {"trainer": {"loss": {"kwargs": {"replay_tau": 0.1}}}}


def test_what_travels_reads_back_to_the_same_run() -> None:
    recipe = run_recipe(store="s3://bucket", owner="x")
    shared = read_shared(shared_toml(recipe))
    assert shared.outer is not None and recipe.outer is not None
    assert shared.outer == recipe.outer.model_copy(update={"store": None, "owner": None})
    assert shared.model_copy(update={"outer": recipe.outer}) == recipe


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_is_the_machines_own_is_left_out_and_refused(name: str) -> None:
    data = minimal(**{name: DANGEROUS[name]}, **LOUD)
    recipe = recipe_from_data(data)
    read_shared(shared_toml(recipe))
    with pytest.raises(InvitationRefused, match="each machine's own affair"):
        read_shared(to_toml(data))


def test_prime_rls_command_is_the_machines_own() -> None:
    data = {"run": {"name": "r"}, "max_steps": 9, "model": {"name": "m"}, "site": {"backend": "prime-rl"}}
    data["prime_rl"] = {"command": ["sh", "-c", "evil"]}
    with pytest.raises(InvitationRefused, match=r"prime_rl\.command"):
        read_shared(to_toml(data))


@pytest.mark.parametrize("text", ["not = [toml", "nothing = 1\n", ""])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises((ConfigError, BadInput)):
        read_shared(text)
