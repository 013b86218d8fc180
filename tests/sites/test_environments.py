"""Environments of a site: the shard they are cut to, and the one line that tells why one can't be used."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import EnvError
from composer_prime.sites.embedded.environments import MAX_ENDLESS_TASKS, load_sources
from tests.sites.letters_site import letters_site

PLAIN_TASKSET = """
import itertools
import verifiers.v1 as vf
__all__ = ["Numbers"]
class Number(vf.Task[vf.TaskData]):
    pass
class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    {body}
"""
TEN = "def load(self): return [Number(vf.TaskData(idx=i, prompt=str(i))) for i in range(10)]"
DICE = "def load(self): return [Number(vf.TaskData(prompt=str(random.random()))) for i in range(10)]"
ENDLESS = "INFINITE = True\n    def load(self): return (Number(vf.TaskData(prompt=str(i))) for i in itertools.count())"

counter = itertools.count()

Install = Callable[[str], str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(text)` puts a module on the path that no other test uses, and returns its name."""

    def put(text: str) -> str:
        name = f"made_up_env_{next(counter)}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return put


def prompts(tmp_path: Path, taskset_id: str, **settings: Any) -> list[str]:
    (source,) = load_sources(letters_site(tmp_path, taskset={"id": taskset_id}, **settings))
    return [str(task.data.prompt) for task in source.tasks]


def complaint(tmp_path: Path, **taskset: object) -> str:
    with pytest.raises(EnvError) as caught:
        load_sources(letters_site(tmp_path, taskset=taskset))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_sites_train_on_different_words_of_the_same_seed(tmp_path: Path) -> None:
    ours, theirs = (prompts(tmp_path, "reverse-letters", shard=shard, num_shards=2) for shard in (0, 1))
    assert len(ours) == len(theirs) == 256
    assert not set(ours) & set(theirs)
    assert ours == prompts(tmp_path, "reverse-letters", shard=0, num_shards=2)


def test_the_runs_seed_draws_the_words_unless_the_recipe_gives_one(tmp_path: Path) -> None:
    def words(run_seed: int, **taskset: int) -> list[str]:
        run = {"name": "letters", "seed": run_seed}
        settings = letters_site(tmp_path, taskset={"id": "reverse-letters", **taskset}, run=run)
        return [str(task.data.prompt) for task in load_sources(settings)[0].tasks]

    assert words(1) != words(2)
    assert words(1, seed=7) == words(2, seed=7)


def test_a_taskset_that_knows_no_shards_is_dealt_out_in_turn(tmp_path: Path, install: Install) -> None:
    name = install(PLAIN_TASKSET.format(body=TEN))
    shards = [prompts(tmp_path, name, shard=shard, num_shards=3) for shard in range(3)]
    assert shards == [["0", "3", "6", "9"], ["1", "4", "7"], ["2", "5", "8"]]


def test_an_endless_taskset_is_taken_up_to_a_limit(tmp_path: Path, install: Install) -> None:
    assert len(prompts(tmp_path, install(PLAIN_TASKSET.format(body=ENDLESS)))) == MAX_ENDLESS_TASKS


def test_tasks_made_by_dice_are_the_same_at_every_site_and_start(tmp_path: Path, install: Install) -> None:
    name = install(PLAIN_TASKSET.format(body=DICE).replace("import itertools", "import random"))
    whole = prompts(tmp_path, name)
    shards = [prompts(tmp_path, name, shard=shard, num_shards=2) for shard in (0, 1)]
    assert len({*whole}) == 10 and shards == [whole[::2], whole[1::2]]


def test_a_shard_without_tasks_is_refused(tmp_path: Path, install: Install) -> None:
    name = install(PLAIN_TASKSET.format(body=TEN))
    with pytest.raises(
        EnvError, match=r"has 10 tasks, none for shard 10 of 11: give it more tasks, or run fewer sites"
    ):
        prompts(tmp_path, name, shard=10, num_shards=11)


def test_an_environment_that_is_not_installed_is_told_from_one_that_misses_something(
    tmp_path: Path, install: Install
) -> None:
    assert complaint(tmp_path, id="no-such-letters") == (
        "environment 'no-such-letters' isn't installed (there is no module 'no_such_letters'): "
        "install its package, such as `pip install ./envs/no_such_letters`"
    )
    name = install("import reverse_letters\nimport not_there\n")
    message = complaint(tmp_path, id=name)
    assert f"environment '{name}' can't be imported: ModuleNotFoundError: No module named 'not_there'" in message
    assert f"{name}.py, line 2" in message
    assert "isn't installed" not in message


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("def broken(:\n", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no licence\\nfound')", "RuntimeError: no licence found"),
        ("x = 1", "AttributeError: taskset module"),
        ("__all__ = ['x']\nx = 1", "exports no Taskset subclass"),
        (PLAIN_TASKSET.format(body="def load(self): raise OSError('disk on fire')"), "OSError: disk on fire"),
    ],
)
def test_whatever_goes_wrong_inside_an_environment_is_named(
    tmp_path: Path, install: Install, text: str, cause: str
) -> None:
    assert cause in complaint(tmp_path, id=install(text))


def test_a_setting_the_taskset_does_not_have_is_named(tmp_path: Path) -> None:
    message = complaint(tmp_path, id="reverse-letters", lenght=5)
    assert message.startswith("environment 'reverse-letters' refuses its settings: env.taskset.lenght: ")


def test_a_setting_out_of_bounds_shows_the_tasksets_own_words(tmp_path: Path) -> None:
    assert "must not exceed the 1296 words" in complaint(tmp_path, id="reverse-letters", num_examples=2000)


def test_an_id_that_names_no_package_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path, id="some.module") == (
        "env.taskset.id (some.module) must be a package's name: such as reverse-letters"
    )
