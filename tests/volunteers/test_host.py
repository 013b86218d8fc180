"""Inviting: a key admitted, a record left, a file written; or none of them."""

import tomllib
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, ConfigError, InvitationRefused
from composer_prime.gateway import invitation_keys
from composer_prime.store import keys
from composer_prime.sync.owner import Owner
from composer_prime.sync.records import Admission, Invited
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers.credentials import read_credentials
from composer_prime.volunteers.host import Invitee, expired_unused, gateway_warning, invite, parse_expiry, standings
from composer_prime.volunteers.invitation import read_invitation
from tests.volunteers.owned_run import HOUR_S, OWNER, OwnedRun, come, run_recipe


def newest_admission(run: OwnedRun) -> Admission | None:
    records = run.store.list(keys.admissions_prefix())
    return Admission.from_bytes(run.store.get(records[-1]), records[-1]) if records else None


def admitted(run: OwnedRun) -> dict[str, str]:
    newest = newest_admission(run)
    return {} if newest is None else newest.keys


def test_an_invitation_is_signed_and_its_fresh_key_is_admitted(run: OwnedRun) -> None:
    made = run.invite()
    key = made.key()
    assert key is not None and admitted(run)["alice"] == key.public == made.public
    assert read_invitation(str(run.file())) == made and made.uri == run.store.uri and made.run == "run"
    record = Invited.from_bytes(run.store.get(invitation_keys.invitation("alice", 1)), "record")
    assert (record.site, record.public, record.expires_at) == ("alice", made.public, made.expires_at)
    assert made.seed is not None and made.seed.encode() not in run.store.get(invitation_keys.invitation("alice", 1))


def test_a_volunteers_own_key_is_admitted_and_no_secret_travels(run: OwnedRun) -> None:
    public = SigningKey.generate().public
    made = run.invite(public=public)
    assert made.seed is None and admitted(run)["alice"] == public


def test_a_guest_is_admitted_as_one(run: OwnedRun) -> None:
    assert run.invite("alice", guest=True).guest and not run.invite("bob").guest
    newest = newest_admission(run)
    assert newest is not None and newest.guests == ("alice",) and set(newest.keys) == {"a", "alice", "bob"}
    assert [each.guest for each in standings(run.store, 0.0)] == [True, False]


def test_the_recipe_travels_without_what_is_each_machines_own(run: OwnedRun) -> None:
    data = tomllib.loads(run.invite().recipe)
    assert data["outer"]["inner_steps"] == 4 and data["run"]["name"] == "run"
    assert "output_dir" not in data and not {"store", "owner", "keys"} & data["outer"].keys()


def test_a_run_without_an_owner_has_nobody_to_invite(tmp_path: Path) -> None:
    run = OwnedRun(tmp_path, owner=None)
    with pytest.raises(BadInput, match=r"has no owner, so nobody can sign .* outer\.owner"):
        run.invite()
    assert not run.file().exists()


@pytest.mark.parametrize("taken", ["a", "alice"])
def test_a_name_that_is_admitted_is_not_invited_again(run: OwnedRun, taken: str) -> None:
    run.invite("alice")
    before = admitted(run)
    with pytest.raises(BadInput, match=f"site {taken} is admitted already"):
        run.invite(taken)
    assert admitted(run) == before


def test_where_the_bucket_refuses_no_file_is_left(run: OwnedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise BadInput("someone else did")

    monkeypatch.setattr(Owner, "admit", refuse)
    with pytest.raises(BadInput, match="someone else"):
        run.invite()
    assert not run.file().exists() and not run.store.list(invitation_keys.invitations_prefix())


def test_where_the_file_can_not_be_written_nobody_is_admitted(run: OwnedRun) -> None:
    run.file().write_text("something else")
    with pytest.raises(InvitationRefused, match="exists"):
        run.invite()
    assert admitted(run) == {} and run.file().read_text() == "something else"


def test_another_recipe_than_the_runs_is_refused(run: OwnedRun) -> None:
    invitee = Invitee("alice", 2**31)
    with pytest.raises(ConfigError, match=r"outer\.inner_steps: run 4, recipe 8"):
        invite(run.store, OWNER, invitee, run_recipe(inner_steps=8), run.file())
    with pytest.raises(BadInput, match="is owned by"):
        invite(run.store, SigningKey.generate(), invitee, run.recipe, run.file())
    assert not run.file().exists() and admitted(run) == {}


def test_a_place_that_is_not_the_runs_is_refused(run: OwnedRun) -> None:
    with pytest.raises(BadInput, match="must end with the run's name, /run"):
        run.invite(uri="gateway+https://host/other", guest=True)
    assert run.invite(uri="gateway+https://host/run/", guest=True).uri == "gateway+https://host/run"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("http://127.0.0.1:8790/run", r"write gateway\+http://127\.0\.0\.1:8790/run$"),
        ("https://host/run", r"write gateway\+https://host/run$"),
        ("s3://bucket/run", r"write gateway\+https://HOST/RUN$"),
    ],
)
def test_a_gateway_s_address_that_leads_to_none_is_refused(run: OwnedRun, given: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=remedy):
        run.invite(uri=given, guest=True)
    assert admitted(run) == {} and not run.file().exists()


