"""The environments we ship, as verifiers sees them: their rows, their shards, their rewards."""

import ast
import asyncio
import importlib
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

ENVS = Path(__file__).parents[2] / "envs"
NAMES = sorted(path.parent.name for path in ENVS.glob("*/pyproject.toml") if path.parent.name != "tiny_policy")
"""Of environments; composer_prime_pairs is in our wheel."""
REWARD = {"reverse_letters": "exact_match", "sort_letters": "right_letters"}
SOLVED = {"reverse_letters": ("Reverse: ", "cafe", "efac"), "sort_letters": ("Sort: ", "cafe", "acef")}

every_env = pytest.mark.parametrize("name", NAMES)
letters_env = pytest.mark.parametrize("name", sorted(SOLVED))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def tasks(name: str, **settings: Any) -> list[Any]:
    """The tasks that verifiers makes of the environment with these settings."""
    chosen = {"taskset": {"id": name.replace("_", "-"), **settings}, "agent": {"runtime": {"type": "subprocess"}}}
    return list(vf.load_environment(vf.resolve_env_config(chosen)).taskset)


def words(name: str, **settings: Any) -> list[str]:
    return [task.data.prompt.rpartition(" ")[2] for task in tasks(name, **settings)]


@every_env
def test_a_package_exports_exactly_one_taskset_and_imports_nothing_of_ours(name: str) -> None:
    exported = [getattr(module(name), each) for each in module(name).__all__]
    assert [issubclass(each, vf.Taskset) for each in exported] == [True]
    nodes = list(ast.walk(ast.parse((ENVS / name / f"{name}.py").read_text())))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} - {"json", "math", "typing"} == {
        "random",
        "collections",
        "verifiers",
        "pydantic",
    }


@every_env
def test_a_package_is_described_as_verifiers_wants_it(name: str) -> None:
    project = tomllib.loads((ENVS / name / "pyproject.toml").read_text())
    assert project["project"]["name"].replace("-", "_") == name
    assert project["project"]["dependencies"] == ["verifiers"]
    assert project["build-system"]["build-backend"] == "hatchling.build"
    assert (ENVS / name / project["project"]["readme"]).exists()


@letters_env
def test_only_the_exact_answer_is_rewarded(name: str) -> None:
    verb, word, answer = SOLVED[name]
    row = tasks(name, num_examples=1)[0]
    task = type(row)(row.data.model_copy(update={"prompt": verb + word, "answer": answer}))
    rewards = {
        reply: asyncio.run(getattr(task, REWARD[name])(SimpleNamespace(last_reply=reply)))
        for reply in (answer, word, answer + answer, answer.upper(), "")
    }
    assert rewards == {answer: 1.0, word: 0.0, answer + answer: 0.0, answer.upper(): 0.0, "": 0.0}


def test_with_credit_for_letters_each_one_in_its_place_is_rewarded() -> None:
    row = tasks("sort_letters", num_examples=1, credit="letters")[0]
    task = type(row)(row.data.model_copy(update={"answer": "acef"}))
    rewards = {
        reply: asyncio.run(task.right_letters(SimpleNamespace(last_reply=reply)))
        for reply in ("acef", "acfe", "aecf", "cafe", "ace", "acefa", "")
    }
    assert rewards == {"acef": 1.0, "acfe": 0.5, "aecf": 0.5, "cafe": 0.0, "ace": 0.0, "acefa": 0.0, "": 0.0}


@letters_env
def test_every_row_asks_and_answers_its_task(name: str) -> None:
    verb, _, _ = SOLVED[name]
    solve = {"Reverse: ": lambda word: word[::-1], "Sort: ": lambda word: "".join(sorted(word))}[verb]
    rows = tasks(name)
    assert [row.data.idx for row in rows] == list(range(256))
    for row in rows:
        word = row.data.prompt.removeprefix(verb)
        assert len(word) == 4 and set(word) <= set("abcdef")
        assert row.data.answer == solve(word)


@letters_env
def test_rows_are_a_function_of_the_seed(name: str) -> None:
    assert words(name, seed=3) == words(name, seed=3)
    assert words(name, seed=3) != words(name, seed=4)


@letters_env
def test_shards_share_no_word_also_with_those_of_a_site_that_joins_later(name: str) -> None:
    shards = [
        words(name, shard=0, num_shards=2),
        words(name, shard=1, num_shards=2),
        words(name, shard=2, num_shards=3),
    ]
    assert [len(shard) for shard in shards] == [256] * 3
    assert len(set().union(*shards)) == 3 * 256


@letters_env
def test_all_words_there_are_can_be_dealt_out(name: str) -> None:
    assert len(set(words(name, num_examples=8, length=3, alphabet="ab"))) == 8


@letters_env
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"num_examples": 700, "num_shards": 2},
            r"2 x 700 = 1400\) must not exceed the 1296 words.*lower num_examples",
        ),
        ({"shard": 2, "num_shards": 2}, r"shard \(2\) must be smaller than num_shards \(2\)"),
        ({"alphabet": "abca"}, r"alphabet \('abca'\) repeats a letter"),
    ],
)
def test_impossible_settings_are_refused_with_value_limit_and_remedy(
    name: str, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        tasks(name, **settings)
