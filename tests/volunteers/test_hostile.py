"""What a hostile owner writes into an invitation runs nothing: attacks that once worked, whole."""

import sys
from pathlib import Path
from typing import Any

import pytest

from composer_prime.errors import InvitationRefused
from composer_prime.sites.embedded.learner import import_loss
from composer_prime.volunteers.contribution import contribution_of
from composer_prime.volunteers.doctor import examine_for_invitation
from composer_prime.volunteers.join import join
from tests.volunteers.owned_run import OwnedRun, come, consenting, with_recipe

SOURCE = "orchestrator.train.source.0.env.taskset"
PLANTED = "planted_package"
PIPEPAGER = r"sets trainer\.loss\.import_path to 'pydoc\.pipepager'"


def train(recipe: Any, site: str, resume: bool) -> int:
    """What a site's trainer does with the recipe's loss."""
    import_loss(recipe.trainer.loss)("")  # pyright: ignore[reportArgumentType]
    return 0


def test_a_loss_that_runs_a_command_runs_none_and_is_refused_by_each_command(run: OwnedRun, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    loss = {"trainer.loss.import_path": "pydoc.pipepager", "trainer.loss.kwargs": {"cmd": f"touch {marker}"}}
    invitation = with_recipe(run, run.invite(), loss)
    come(run)
    try:
        for act in (
            lambda: join(invitation, consenting(run), lambda line: None, train),
            lambda: examine_for_invitation(invitation, consenting(run)),
            lambda: contribution_of(invitation, consenting(run)),
        ):
            with pytest.raises(InvitationRefused, match=PIPEPAGER) as refused:
                act()
            assert "\n" not in str(refused.value)
    finally:
        assert not marker.exists(), "the owner's command ran on the volunteer's machine"


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