def test_a_gateway_that_others_reach_without_tls_is_warned_of() -> None:
    for uri in ("https://host/run", "http://127.0.0.1:8790/run", "http://[::1]:8790/run", "http://localhost:1/run"):
        assert gateway_warning(f"gateway+{uri}") is None
    for uri in ("http://host/run", "http://10.0.0.7:8790/run"):
        assert "without TLS" in str(gateway_warning(f"gateway+{uri}"))


def test_a_member_is_not_invited_to_a_gateway(run: OwnedRun) -> None:
    with pytest.raises(BadInput, match=r"site alice would close rounds .* invite a guest"):
        run.invite(uri="gateway+https://host/run")
    assert admitted(run) == {} and not run.file().exists()


def test_the_list_tells_who_holds_what(run: OwnedRun) -> None:
    now = run.invite("alice").expires_at - HOUR_S
    run.invite("bob")
    Owner(run.store, OWNER).revoke("bob")
    run.file("bob").unlink()
    run.invite("bob")
    run.invite("carol")
    Owner(run.store, OWNER).revoke("carol")
    found = [(each.site, each.number, each.state) for each in standings(run.store, now)]
    assert found == [("alice", 1, "holds"), ("bob", 1, "replaced"), ("bob", 2, "holds"), ("carol", 1, "revoked")]
    later = {each.site: each.state for each in standings(run.store, now + 2 * HOUR_S)}
    assert later["alice"] == "expired" and later["carol"] == "revoked"


def test_the_list_tells_who_is_there_and_where_others_were_last_seen(run: OwnedRun) -> None:
    sites = {}
    for name in ("alice", "bob", "carol", "dave", "erin"):
        run.invite(name)
        if name != "erin":
            sites[name] = come(run, name)
    sites["carol"].pulse.beat("leaving", (2, 3), (0, 0), 8, 80)
    sites["dave"].pulse.beat("done", (4, 4), (0, 0), 8, 80)
    listed = standings(run.store, 0.0, wait=lambda seconds: sites["alice"].beat())
    found = {each.site: (each.presence, each.starts) for each in listed}
    rounds = run.site.run.terms.rounds
    assert found == {
        "alice": ("live", 1),
        "bob": (f"silent, last seen in round 0 of {rounds}", 1),
        "carol": (f"leaving, last seen in round 2 of {rounds}", 1),
        "dave": ("done", 1),
        "erin": ("", 0),
    }


def test_starts_are_counted_by_key_where_a_name_was_invited_again(run: OwnedRun) -> None:
    run.invite()
    come(run)
    come(run)
    Owner(run.store, OWNER).revoke("alice")
    run.file().unlink()
    run.invite()
    assert [each.starts for each in standings(run.store, 0.0)] == [2, 0]
    come(run)
    assert [each.starts for each in standings(run.store, 0.0)] == [2, 1]


def test_who_never_came_before_the_invitation_expired_is_found_and_nobody_else(run: OwnedRun) -> None:
    """Alice never came, bob did; carol was revoked, dave was invited again; erin has time left."""
    over = run.invite("alice").expires_at
    run.invite("bob")
    come(run, "bob")
    for name in ("carol", "dave"):
        run.invite(name)
        Owner(run.store, OWNER).revoke(name)
    run.file("dave").unlink()
    run.invite("dave", expires_at=over + HOUR_S)
    run.invite("erin", expires_at=over + HOUR_S)
    assert expired_unused(run.store, over - 1) == []
    assert expired_unused(run.store, over) == ["alice"]


def test_a_forged_record_is_not_listed(run: OwnedRun) -> None:
    forged = Invited(site="eve", number=1, public=OWNER.public, guest=False, expires_at=2**31)
    run.store.create(invitation_keys.invitation("eve", 1), forged.to_bytes())
    assert standings(run.store, 0.0) == []


@pytest.mark.parametrize(("text", "seconds"), [("1m", 60), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)])
def test_times_are_read(text: str, seconds: int) -> None:
    assert parse_expiry(text, 1000.9) == 1000 + seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5d", "367d", "7 d", "7days"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"--expires .* write 12h, 7d or 2w"):
        parse_expiry(text, 0.0)


def test_credentials_come_from_a_file_and_from_named_variables(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# scoped\nexport AWS_ACCESS_KEY_ID='one'\n\nAWS_SECRET_ACCESS_KEY=two=2\n")
    environ = {"AWS_ENDPOINT_URL": "http://here", "AWS_SESSION_TOKEN": "three", "AWS_PROFILE": "mine", "HOME": "/"}
    assert read_credentials(file, "AWS_SESSION_TOKEN", None, environ) == {
        "AWS_ENDPOINT_URL": "http://here",
        "AWS_ACCESS_KEY_ID": "one",
        "AWS_SECRET_ACCESS_KEY": "two=2",
        "AWS_SESSION_TOKEN": "three",
    }
    assert read_credentials(None, None, "gateway+https://host/run", environ) == {}


@pytest.mark.parametrize(
    ("text", "names", "gateway", "said"),
    [
        (None, "AWS_SESSION_TOKEN", None, "which isn't set here"),
        ("AWS_ACCESS_KEY_ID", None, None, "line 1 isn't NAME=VALUE"),
        ("LD_PRELOAD=x", None, None, "may not set LD_PRELOAD"),
        ("AWS_ACCESS_KEY_ID=x", None, "gateway+https://host/run", "keys stay with you"),
    ],
)
def test_wrong_credentials_are_refused(tmp_path: Path, text, names, gateway, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text or "")
    with pytest.raises(BadInput, match=said):
        read_credentials(file if text else None, names, gateway, {})
