"""Keys and signatures: RFC 8032's own vectors, nothing malformed passes, and a private key stays private."""

import base64
import os
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from composer_prime.errors import ConfigError
from composer_prime.sync.signatures import FIELD_PRIME, WEAK_Y, SigningKey, check_public, verify

SEED = bytes(range(32))
KEY = SigningKey.from_bytes(SEED)
MESSAGE = b"rounds of a run"


def spelled(public: bytes) -> str:
    return "ed25519:" + base64.b64encode(public).decode()


def pem(private, encryption: KeySerializationEncryption | None = None) -> bytes:
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def private_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def other_spellings(text: str) -> list[str]:
    """What isn't the one base64 of the same bytes, or isn't base64 at all, or is too short or long."""
    last = text.rstrip("=")[-1]
    unused_bit = text.replace(last + "=", chr(ord(last) + 1) + "=")
    raw = base64.b64decode(text)
    short, long = (base64.b64encode(data).decode() for data in (raw[:-1], raw + b"\0"))
    return ["", " ", "=", "ü", text[:-1], text + "\n", " " + text, text.rstrip("="), unused_bit, short, long, raw.hex()]


def test_a_signature_of_any_other_spelling_or_length_is_false() -> None:
    signature = KEY.sign(MESSAGE)
    assert [bad for bad in other_spellings(signature) if bad == signature or verify(KEY.public, MESSAGE, bad)] == []


def test_a_key_of_any_other_spelling_length_or_algorithm_is_false_and_refused_with_the_remedy() -> None:
    text = KEY.public.removeprefix("ed25519:")
    bad_keys = ["ed25519:" + bad for bad in other_spellings(text)]
    for bad in [*bad_keys, text, "rsa:" + text, "ED25519:" + text, ":" + text, "ed25519", "ed25519:ed25519:" + text]:
        assert not verify(bad, MESSAGE, KEY.sign(MESSAGE)), bad
        with pytest.raises(ConfigError, match=r'must be "ed25519:".* copy the line that `composer-prime keygen`'):
            check_public(bad)
    assert check_public(KEY.public) == KEY.public


def test_a_private_key_put_where_a_public_one_belongs_is_not_repeated() -> None:
    for secret in (base64.b64encode(SEED).decode(), "ed25519:" + SEED.hex()):
        with pytest.raises(ConfigError) as refused:
            check_public(secret)
        assert secret not in str(refused.value) and secret[-8:] not in str(refused.value)


def test_weak_keys_are_refused_though_a_signature_by_nobody_would_verify() -> None:
    identity = (1).to_bytes(32, "little")
    by_nobody = identity + bytes(32)
    assert len(WEAK_Y) == 5, "the points whose order divides eight: tests/spec/test_pieces.py doubles each"
    ed25519.Ed25519PublicKey.from_public_bytes(identity).verify(by_nobody, MESSAGE)  # the trap
    for y in [*WEAK_Y, FIELD_PRIME, FIELD_PRIME + 1]:
        for sign in (0, 1 << 255):
            weak = spelled((y | sign).to_bytes(32, "little"))
            assert not verify(weak, MESSAGE, base64.b64encode(by_nobody).decode())
            with pytest.raises(ConfigError, match="public key"):
                check_public(weak)


def test_a_saved_key_loads_again_and_its_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.pem"
    previous = os.umask(0)
    try:
        KEY.save(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == pem(ed25519.Ed25519PrivateKey.from_private_bytes(SEED))
    assert SigningKey.load(path).sign(MESSAGE) == KEY.sign(MESSAGE)


def test_a_key_never_overwrites_what_is_there_nor_what_a_link_names(tmp_path: Path) -> None:
    path, link, dangling = tmp_path / "a.pem", tmp_path / "link", tmp_path / "dangling"
    path.write_text("precious")
    link.symlink_to(path)
    dangling.symlink_to(tmp_path / "nothing")
    for taken in (path, link, dangling, tmp_path):
        with pytest.raises(ConfigError, match=r"exists and a key is never overwritten: choose another path"):
            KEY.save(taken)
    assert path.read_text() == "precious" and not (tmp_path / "nothing").exists()


def test_a_key_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory.*: choose a path"):
        KEY.save(tmp_path / "none" / "a.pem")


def test_a_key_that_is_cut_short_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        KEY.save(tmp_path / "a.pem")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_key_that_others_may_touch_is_refused_with_the_chmod_that_helps(tmp_path: Path, mode: int) -> None:
    path = private_file(tmp_path / "a.pem", pem(ed25519.Ed25519PrivateKey.generate()))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*run `chmod 600 {path}`"):
        SigningKey.load(path)
    path.chmod(0o400)
    SigningKey.load(path)


def test_a_missing_key_and_a_folder_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"doesn't exist: make one with `composer-prime keygen .*none.pem`"):
        SigningKey.load(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"can't be read \(Is a directory\)"):
        SigningKey.load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no private key in PEM"),
        (b"not a key", "holds no private key in PEM"),
        (SEED, "holds no private key in PEM"),
        (pem(ed25519.Ed25519PrivateKey.from_private_bytes(SEED))[:60], "holds no private key in PEM"),
        (
            ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
            .public_key()
            .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "holds no private key in PEM",
        ),
        (pem(ec.generate_private_key(ec.SECP256R1())), "is of another type .* than ed25519"),
        (
            pem(ed25519.Ed25519PrivateKey.from_private_bytes(SEED), BestAvailableEncryption(b"word")),
            "is encrypted .* `openssl pkey",
        ),
    ],
    ids=["empty", "text", "seed", "cut", "public", "another type", "encrypted"],
)
def test_a_file_that_holds_no_plain_ed25519_key_is_refused_with_the_remedy(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = private_file(tmp_path / "a.pem", data)
    with pytest.raises(ConfigError, match=rf"{path} {message}.*keygen") as refused:
        SigningKey.load(path)
    lines = [line for line in data.decode("latin-1").splitlines() if line and "-----" not in line]
    shown = "".join(traceback.format_exception(refused.value))
    assert not any(line in shown for line in lines)


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 31 bytes and must have 32"):
        SigningKey.from_bytes(bytes(31))


def test_no_text_form_of_a_key_shows_the_private_half() -> None:
    secrets = [SEED.hex(), base64.b64encode(SEED).decode(), repr(SEED)[2:-1]]
    for text in (repr(KEY), str(KEY), f"{KEY}", repr([KEY])):
        assert KEY.public in text and not any(secret in text for secret in secrets)


def test_neither_torch_nor_cryptography_is_imported_before_a_key_is_used() -> None:
    program = (
        "import sys, composer_prime.sync.signatures, composer_prime.cli.owner\n"
        "assert not {'torch', 'cryptography'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
