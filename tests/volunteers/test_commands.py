"""The commands as a person types them: what they print, and how a mistake is answered."""

import json
from pathlib import Path

import pytest

from composer_prime.gateway.serving import serve_run
from composer_prime.store import keys, open_store
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.terms import terms_of
from composer_prime.volunteers import doctor
from composer_prime.volunteers.folder import VolunteerFolder
from composer_prime.volunteers.invitation import encode, read_invitation
from tests.cli.command_line import Answer
from tests.sync.harness import ThreadSite, make_terms, run_sites
from tests.volunteers.conftest import open_run
from tests.volunteers.owned_run import CONSENT, OwnedRun, come, machine


def refused(answer: Answer, *parts: str) -> None:
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer
    assert answer.err.startswith("composer-prime: ") and all(part in answer.err for part in parts), answer.err


def invite(cli, run: OwnedRun, *more: object, name: str = "alice") -> Answer:
    files = ("--recipe", run.folder / "recipe.toml", "--key", run.folder / "owner.key", "--out", run.file(name))
    return cli("invite", run.uri, "--name", name, *files, *more)


def ran_once(place: Path) -> None:
    """Leave the folder as a site does that ran from there and is out."""
    with VolunteerFolder(place, "alice").held():
        pass


def test_inviting_says_what_was_written_and_that_it_is_secret(cli, run: OwnedRun) -> None:
    answer = invite(cli, run, "--expires", "12h")
    assert answer.code == 0 and "site alice may join run run until" in answer.out
    assert "holds a private key" in answer.err
    assert run.file().stat().st_mode & 0o777 == 0o600
    listed = cli("invite", run.uri, "--list")
    assert listed.code == 0 and listed.out.startswith("alice (1): holds, until 20") and "never came" in listed.out


def test_what_is_missing_is_named(cli, run: OwnedRun) -> None:
    refused(cli("invite", run.uri, "--name", "alice"), "invite needs --recipe, --key")
    assert cli("invite", run.uri, "--list").out == "nobody was invited yet\n"
    refused(invite(cli, run, "--expires", "soon"), "--expires (soon)")
    refused(invite(cli, run, "--credentials-env", "NOT_SET_ANYWHERE"), "which isn't set here")


@pytest.mark.parametrize(
    ("more", "guest"), [((), True), (("--guest",), True), (("--member",), False), (("--gateway",), True)]
)
def test_who_is_invited_is_a_guest_unless_said_otherwise(cli, run: OwnedRun, more, guest) -> None:
    given = " ".join(more).replace("--gateway", "--gateway gateway+https://h/run").split()
    assert invite(cli, run, *given).code == 0
    assert read_invitation(str(run.file())).guest is guest


