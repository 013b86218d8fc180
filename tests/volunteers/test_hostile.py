"""What a hostile owner writes into an invitation runs nothing: attacks that once worked, whole."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import InvitationRefused
from composer_prime.sites.embedded.learner import import_loss
from composer_prime.volunteers import doctor
from composer_prime.volunteers.contribution import contribution_of
from composer_prime.volunteers.doctor import Torch, examine_for_invitation
from composer_prime.volunteers.join import join
from tests.volunteers.owned_run import OwnedRun, come, consenting, machine, with_recipe

SOURCE = "orchestrator.train.source.0.env.taskset"
PLANTED = "planted_package"
PIPEPAGER = r"sets trainer\.loss\.import_path to 'pydoc\.pipepager'"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnedRun]:
    made = OwnedRun(tmp_path)
    able = machine(torch=Torch("2.13.0", made.site.run.manifest.test_vector))
    monkeypatch.setattr(doctor, "look", lambda: able)
    before = dict(os.environ)
    yield made
    os.environ.clear()
    os.environ.update(before)


def train(recipe: Any, site: str, resume: bool) -> int:
    """What a site's trainer does with the recipe's loss."""
    import_loss(recipe.trainer.loss)("")  # pyright: ignore[reportArgumentType]
    return 0


def shell_command(marker: Path) -> dict[str, Any]:
    """A recipe's settings that once ran a command of the owner's choice."""
    return {"trainer.loss.import_path": "pydoc.pipepager", "trainer.loss.kwargs": {"cmd": f"touch {marker}"}}


def test_a_loss_that_runs_a_command_runs_none_through_join(run: OwnedRun, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    invitation = with_recipe(run, run.invite(), shell_command(marker))
    try:
        with pytest.raises(InvitationRefused, match=PIPEPAGER) as refused:
            join(invitation, consenting(run), lambda line: None, train)
        assert "\n" not in str(refused.value)
    finally:
        assert not marker.exists(), "the owner's command ran on the volunteer's machine"


def test_a_loss_that_runs_a_command_is_refused_by_doctor_and_contribution(run: OwnedRun, tmp_path: Path) -> None:
    invitation = with_recipe(run, run.invite(), shell_command(tmp_path / "marker"))
    come(run)
    for look in (examine_for_invitation, contribution_of):
        with pytest.raises(InvitationRefused, match=PIPEPAGER):
            look(invitation, consenting(run))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [f"{PLANTED}.inner", "antigravity", "pdb", f"some/{PLANTED}", "../planted", "Planted"])
def test_doctor_imports_nothing_that_an_invitation_names_as_an_environment(
    run: OwnedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = tmp_path / "packages" / PLANTED
    package.mkdir(parents=True)
    marker = tmp_path / "marker"
    (package / "__init__.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
    monkeypatch.syspath_prepend(package.parent)
    before = set(sys.modules)
    invitation = with_recipe(run, run.invite(), {f"{SOURCE}.id": name})
    try:
        with pytest.raises(InvitationRefused, match=r"env\.taskset\.id"):
            examine_for_invitation(invitation, consenting(run))
    finally:
        assert not marker.exists(), "the package was imported"
    assert not {"antigravity", "pdb", PLANTED} & (set(sys.modules) - before)


def test_an_ordinary_recipe_may_still_name_any_loss(run: OwnedRun, tmp_path: Path) -> None:
    settings = shell_command(tmp_path / "marker")
    loss = run.recipe.trainer.loss.model_copy(
        update={"import_path": settings["trainer.loss.import_path"], "kwargs": settings["trainer.loss.kwargs"]}
    )
    assert callable(import_loss(loss))
