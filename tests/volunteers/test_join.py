"""Taking part: everything is checked before anything starts, and the volunteer's word ends it, pauses it, goes on."""

import base64
import os
import signal
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_prime.config import Recipe
from composer_prime.config.paths import run_uri
from composer_prime.config.prime_rl import Layout, PrimeRecipe
from composer_prime.config.recipe import RecipeBase
from composer_prime.config.toml import to_toml
from composer_prime.errors import BadInput, InvitationRefused, MachineUnfit
from composer_prime.sites.embedded import local_run
from composer_prime.sites.embedded.local_run import Surroundings
from composer_prime.sites.embedded.processes import catch_interrupt
from composer_prime.store import keys
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Close
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers import doctor
from composer_prime.volunteers import join as joining
from composer_prime.volunteers.doctor import Gpu, Torch
from composer_prime.volunteers.folder import HUB_PLACES, VolunteerFolder
from composer_prime.volunteers.invitation import Invitation, read_invitation
from composer_prime.volunteers.join import Reason, Warden, folder_of, join
from composer_prime.volunteers.shared_recipe import read_shared
from tests.volunteers.owned_run import GIB, OWNER, OwnedRun, consenting, machine

WAIT_S = 600


class FakeSite:
    """Runs as a real site does: until a signal comes, or `steps` calls are made; what it was given is noted."""

    def __init__(self, ends_with: int | None = None, then: Callable[[], object] = lambda: None) -> None:
        self.recipes: list[Recipe] = []
        self.resumed: list[bool] = []
        self.started = threading.Semaphore(0)
        self._ends_with, self._then = ends_with, then

    def __call__(self, recipe: RecipeBase, site: str, resume: bool) -> int:
        assert isinstance(recipe, Recipe) and site == "alice"
        self.recipes.append(recipe)
        self.resumed.append(resume)
        (recipe.output_dir / "run" / "sites" / site).mkdir(parents=True, exist_ok=True)
        with catch_interrupt() as interrupt:
            self.started.release()
            self._then()
            if self._ends_with is not None:
                return self._ends_with
            deadline = time.monotonic() + WAIT_S
            while not interrupt.is_set:
                assert time.monotonic() < deadline, "nobody ended the site"
                time.sleep(0.01)
        return 130


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_the_site_gets_the_runs_recipe_with_what_is_this_machines(run: OwnedRun) -> None:
    site, invitation, said = FakeSite(ends_with=0), run.invite(), []
    assert join(invitation, consenting(run, mbit_up=2.0, mbit_down=8.0), said.append, site) == 0
    (recipe,) = site.recipes
    assert run_uri(recipe) == run.store.uri and recipe.site.name == "alice"
    assert (recipe.site.max_mbit_up, recipe.site.max_mbit_down) == (2.0, 8.0)
    key_file = recipe.site.key_file
    assert key_file is not None and key_file.stat().st_mode & 0o777 == 0o600
    assert os.environ["COMPOSER_PRIME_KEY"] == str(key_file)
    text = "\n".join(said)
    assert "as site alice in run run" in text and "host name" in text and "reverse-letters" in text
    assert OWNER.public in text and "ok    memory" in text