@pytest.mark.parametrize("more", [("--credentials",), ("--credentials-env", "AWS_SECRET_ACCESS_KEY")])
def test_who_gets_keys_of_the_bucket_is_a_guest_unless_said_otherwise(
    cli, run: OwnedRun, more, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "scoped").write_text("AWS_ACCESS_KEY_ID=one\nAWS_SECRET_ACCESS_KEY=two\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "two")
    given = (*more, run.folder / "scoped") if len(more) == 1 else more
    answer = invite(cli, run, *given)
    assert answer.code == 0 and "as a guest: your own sites close the rounds" in answer.out
    assert read_invitation(str(run.file())).guest and "warning" not in answer.err
    cli("revoke", run.uri, "--site", "alice", "--key", run.folder / "owner.key")
    run.file().unlink()
    member = invite(cli, run, *given, "--member")
    assert member.code == 0 and not read_invitation(str(run.file())).guest
    assert "warning: site alice is a member, and a member's credentials can void every round" in member.err


@pytest.mark.parametrize(
    ("terms", "allowed", "named"),
    [
        ({"aggregate": "mean"}, "mean", 'outer.aggregate = "mean"'),
        ({"weighting": "tokens"}, "tokens", 'outer.weighting = "tokens"'),
        ({"weighting": "steps"}, "steps", 'outer.weighting = "steps"'),
    ],
)
def test_nobody_is_let_into_a_run_that_one_site_could_ruin_unless_its_terms_are_allowed_by_name(
    cli, tmp_path: Path, terms, allowed, named
) -> None:
    run, public = open_run(tmp_path / "open", **terms), SigningKey.generate().public
    admit = ("admit", run.uri, "--site", "bob", "--public", public, "--key", run.folder / "owner.key")
    refused(invite(cli, run), named, "one site could ruin it", f"--allow {allowed}")
    refused(cli(*admit), named, f"--allow {allowed}")
    refused(cli("gateway", run.uri, "--port", 0), named, f"--allow {allowed}")
    assert open_store(run.uri).list(keys.admissions_prefix()) == []
    refused(invite(cli, run, "--allow", "something"), named)
    assert invite(cli, run, "--allow", allowed).code == 0
    assert cli(*admit, "--allow", allowed).code == 0
    assert serve_run(open_store(run.uri), 2**20, allowed=[allowed]).facts.run == "run"


def test_a_run_with_an_owner_is_safe_without_a_word(cli, run: OwnedRun) -> None:
    terms = terms_of(run.recipe)
    assert (terms.aggregate, terms.weighting) == ("clipped", "equal") and terms.step_tokens is not None


def test_guests_never_become_the_majority(cli, run: OwnedRun) -> None:
    public = SigningKey.generate().public
    admit = ("admit", run.uri, "--public", public, "--key", run.folder / "owner.key", "--site")
    assert invite(cli, run).code == 0  # one member, one guest
    answer = invite(cli, run, name="bob")
    refused(answer, "1 guests and 1 members", "its majority", "composer-prime admit", "composer-prime revoke")
    refused(cli(*admit, "bob", "--guest"), "its majority")
    assert not run.file("bob").exists()
    assert cli(*admit, "b").code == 0
    assert invite(cli, run, name="bob").code == 0


def test_doctor_judges_for_an_invitation(cli, run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    invite(cli, run)
    answer = cli("doctor", run.file(), *CONSENT)
    assert answer.code == 0 and "ok    arithmetic" in answer.out and "ok    link" in answer.out
    assert not (Path.home() / "composer-prime" / "run").exists()
    monkeypatch.setattr(doctor, "look", lambda: machine(free_memory_bytes=0))
    told = cli("doctor", run.file(), *CONSENT, "--json")
    found = json.loads(told.out)
    assert told.code == 1 and found["able"] is False
    assert {check["name"] for check in found["checks"] if check["verdict"] == "fail"} == {"memory", "arithmetic"}


def test_doctor_judges_for_a_recipe_and_for_nothing(cli, run: OwnedRun) -> None:
    answer = cli("doctor", run.folder / "recipe.toml", "--model.name", "tiny", "--outer.codec", "topk")
    assert answer.code == 0 and "ok    memory" in answer.out and "link" not in answer.out
    bare = cli("doctor")
    assert bare.code == 0 and "memory" not in bare.out and "ok    torch" in bare.out
    refused(cli("doctor", run.folder / "none.toml"), "doesn't exist")


def test_keys_of_invitations_that_expired_unused_are_revoked_at_once(cli, run: OwnedRun) -> None:
    key = run.folder / "owner.key"
    for name in ("alice", "bob"):
        run.invite(name, expires_at=1000)
    run.invite("carol")
    answer = cli("revoke", run.uri, "--expired", "--key", key)
    assert answer.code == 0 and [line.split("; admitted now: ")[1] for line in answer.out.splitlines()] == [
        "a, bob, carol",
        "a, carol",
    ]
    again = cli("revoke", run.uri, "--expired", "--key", key)
    assert again.out == "no invitation expired unused: nobody is revoked\n"
    refused(cli("revoke", run.uri, "--key", key), "needs --site NAME or --expired")
    refused(cli("revoke", run.uri, "--site", "carol", "--expired", "--key", key), "not both")


def test_join_refuses_in_one_line(cli, run: OwnedRun) -> None:
    refused(cli("join", "hello"), "invitation hello doesn't exist")
    refused(cli("join", "cpinv1.AAAA"), "damaged")
    invite(cli, run)
    cli("revoke", run.uri, "--site", "alice", "--key", run.folder / "owner.key")
    refused(cli("join", run.file(), *CONSENT, "--folder", run.folder / "alice"), "was revoked")
    refused(cli("join", run.file(), "--pause", "--resume"), "opposite")


@pytest.mark.parametrize("command", ["doctor", "join"])
def test_what_the_volunteer_did_not_allow_is_refused_with_the_option_that_does(cli, run: OwnedRun, command) -> None:
    invite(cli, run)
    place = ("--folder", run.folder / "alice")
    refused(cli(command, run.file(), *place), f"leads to file://{run.uri}", "add --allow-local if")
    refused(cli(command, run.file(), *place, "--allow-local"), "environment reverse-letters", "--allow-env reverse-let")
    refused(cli("contribution", run.file()), "add --allow-local if")


def test_pause_and_resume_need_no_process(cli, run: OwnedRun) -> None:
    invite(cli, run)
    line, place = encode(read_invitation(str(run.file()))), run.folder / "alice"
    ran_once(place)
    paused = cli("join", line, "--folder", place, "--pause")
    assert paused.out == "site alice is paused; no process of it runs here\n"
    assert VolunteerFolder(place, "alice").is_paused
    with VolunteerFolder(place, "alice").held():
        assert cli("join", line, "--folder", place, "--resume").out == "site alice is not paused\n"
    assert not VolunteerFolder(place, "alice").is_paused


@pytest.mark.parametrize("wish", ["--pause", "--resume"])
def test_a_pause_in_a_folder_that_the_site_never_ran_from_is_refused_and_leaves_nothing(
    cli, run: OwnedRun, wish: str
) -> None:
    invite(cli, run)
    place = run.folder / "elsewhere"
    refused(cli("join", run.file(), "--folder", place, wish), f"never ran from {place}: add the --folder that it")
    assert not place.exists()


def test_a_pause_of_a_site_that_runs_says_that_it_takes_a_moment(cli, run: OwnedRun) -> None:
    invite(cli, run)
    place = run.folder / "alice"
    with VolunteerFolder(place, "alice").held():
        answer = cli("join", run.file(), "--folder", place, "--pause")
    assert answer.out == "site alice is paused: in some seconds nothing of it runs\n"
    assert VolunteerFolder(place, "alice").is_paused


def test_contribution_is_told(cli, tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    run_sites(ThreadSite(open_store(uri), make_terms(), "a"))
    answer = cli("contribution", uri, "--site", "a")
    assert answer.code == 0 and "site a in run run: done" in answer.out and "rounds: " in answer.out
    assert json.loads(cli("contribution", uri, "--site", "a", "--json").out)["starts"] == 1
    refused(cli("contribution", uri, "--site", "b"), "never came")


def test_an_invitation_is_enough_to_ask_for_ones_contribution(cli, run: OwnedRun) -> None:
    invite(cli, run)
    come(run, "alice")
    told = cli("contribution", run.uri, "--site", "alice")
    assert told.code == 0 and cli("contribution", run.file(), "--allow-local") == told
    cli("revoke", run.uri, "--site", "alice", "--key", run.folder / "owner.key")
    assert cli("contribution", run.file(), "--allow-local").code == 0
    refused(cli("contribution", run.file(), "--allow-local", "--site", "a"), "leave --site out")
    refused(cli("contribution", run.folder / "bob.invitation"), "is no invitation", "--site")


def test_a_key_that_the_volunteer_made_is_needed_behind_a_gateway_alone(cli, run: OwnedRun) -> None:
    public = SigningKey.generate().public
    invite(cli, run, "--public", public)
    refused(cli("contribution", run.file(), "--allow-local"), "never came")
    run.file().unlink()
    cli("revoke", run.uri, "--site", "alice", "--key", run.folder / "owner.key")
    invite(cli, run, "--public", public, "--gateway", "gateway+https://h/run")
    refused(cli("contribution", run.file(), "--allow-local"), "name its file with --key")
