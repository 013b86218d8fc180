"""An invitation held against its run: what doesn't hold is refused in one line."""

import base64
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_prime.errors import BadInput, InvitationRefused
from composer_prime.store import open_store
from composer_prime.sync.entering import SiteIdentity
from composer_prime.sync.entering import enter as enter_run
from composer_prime.sync.owner import Owner
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers.entrance import check_date, enter, own_key
from composer_prime.volunteers.invitation import Invitation
from tests.sync.harness import HandRuntime
from tests.volunteers.owned_run import OWNER, OwnedRun


def enter_with(run: OwnedRun, invitation: Invitation) -> object:
    return enter(invitation, run.store, own_key(invitation, None))


def refused(said: str) -> "pytest.RaisesExc[InvitationRefused]":
    return pytest.raises(InvitationRefused, match=said)


def test_a_sound_invitation_lets_in_and_tells_the_run(run: OwnedRun) -> None:
    invitation = run.invite()
    entrance = enter(invitation, run.store, own_key(invitation, None))
    assert entrance.manifest.run == "run" and entrance.terms.inner_steps == 4 and entrance.num_sites == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"expires_at": 2**31},
        {"uri": "s3://elsewhere/run"},
        {"recipe": "max_steps = 2\n"},
        {"environment": {"AWS_ENDPOINT_URL": "http://evil"}},
        {"site": "bob"},
        {"guest": True},
        {"signature": None},
        {"signature": base64.b64encode(bytes(64)).decode()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_invitation_is_forged(run: OwnedRun, changes: dict[str, object]) -> None:
    with refused("forged or was changed"):
        enter_with(run, run.invite().model_copy(update=changes))


def test_an_invitation_that_another_key_signed_is_forged(run: OwnedRun) -> None:
    invitation, sha = run.invite(), run.site.run.sha256
    forger = SigningKey.generate()
    forged = invitation.model_copy(update={"signature": forger.sign(invitation.message(sha))})
    with refused("forged .* signature that is not the owner's"):
        enter_with(run, forged)


def test_an_invitation_to_another_run_of_that_name_is_refused(run: OwnedRun, tmp_path: Path) -> None:
    other = OwnedRun(tmp_path / "other", inner_steps=8)
    with refused("to another run than the one at"):
        enter_with(other, run.invite())


def test_a_revoked_invitation_is_refused(run: OwnedRun) -> None:
    invitation = run.invite()
    Owner(run.store, OWNER).revoke("alice")
    with refused("of alice to run run was revoked"):
        enter_with(run, invitation)


def test_an_invitation_that_a_later_one_replaced_is_refused(run: OwnedRun) -> None:
    first = run.invite()
    Owner(run.store, OWNER).revoke("alice")
    run.file().unlink()
    second = run.invite()
    with refused("revoked"):
        enter_with(run, first)
    enter_with(run, second)


def test_an_expired_invitation_is_refused_and_says_when(run: OwnedRun) -> None:
    invitation = run.invite(expires_at=1_700_000_000)
    check_date(invitation, 1_699_999_999.0)
    with refused("expired at 2023-11-14 22:13 UTC: ask"):
        check_date(invitation, 1_700_000_000.0)


def test_a_bucket_without_a_run_is_said_so(run: OwnedRun, tmp_path: Path) -> None:
    invitation = run.invite()
    with pytest.raises(BadInput, match="holds no run"):
        enter(invitation, open_store(str(tmp_path / "empty" / "run")), own_key(invitation, None))


def test_ones_own_key_is_asked_for_and_compared(run: OwnedRun, tmp_path: Path) -> None:
    mine = SigningKey.generate()
    invitation = run.invite(public=mine.public)
    with refused("name its file with --key"):
        own_key(invitation, None)
    SigningKey.generate().save(tmp_path / "other.key")
    with refused("name that key's file"):
        own_key(invitation, tmp_path / "other.key")
    mine.save(tmp_path / "mine.key")
    assert own_key(invitation, tmp_path / "mine.key").public == mine.public


def beating(beat: Callable[[], None], stopped: threading.Event) -> None:
    while not stopped.wait(0.02):
        beat()


def test_a_name_that_is_beating_somewhere_is_taken_and_free_once_it_is_silent(run: OwnedRun) -> None:
    invitation = run.invite()
    key = own_key(invitation, None)
    identity = SiteIdentity("alice", key)
    entered = enter_run(run.store, run.site.run, identity, HandRuntime())
    stopped = threading.Event()
    beat = threading.Thread(target=beating, args=(lambda: entered.pulse.beat("live", (0, 0), (0, 0), 1, 1), stopped))
    beat.start()
    try:
        with refused("site alice runs already, here or elsewhere"):
            enter(invitation, run.store, key)
        enter(invitation, run.store, key, starting=False)
    finally:
        stopped.set()
        beat.join()
    enter(invitation, run.store, key)
    entered.pulse.beat("leaving", (0, 0), (0, 0), 1, 1)
    enter(invitation, run.store, key)