def test_what_the_site_downloads_goes_below_the_folder(run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HUB_PLACES:
        monkeypatch.delenv(name, raising=False)
    root, found, said = run.folder / "alice", [], []
    look = FakeSite(ends_with=0, then=lambda: found.append((os.environ["HF_HOME"], os.environ["XDG_CACHE_HOME"])))
    join(run.invite(), consenting(run), said.append, look)
    assert found == [(str(root / "cache" / "huggingface"), str(root / "cache"))]
    assert "HF_HOME" not in os.environ and not any("Weights of the hub" in line for line in said)


@pytest.mark.parametrize("what", ["expired", "revoked", "forged", "unfit"])
def test_nothing_starts_and_no_key_stays_where_one_is_wrong(
    run: OwnedRun, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = run.invite(expires_at=1) if what == "expired" else run.invite()
    if what == "revoked":
        Owner(run.store, OWNER).revoke("alice")
    elif what == "forged":
        invitation = invitation.model_copy(update={"recipe": invitation.recipe + "\n"})
    elif what == "unfit":
        monkeypatch.setattr(doctor, "look", lambda: machine(free_memory_bytes=0))
    site = FakeSite(ends_with=0)
    with pytest.raises(MachineUnfit if what == "unfit" else InvitationRefused) as refusal:
        join(invitation, consenting(run), lambda line: None, site)
    assert "\n" not in str(refusal.value) and refusal.value.exit_code == 2
    assert site.recipes == []
    if what != "unfit":
        assert not list((run.folder / "alice").glob("*.key*")) and "COMPOSER_PRIME_KEY" not in os.environ


def test_a_forged_invitation_leaves_the_key_of_a_sound_one(run: OwnedRun) -> None:
    sound = run.invite()
    place = folder_of(sound, run.folder / "alice")
    join(sound, consenting(run), lambda line: None, FakeSite(ends_with=0))
    kept, seed = place.key_file.read_bytes(), bytes(32)
    other = {"public": SigningKey.from_bytes(seed).public, "seed": base64.b64encode(seed).decode()}
    forged = sound.model_copy(update=other)
    with pytest.raises(InvitationRefused, match="forged"):
        join(forged, consenting(run), lambda line: None, FakeSite(ends_with=0))
    assert place.key_file.read_bytes() == kept


def test_a_later_invitation_s_key_takes_the_earlier_one_s_place(run: OwnedRun) -> None:
    join(run.invite(), consenting(run), lambda line: None, FakeSite(ends_with=0))
    Owner(run.store, OWNER).revoke("alice")
    run.file().unlink()
    again = run.invite()
    join(again, consenting(run), lambda line: None, FakeSite(ends_with=0))
    assert SigningKey.load(folder_of(again, run.folder / "alice").key_file).public == again.public


def test_the_site_leaves_it_to_join_to_say_how_one_comes_back(run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Surroundings] = []

    def note(recipe: Recipe, site: str, resume: bool, surroundings: Surroundings) -> int:
        given.append(surroundings)
        return 0

    monkeypatch.setattr(local_run, "run_site", note)
    assert join(run.invite(), consenting(run), lambda line: None) == 0
    assert [each.continuing for each in given] == [None]


def test_the_run_s_end_is_told(run: OwnedRun) -> None:
    said: list[str] = []
    assert join(run.invite(), consenting(run), said.append, FakeSite(ends_with=0)) == 0
    assert said[-1] == "run run is finished"
    assert join(read_invitation(str(run.file())), consenting(run), said.append, FakeSite(ends_with=1)) == 1
    assert said[-1] != "run run is finished"


def test_who_comes_after_the_run_s_end_is_told_so_before_any_check(run: OwnedRun) -> None:
    invitation, said, site = run.invite(), [], FakeSite(ends_with=0)
    end, num_fragments = run.site.run.terms.final_version, len(run.site.run.fragments)
    ended = {"versions": (end,), "masters": ("0" * 64,), "voids": ((),)}
    close = Close(closed_by="a", **{name: values * num_fragments for name, values in ended.items()})
    run.store.create(keys.close(), run.site.roster.sign(close.model_copy(update={"closed_by": "b"})).to_bytes())
    assert join(invitation, consenting(run), said.append, site) == 0
    assert len(site.recipes) == 1, "another site's word that a closed it counts for nothing"
    run.store.put(keys.close(), run.site.roster.sign(close).to_bytes())
    assert join(invitation, consenting(run), said.append, site) == 0
    assert len(site.recipes) == 2, "nor does a's own, as long as there are rounds to come: any member may put one early"
    for fragment in range(num_fragments):
        run.store.create(keys.commit(fragment, end - 1), b"the last round's")
    assert join(invitation, consenting(run), said.append, site) == 0
    assert len(site.recipes) == 3, "nor the last round's, put early"
    for fragment in range(num_fragments):
        for version in range(end):
            run.store.create(keys.commit(fragment, version), b"the others'")
    said.clear()
    assert join(invitation, consenting(run), said.append, site) == 0
    assert said == ["run run is finished"] and len(site.recipes) == 3


def test_ctrl_c_leaves(run: OwnedRun) -> None:
    site, said = FakeSite(), []

    def interrupt() -> None:
        assert site.started.acquire(timeout=WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    helper = beside(interrupt)
    assert join(run.invite(), consenting(run), said.append, site) == 130
    helper.join()
    assert said[-1] == "left: run the same command to come back" and len(site.recipes) == 1


def test_a_pause_ends_the_site_and_its_end_starts_it_again(run: OwnedRun) -> None:
    invitation = run.invite()
    site, said = FakeSite(), []
    place = folder_of(invitation, run.folder / "alice")

    def pause_and_go_on() -> None:
        assert site.started.acquire(timeout=WAIT_S)
        place.pause()
        while not any(line.startswith("paused") for line in said):
            time.sleep(0.01)
        assert len(site.recipes) == 1, "nothing runs while it is paused"
        place.go_on()
        assert site.started.acquire(timeout=WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    helper = beside(pause_and_go_on)
    assert join(invitation, consenting(run), said.append, site) == 130
    helper.join()
    assert site.resumed == [False, True]


def test_ctrl_c_right_after_a_pause_began_is_not_lost(run: OwnedRun) -> None:
    invitation, said, paused = run.invite(), [], FakeSite()

    def end_late(recipe: RecipeBase, site: str, resume: bool) -> int:
        code = paused(recipe, site, resume)
        os.kill(os.getpid(), signal.SIGINT)  # while the site sums up, its own handler gone
        place.go_on()
        return code

    place = folder_of(invitation, run.folder / "alice")
    helper = beside(lambda: (paused.started.acquire(timeout=WAIT_S), place.pause()))
    assert join(invitation, consenting(run), said.append, end_late) == 130
    helper.join()
    assert len(paused.recipes) == 1 and said[-1].startswith("left")


def test_a_paused_site_can_be_left(run: OwnedRun) -> None:
    invitation, site, said = run.invite(), FakeSite(), []
    folder_of(invitation, run.folder / "alice").pause()

    def interrupt() -> None:
        while not any(line.startswith("paused") for line in said):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    helper = beside(interrupt)
    assert join(invitation, consenting(run), said.append, site) == 130
    helper.join()
    assert site.recipes == []


def test_the_hours_end_it_and_that_is_no_failure(run: OwnedRun) -> None:
    said: list[str] = []
    assert join(run.invite(), consenting(run, hours=1.5 / 3600), said.append, FakeSite()) == 0
    assert said[-1] == "left: the hours you gave are over"


def test_a_full_disk_ends_it_with_the_numbers(run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "examine", lambda *args, **more: _able(run))
    asked = consenting(run, max_disk_gib=0.001)
    site = FakeSite(then=lambda: (run.folder / "alice" / "log").write_bytes(bytes(2 * 2**20)))
    with pytest.raises(MachineUnfit, match=r"holds 0\.0 GiB, more than the 0\.001 of --max-disk-gib"):
        join(run.invite(), asked, lambda line: None, site)
    assert len(site.recipes) == 1


def _able(run: OwnedRun):
    return doctor.Diagnosis((), read_shared(run.invite("bob").recipe))


def test_one_folder_holds_one_process_of_a_site(run: OwnedRun) -> None:
    invitation = run.invite()
    place = folder_of(invitation, run.folder / "alice")
    with place.held():
        assert place.is_held()
        with pytest.raises(BadInput, match=rf"runs from .* already \(process {os.getpid()}\)"):
            join(invitation, consenting(run), lambda line: None, FakeSite())
    assert not place.is_held()


def invite_to_prime_rl(run: OwnedRun, **tables: object) -> Invitation:
    """An invitation whose recipe is for PRIME-RL."""
    invitation = run.invite()
    data = tomllib.loads(invitation.recipe)
    data = {name: data[name] for name in ("run", "max_steps", "outer")} | {"model": {"name": "org/model"}}
    recipe = to_toml(data | {"site": {"backend": "prime-rl"}} | tables)
    changed = invitation.model_copy(update={"recipe": recipe, "signature": None})
    return changed.model_copy(update={"signature": OWNER.sign(changed.message(run.site.run.sha256))})


@pytest.mark.usefixtures("prime_rl")
def test_a_prime_rl_site_runs_on_this_machines_gpus_with_a_batch_for_them(
    run: OwnedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = invite_to_prime_rl(
        run,
        prime_rl={"version": "0.8.0"},
        inference={},
        deployment={"num_train_gpus": 4, "num_infer_gpus": 4},
        orchestrator={"batch_size": 64, "group_size": 8},
    )
    given: list[PrimeRecipe] = []

    def site(recipe: PrimeRecipe, name: str, resume: bool) -> int:
        given.append(recipe)
        return 0

    for gpus in (4, 2):
        torch = Torch("2.13.0", run.site.run.manifest.test_vector, (Gpu("card", 24 * GIB),) * gpus)
        monkeypatch.setattr(doctor, "look", lambda torch=torch: machine(torch=torch))
        assert join(invitation, consenting(run, mbit_up=1.5), lambda line: None, site) == 0
    assert {recipe.site.max_mbit_up for recipe in given} == {1.5}
    assert [recipe.layout for recipe in given] == [Layout(2, 2), Layout(1, 1)]
    assert [recipe.upstream_value("orchestrator.batch_size") for recipe in given] == [32, 16]


def test_the_warden_ends_nothing_that_it_does_not_watch(tmp_path: Path) -> None:
    place, ended = VolunteerFolder(tmp_path, "alice"), threading.Event()
    place.pause()
    with Warden(place, end=ended.set) as warden:
        assert not ended.wait(1.5), "no site is there yet to hear it"
        with catch_interrupt():
            assert ended.wait(WAIT_S) and warden.reason is Reason.PAUSED
            ended.clear()
            assert not ended.wait(1.0), "once for each start"
