"""TEACHERS.toml: what it must say, and the one line when it doesn't."""

from pathlib import Path

import pytest

from composer_prime.config.text_teachers import load_text_teachers
from composer_prime.errors import ConfigError

PRICES = "usd_per_million_prompt_tokens = 3\nusd_per_million_completion_tokens = 15.0\n"
BIG = f'[[teachers]]\nname = "big"\nbase_url = "https://api.example.com/v1/"\nmodel = "big-1"\n{PRICES}'


def load(tmp_path: Path, text: str):
    path = tmp_path / "TEACHERS.toml"
    path.write_text(text)
    return load_text_teachers(path)


def test_a_teacher_is_read_with_its_prices_and_zero_is_a_price(tmp_path: Path) -> None:
    free = BIG.replace("big", "own").replace("= 3", "= 0").replace("= 15.0", "= 0.0")
    big, own = load(tmp_path, BIG + "tier = 1\n" + free)
    assert (big.base_url, big.model, big.tier) == ("https://api.example.com", "big-1", 1)
    assert (big.usd_per_million_prompt_tokens, big.usd_per_million_completion_tokens) == (3, 15)
    assert (own.usd_per_million_prompt_tokens, own.usd_per_million_completion_tokens, own.tier) == (0, 0, 0)


@pytest.mark.parametrize("price", PRICES.splitlines())
def test_a_price_that_is_unknown_is_asked_for_and_never_guessed(tmp_path: Path, price: str) -> None:
    name = price.partition(" ")[0]
    with pytest.raises(ConfigError, match=rf"teachers\[0\].{name} is missing: add it"):
        load(tmp_path, BIG.replace(price, ""))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "teachers is missing: add it"),
        ("teachers = []", "teachers .* must have at least 1 item"),
        ("[[teachers", "isn't TOML"),
        (BIG.replace("model", "modell"), "modell isn't a known key: did you mean teachers.*model"),
        (BIG + "wight = 2\n", "did you mean teachers"),
        (BIG + "weight = 0\n", r"weight \(0\) must be greater than 0"),
        (BIG.replace("= 3", "= -3"), r"\(-3\) must be greater than or equal to 0"),
        (BIG.replace("https://", ""), "must be http://host:port"),
        (BIG + "extra_body = { n = 3 }\n", "extra_body can't hold n"),
        (BIG + 'prompt_cache = "anthropic"\n', "no usd_per_million_cache_write_tokens: prices aren't guessed"),
        (BIG + 'temperature = "cold"\n', "temperature"),
        (BIG + BIG, r"teacher name \(big\) is given twice"),
        (BIG + BIG.replace('"big"', '"twin"'), "big and twin are the same model"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as found:
        load(tmp_path, text)
    assert "\n" not in str(found.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        load_text_teachers(tmp_path / "none.toml")
