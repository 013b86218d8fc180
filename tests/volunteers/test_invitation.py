"""An invitation as text: it survives mail, shows no secret, and nothing else is taken for one."""

import base64
import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from composer_prime.errors import InvitationRefused
from composer_prime.redaction import SECRET_NAMES_VARIABLE, secret_values
from composer_prime.store.remote import ANONYMOUS_VARIABLE
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers.invitation import (
    IDENTITY,
    PREFIX,
    Invitation,
    adopt_environment,
    decode,
    encode,
    is_invitation,
    read_invitation,
    write_invitation,
)

SEED = bytes(range(100, 132))
OWNER = SigningKey.from_bytes(bytes(range(32)))


def make(**changes) -> Invitation:
    values: dict[str, Any] = {
        "run": "run",
        "owner": OWNER.public,
        "manifest_sha256": "0" * 64,
        "uri": "s3://bucket/run",
        "site": "alice",
        "number": 1,
        "public": SigningKey.from_bytes(SEED).public,
        "seed": base64.b64encode(SEED).decode(),
        "expires_at": 2_000_000_000,
        "recipe": "max_steps = 1\n",
        "environment": {"AWS_SECRET_ACCESS_KEY": "topsecretvalue"},
    }
    made = Invitation(**(values | changes))
    return made.model_copy(update={"signature": OWNER.sign(made.message(made.manifest_sha256))})


def packed(data: object) -> str:
    """A line that spells any JSON."""
    return PREFIX + base64.urlsafe_b64encode(zstandard.compress(json.dumps(data).encode())).decode()


def test_what_was_written_is_read_back_also_from_broken_lines() -> None:
    invitation = make()
    line = encode(invitation)
    assert decode(line) == invitation and "\n" not in line
    assert decode("  " + "\r\n".join(line[at : at + 60] for at in range(0, len(line), 60)) + "\n") == invitation


def test_text_forms_hide_the_key_and_the_credentials() -> None:
    shown = repr(make()) + str(make())
    assert "topsecretvalue" not in shown and base64.b64encode(SEED).decode() not in shown and "alice" in shown


@pytest.mark.parametrize("text", ["", "hello", "recipes/local/two_sites.toml", "cpinv2.AAAA", PREFIX])
def test_what_is_no_invitation_is_refused(text: str) -> None:
    with pytest.raises(InvitationRefused):
        decode(text)


def test_a_damaged_line_is_refused_wherever_the_damage_is() -> None:
    line, rng = encode(make()), random.Random(0)
    for at in rng.sample(range(len(PREFIX), len(line)), 40):
        other = line[:at] + ("A" if line[at] != "A" else "B") + line[at + 1 :]
        with contextlib.suppress(InvitationRefused):
            assert decode(other) != make()  # the signature, which `enter` checks, covers what still parses
    with pytest.raises(InvitationRefused, match="damaged"):
        decode(line[:-20])


def test_a_decompression_bomb_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(make().to_bytes() + b" " * 2**22)  # sound JSON, but for its size
    with pytest.raises(InvitationRefused, match="damaged"):
        decode(PREFIX + base64.urlsafe_b64encode(bomb).decode())


@pytest.mark.parametrize("variable", ["PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "HF_TOKEN"])
def test_only_what_a_bucket_needs_may_be_set_on_the_volunteers_machine(variable: str) -> None:
    data = make().model_dump() | {"environment": {variable: "x"}}
    with pytest.raises(InvitationRefused, match=f"may not set {variable}"):
        decode(packed(data))


@pytest.mark.parametrize(
    "name", ["../../escaped", "/etc/passwd", "..", "", "a/b", "alice\n", "\nalice", "a\x00b", "a b"]
)
@pytest.mark.parametrize("field", ["run", "site"])
def test_a_name_that_could_be_a_path_is_refused(field: str, name: str) -> None:
    with pytest.raises(InvitationRefused, match="damaged"):
        decode(packed(make().model_dump() | {field: name}))


def test_credentials_replace_who_one_was_before_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**dict.fromkeys(IDENTITY, "mine"), "HOME": "/home/alice"})
    adopt_environment(make(environment={"AWS_ACCESS_KEY_ID": "new", "AWS_SECRET_ACCESS_KEY": "new"}))
    named = {SECRET_NAMES_VARIABLE: "AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY", ANONYMOUS_VARIABLE: "0"}
    assert {"AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"} < {*IDENTITY}
    assert os.environ == {"AWS_ACCESS_KEY_ID": "new", "AWS_SECRET_ACCESS_KEY": "new", "HOME": "/home/alice", **named}


def test_its_credentials_are_kept_out_of_what_the_site_writes_besides_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"MINE": "my-own-secret", SECRET_NAMES_VARIABLE: "MINE"})
    adopt_environment(make(environment={"AWS_SECRET_ACCESS_KEY": "theirs", "AWS_DEFAULT_REGION": "eu-central-1"}))
    assert secret_values(os.environ) == ["my-own-secret", "theirs"]


def test_an_invitation_without_credentials_leaves_ones_own_for_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"AWS_PROFILE": "work"})
    adopt_environment(make(environment={"AWS_ENDPOINT_URL": "https://s3.example"}))
    assert os.environ == {"AWS_PROFILE": "work", "AWS_ENDPOINT_URL": "https://s3.example", ANONYMOUS_VARIABLE: "1"}


def test_its_file_is_the_owners_alone_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "alice.invitation"
    write_invitation(make(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_invitation(str(path)) == read_invitation(encode(make())) == read_invitation("-", encode(make()))
    with pytest.raises(InvitationRefused, match="exists and is not overwritten"):
        write_invitation(make(number=2), path)
    assert read_invitation(str(path)) == make()
    path.chmod(0o644)
    with pytest.raises(InvitationRefused, match=r"open to other users .*0644.*chmod 600"):
        read_invitation(str(path))


def test_an_invitation_without_secrets_may_lie_open(tmp_path: Path) -> None:
    path = tmp_path / "open.invitation"
    write_invitation(make(seed=None, environment={}), path)
    path.chmod(0o644)
    assert read_invitation(str(path)).seed is None


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvitationRefused, match="doesn't exist"):
        read_invitation(str(tmp_path / "none"))


def test_a_recipe_is_told_from_an_invitation(tmp_path: Path) -> None:
    write_invitation(make(), tmp_path / "one")
    (tmp_path / "two.toml").write_text("max_steps = 1\n")
    assert is_invitation(str(tmp_path / "one")) and is_invitation(encode(make())) and is_invitation("-")
    assert not is_invitation(str(tmp_path / "two.toml")) and not is_invitation(str(tmp_path / "three"))


def test_a_key_that_is_not_the_named_one_is_refused() -> None:
    key = make().key()
    assert key is not None and key.public == make().public
    with pytest.raises(InvitationRefused, match="isn't the one it names"):
        make(public=SigningKey.from_bytes(bytes(32)).public).key()
    with pytest.raises(InvitationRefused, match="damaged"):
        make(seed="???").key()
