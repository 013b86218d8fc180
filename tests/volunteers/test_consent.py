"""What an invitation can't choose by itself: the volunteer says which packages run, who sees prompts, and where to."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config import load_any
from composer_prime.errors import InvitationRefused
from composer_prime.losses.composer import composer_loss
from composer_prime.volunteers.doctor import examine_for_invitation
from composer_prime.volunteers.invitation import Invitation, is_public_url, read_invitation
from composer_prime.volunteers.join import join
from composer_prime.volunteers.shared_recipe import EMBEDDED, EXTRA, MODEL, PACKAGE, TEMPLATE, read_shared, shared_toml
from tests.architecture import REPOSITORY
from tests.volunteers.hostile_cases import PRIVATE_URLS, PUBLIC_URLS
from tests.volunteers.owned_run import OwnedRun, consenting, signed, with_recipe

SOURCE = "orchestrator.train.source.0.env"
TEACHER = {"name": "t", "base_url": "https://teacher.example.org"}


def sound(run: OwnedRun) -> Invitation:
    """The one invitation, as its owner first wrote it."""
    return read_invitation(str(run.file())) if run.file().exists() else run.invite()


def refused(run: OwnedRun, settings: dict[str, Any], said: str, **given: Any) -> None:
    """Doctor and join refuse an invitation with these settings, in one line, and nothing starts."""
    invitation = with_recipe(run, sound(run), settings)
    with pytest.raises(InvitationRefused, match=said) as by_doctor:
        examine_for_invitation(invitation, consenting(run, **given))
    with pytest.raises(InvitationRefused, match=said) as by_join:
        join(invitation, consenting(run, **given), lambda line: None, lambda *args: pytest.fail("a site started"))
    assert str(by_doctor.value) == str(by_join.value) and "\n" not in str(by_join.value)


@pytest.mark.parametrize("answer", ["reverse-letters", " reverse-letters "])
def test_who_types_an_environments_name_at_a_terminal_lets_it_run(run: OwnedRun, answer: str) -> None:
    asked, said = [], []
    given = consenting(run, allow_envs=())

    def ask(question: str) -> str:
        assert any(line.startswith("Code that runs here") for line in said), "who runs what is told before"
        asked.append(question)
        return answer

    assert join(sound(run), given, said.append, lambda *args: 0, ask) == 0
    assert asked == ["Environment reverse-letters and its tools run with your rights. Type its name to let them"]


@pytest.mark.parametrize("answer", ["", "y", "yes", "reverse_letters"])
def test_no_other_answer_does_and_no_key_is_left(run: OwnedRun, answer: str) -> None:
    given = consenting(run, allow_envs=())
    with pytest.raises(InvitationRefused, match="--allow-env reverse-letters"):
        join(sound(run), given, lambda line: None, lambda *args: pytest.fail("a site started"), lambda text: answer)
    assert not list((run.folder / "alice").glob("*.key*"))


def test_who_named_it_before_is_not_asked(run: OwnedRun) -> None:
    assert join(sound(run), consenting(run), lambda line: None, lambda *args: 0, lambda text: pytest.fail(text)) == 0


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_what_is_installed_and_no_environment_is_refused_even_when_allowed(run: OwnedRun, name: str) -> None:
    refused(run, {f"{SOURCE}.taskset.id": name}, f"names {name} as an environment, .* none", allow_envs=(name,))


def test_a_harness_that_runs_commands_needs_the_volunteers_word(run: OwnedRun) -> None:
    bash = {f"{SOURCE}.agent.harness.id": "bash"}
    refused(run, bash, "plays rollouts with bash, .* add --allow-harness bash")
    invitation, said = with_recipe(run, sound(run), bash), []
    assert join(invitation, consenting(run, allow_harnesses=("bash",)), said.append, lambda *args: 0) == 0
    assert any("and what a model says to bash" in line for line in said)


def test_a_teacher_needs_the_volunteers_word(run: OwnedRun) -> None:
    teacher = {"replay.teachers": [TEACHER]}
    refused(run, teacher, "teacher at https://teacher.example.org: add --allow-teacher https://teacher.example.org if")
    invitation = with_recipe(run, sound(run), teacher)
    given = consenting(run, allow_teachers=("https://teacher.example.org",))
    assert join(invitation, given, lambda line: None, lambda *args: 0) == 0


def test_a_server_of_hints_needs_the_volunteers_word_as_a_teacher_does(run: OwnedRun) -> None:
    hints = {"hints.base_url": "https://teacher.example.org"}
    refused(run, hints, "teacher at https://teacher.example.org: add --allow-teacher https://teacher.example.org if")
    given = consenting(run, allow_teachers=("https://teacher.example.org",))
    assert join(with_recipe(run, sound(run), hints), given, lambda line: None, lambda *args: 0) == 0
    refused(run, {"hints.teacher": "live", "hints.allow_live": True}, "hints.(teacher|allow_live)")


def test_a_private_teacher_is_refused_even_when_allowed(run: OwnedRun) -> None:
    teacher = {"replay.teachers": [TEACHER | {"base_url": "http://127.0.0.1:8000"}]}
    refused(run, teacher, "base_url to .* must be https://host", allow_teachers=("http://127.0.0.1:8000",))


@pytest.mark.parametrize("name", ["Documents", "org/model"])
def test_a_folder_of_the_volunteers_is_not_taken_for_a_model_or_a_dataset(
    run: OwnedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "home" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    refused(run, {"model.name": name}, f"names {name}, which is a file or folder here too")
    refused(run, {f"{SOURCE}.taskset.dataset": name}, f"names {name}, which is a file or folder here too")


def test_a_recipe_of_another_run_is_refused(run: OwnedRun) -> None:
    refused(run, {"run.name": "other"}, "is to run run, and its recipe to other")


# --- where it leads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", PRIVATE_URLS)
def test_what_is_a_machines_own_however_it_is_spelled_is_not_public(url: str) -> None:
    assert not is_public_url(url)


@pytest.mark.parametrize("url", PUBLIC_URLS)
def test_a_server_of_the_internet_is_public(url: str) -> None:
    assert is_public_url(url)


def leads(run: OwnedRun, said: str, **changes: Any) -> None:
    invitation = signed(run, sound(run), **changes)
    wishes = consenting(run, allow_local=False)
    with pytest.raises(InvitationRefused, match=said):
        examine_for_invitation(invitation, wishes)
    with pytest.raises(InvitationRefused, match=said):
        join(invitation, wishes, lambda line: None, lambda *args: pytest.fail("a site started"))


def test_a_folder_or_a_private_address_needs_the_volunteers_word(run: OwnedRun) -> None:
    leads(run, "leads to .*/bucket/run, on this machine or its network: add --allow-local")
    leads(run, "on this machine or its network: add --allow-local", uri="gateway+http://127.0.0.1:8790/run")
    local = {"AWS_ENDPOINT_URL": "http://192.168.1.1:9000"}
    leads(run, "AWS_ENDPOINT_URL = http://192.168.1.1:9000, on this", uri="s3://bucket/run", environment=local)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/other", "http://host.example/run", "gateway+https://user@host.example/run", "s3://b/../run"]
)
def test_a_place_that_is_none_is_refused_whatever_is_allowed(run: OwnedRun, uri: str) -> None:
    invitation = signed(run, sound(run), uri=uri)
    with pytest.raises(InvitationRefused, match="as its place, which must be a bucket, gateway or folder that ends"):
        examine_for_invitation(invitation, consenting(run))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_losses_arguments_are_all_listed() -> None:
    names = [name for name in inspect.signature(composer_loss).parameters if name != "inputs"]
    assert sorted(f"trainer.loss.kwargs.{name}" for name in names) == sorted(
        key for key in EMBEDDED if key.startswith("trainer.loss.kwargs.")
    )


RECIPES = [path for path in sorted((REPOSITORY / "recipes").glob("*/*.toml")) if path.stem != "logs"]
"""Files of this machine, which logs.toml reads, aren't shared."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_own_recipes_can_be_shared(path: Path) -> None:
    recipe = load_any(path)
    shared = read_shared(shared_toml(recipe))
    assert shared.max_steps == recipe.max_steps and shared.model.name == recipe.model.name


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (MODEL, ["tiny", "gpt2", "org/Model-1.5"], ["/m", "a/b/c", "../m", "a..b", "~/m", "", "m\n", "org/", 1, None]),
        (PACKAGE, ["reverse-letters", "math_env"], ["antigravity", "pdb", "os", "a.b", "a/b", "A", "-a", "a\n", "", 1]),
        (EXTRA, [1, 0.5, True, "train", "org/data"], ["/etc", "a/b/c", "x:y", "http://a", "~", ".", "a\nb", 1e300, []]),
        (TEMPLATE, ["{error}: {tool}", "{{x}}", ""], ["{error:99}", "{error!r}", "{error.x}", "{0}", "{", "\x1b[2J"]),
    ],
    ids=["model", "package", "extra", "template"],
)
def test_texts_are_what_they_say(rule: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not rule.admits(value)] == []
    assert [value for value in bad if rule.admits(value)] == []
