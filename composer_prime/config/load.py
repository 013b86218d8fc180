"""From a TOML file and command-line overrides to a Recipe: `recipe.toml @ more.toml --outer.lr 0.5`.

Composition is upstream's: files merge table by table, later ones win, and overrides win over every file.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from composer_prime.config.messages import describe
from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.toml import read_toml
from composer_prime.errors import ConfigError

AnyRecipe = TypeVar("AnyRecipe", bound=RecipeBase)
Keys = tuple[str, ...]
"""A setting's place: the parts of its dotted name."""


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe of embedded sites; arguments and errors as for `load_any`."""
    return recipe_from_data(read_data(path, overrides))


def load_any(path: Path | None, overrides: Sequence[str] = ()) -> Recipe | PrimeRecipe:
    """Read a recipe, whatever trains its sites.

    path       a TOML file, or None when the overrides name one with `@ file.toml`.
    overrides  `--a.b value`, `--a.b=value`, `--flag`, `@ file.toml`, `--table @ file.toml`. Values are TOML where they
               parse as TOML and text elsewhere; None clears a setting.

    Raises ConfigError, one line: what is wrong, the limit, the remedy.
    """
    return any_from_data(read_data(path, overrides))


def read_data(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """What the files and overrides spell together, not yet checked."""
    data: dict[str, Any] = {}
    if path is not None:
        _merge(data, read_file(path))
    files, settings = _split(list(overrides))
    for keys, file in files:
        _merge(data, _nest(keys, read_file(file)))
    for keys, value in settings:
        data = _assigned(data, keys, value, ".".join(keys))
    return data


def recipe_from_data(data: dict[str, Any]) -> Recipe:
    """The recipe a nested dict spells, checked strictly: text isn't a number, and true isn't 1. Raises ConfigError."""
    recipe = _checked(Recipe, data)
    if recipe.site.backend != "embedded":
        raise ConfigError(
            f'site.backend ("{recipe.site.backend}") must be "embedded" here: read the recipe by load_any'
        )
    return recipe


def any_from_data(data: dict[str, Any]) -> Recipe | PrimeRecipe:
    """As `recipe_from_data`, for the backend that the data name."""
    site = data.get("site")
    backend = site.get("backend") if isinstance(site, dict) else None
    return _checked(PrimeRecipe if backend == "prime-rl" else Recipe, data)


def _checked(kind: type[AnyRecipe], data: dict[str, Any]) -> AnyRecipe:
    try:
        return kind.model_validate_json(json.dumps(_without_none_words(data), default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(describe(kind, error)) from None


def parse_value(text: str) -> Any:
    """What an override's value means: a TOML number, boolean, string, list or table where it is one, else text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.get("value")
    plain = isinstance(value, bool | int | float | str | list | dict)
    return value if plain and len(parsed) == 1 else text


def read_file(path: Path, what: str = "recipe") -> dict[str, Any]:
    """The data of a TOML file. Raises ConfigError, which calls it by `what` it is."""
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", or take one from the clone's recipes/" if what == "recipe" else ""
        raise ConfigError(f"{what} ({path}) doesn't exist: check the path{there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} ({path}) can't be read: {error}: give a TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{what} ({path}) isn't TOML: {error}: correct that line") from None


def _split(tokens: list[str]) -> tuple[list[tuple[Keys, Path]], list[tuple[Keys, Any]]]:
    """The command line as (files with the table they fill, settings), each in order."""
    files: list[tuple[Keys, Path]] = []
    settings: list[tuple[Keys, Any]] = []
    rest = list(reversed(tokens))
    while rest:
        token = rest.pop()
        if token.startswith("@"):
            files.append(((), _file_after(token, rest)))
        elif token.startswith("--") and len(token) > 2:
            name, has_value, value = token[2:].partition("=")
            keys = _keys(name)
            if has_value:
                settings.append((keys, parse_value(value)))
            elif rest and rest[-1].startswith("@"):
                files.append((keys, _file_after(rest.pop(), rest)))
            elif rest and not rest[-1].startswith("--"):
                settings.append((keys, parse_value(rest.pop())))
            else:
                settings.append((keys, True))
        else:
            raise ConfigError(
                f"override ({token}) must be `--key value` or `@ file.toml`: write the setting's name before its value"
            )
    return files, settings


def _file_after(token: str, rest: list[str]) -> Path:
    """The file an `@` names, glued to it or as the next token, which is taken from `rest`."""
    if len(token) > 1:
        return Path(token[1:])
    if not rest:
        raise ConfigError("@ must be followed by a TOML file: write `@ file.toml`")
    return Path(rest.pop())


def _keys(name: str) -> Keys:
    keys = tuple(name.split("."))
    if not all(keys):
        raise ConfigError(f"override (--{name}) has an empty part: write `--table.key value`")
    return keys


def _nest(keys: Keys, value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(into: dict[str, Any], extra: dict[str, Any]) -> None:
    """Add `extra` to `into`: tables merge, everything else, lists too, is replaced."""
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _assigned(node: Any, keys: Keys, value: Any, spelled: str) -> Any:
    """The node with one setting changed, tables made on the way; a number in the path picks an entry of a list."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        place = _position(node, key, spelled)
        return [*node[:place], _assigned(node[place], rest, value, spelled), *node[place + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise ConfigError(f"override (--{spelled}) needs a table above {key!r}, but there stands {node!r}: drop one")
    table = node or {}
    return {**table, key: _assigned(table.get(key), rest, value, spelled)}


def _position(entries: list[Any], key: str, spelled: str) -> int:
    if not key.isdecimal() or int(key) >= len(entries):
        raise ConfigError(
            f"override (--{spelled}) needs an entry's number where it says {key!r}, below {len(entries)}: "
            "write `--list.0.key value`"
        )
    return int(key)


def _without_none_words(data: Any) -> Any:
    """The data with the text "None" made null, as upstream does, since TOML can't spell it."""
    if isinstance(data, dict):
        return {key: _without_none_words(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_none_words(value) for value in data]
    return None if data == "None" else data
