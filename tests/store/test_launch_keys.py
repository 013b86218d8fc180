"""Keys of launches: spelled and read back alike, and nobody else's."""

import pytest

from composer_prime.errors import ConfigError, ProtocolError
from composer_prime.launch import launch_keys
from composer_prime.store import keys
from composer_prime.store.base import is_key

SHA = "0123456789abcdef" * 4


def test_every_key_of_a_launch_is_legal_and_below_its_prefix() -> None:
    place = (12, "r0", 3)
    found = [launch_keys.launch(12), launch_keys.stop(12), *(spell(*place) for spell in SPELLED)]
    assert all(is_key(key) and key.startswith(launch_keys.launch_prefix(12)) for key in found)
    assert len(set(found)) == len(found)
    recipe = launch_keys.recipe(SHA)
    assert is_key(recipe) and recipe.startswith(launch_keys.launches_prefix())


SPELLED = (launch_keys.intent, launch_keys.job, launch_keys.stop, launch_keys.end)


def test_an_intents_key_is_read_back() -> None:
    assert launch_keys.parse_intent(launch_keys.intent(7, "site-1", 42)) == (7, "site-1", 42)


def test_a_launchs_key_is_read_back_and_others_are_not() -> None:
    assert launch_keys.parse_launch(launch_keys.launch(7)) == 7
    for other in (
        launch_keys.stop(7),
        launch_keys.recipe(SHA),
        launch_keys.intent(7, "a", 1),
        keys.manifest(),
    ):
        assert launch_keys.parse_launch(other) is None
    for other in (
        launch_keys.launch(7),
        launch_keys.stop(7),
        launch_keys.stop(7, "a"),
        launch_keys.end(7, "a", 1),
        launch_keys.recipe(SHA),
        keys.claim("a", 1),
    ):
        assert launch_keys.parse_intent(other) is None


def test_launches_are_never_collected() -> None:
    assert keys.parse_collectable(launch_keys.intent(1, "a", 1)) is None


@pytest.mark.parametrize(("site", "attempt"), [("A", 1), ("a/b", 1), ("a", 10_000), ("a", -1)])
def test_what_would_not_sort_or_is_no_name_is_refused(site: str, attempt: int) -> None:
    with pytest.raises((ConfigError, ProtocolError)):
        launch_keys.intent(1, site, attempt)
