"""Who wrote an object in the bucket: ed25519 keys and signatures (RFC 8032), spelled as recipes and records hold them.

A site's private key is a PEM file that only its owner may read; its public key is one word of text. cryptography is
imported when a key is used, so that decisions and the command line stay light.
"""

import base64
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "ed25519"
KEY_BYTES = 32
SIGNATURE_BYTES = 64

FIELD_PRIME = 2**255 - 19
ORDER_8_Y = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
WEAK_Y = {0, 1, FIELD_PRIME - 1, ORDER_8_Y, FIELD_PRIME - ORDER_8_Y}
"""y of the points of order 1, 2, 4 and 8: keys under which anyone can sign, all zeros among them."""


class SigningKey:
    """A private key. Its text forms show the public key only."""

    __slots__ = ("_private",)

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new key from the system's randomness."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, seed: bytes) -> "SigningKey":
        """The key of a 32-byte seed (RFC 8032's secret key). Raises ConfigError for another length."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if len(seed) != KEY_BYTES:
            raise ConfigError(f"a signing key's seed has {len(seed)} bytes and must have {KEY_BYTES}: make a new key")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "SigningKey":
        """Read a key that `save` wrote.

        Raises ConfigError, with the remedy, when there is no such file, when group or others have any access to it, and
        when it isn't the unencrypted PEM of an ed25519 private key.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        remedy = f"make a key with `composer-prime keygen {path}`"
        pem = _read_private(path)
        # Causes are cut off: they may quote the file.
        try:
            private = load_pem_private_key(pem, password=None)
        except TypeError:
            raise ConfigError(
                f"signing key {path} is encrypted and must be plain, since no one is there to type its password: "
                f"decrypt it with `openssl pkey -in {path} -out <new file>`, or make one with `composer-prime keygen`"
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            raise ConfigError(f"signing key {path} holds no private key in PEM that can be read: {remedy}") from None
        if not isinstance(private, Ed25519PrivateKey):
            kind = type(private).__name__.strip("_")
            raise ConfigError(f"signing key {path} is of another type ({kind}) than {ALGORITHM}: {remedy}")
        return cls(private)

    def save(self, path: Path) -> None:
        """Write the key as PEM (PKCS8, not encrypted) into a new file of mode 0600.

        Raises ConfigError when anything is there already, which stays as it is, or when the file can't be written.
        """
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        pem = self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            _write_new(path, pem)
        except FileExistsError:
            raise ConfigError(f"{path} exists and a key is never overwritten: choose another path") from None
        except OSError as error:
            raise ConfigError(
                f"{path} can't be written ({error.strerror}): choose a path in a folder that is there and yours"
            ) from error

    @property
    def public(self) -> str:
        """The public key as recipes and manifests hold it: "ed25519:" and the base64 of its 32 bytes."""
        return f"{ALGORITHM}:{_encode(self._private.public_key().public_bytes_raw())}"

    def sign(self, message: bytes) -> str:
        """base64 of the 64-byte signature; the same for the same message, always."""
        return _encode(self._private.sign(message))


def verify(public: str, message: bytes, signature: str) -> bool:
    """Whether the holder of `public` signed `message`; False too for any malformed key or signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key, signed = _public_bytes(public), _decode(signature, SIGNATURE_BYTES)
    if key is None or signed is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed, message)
    except InvalidSignature:
        return False
    return True


def check_public(public: str) -> str:
    """Return `public`, or raise ConfigError unless it is spelled as `SigningKey.public` spells keys, and not weak."""
    if _public_bytes(public) is None:
        # Only its start is shown: it may be a private key, put here by mistake.
        raise ConfigError(
            f'public key {public[:12] + "..."!r} must be "{ALGORITHM}:" and the base64 of a key\'s {KEY_BYTES} bytes: '
            "copy the line that `composer-prime keygen` printed for the site"
        )
    return public


def _public_bytes(public: str) -> bytes | None:
    algorithm, _, text = public.partition(":")
    key = _decode(text, KEY_BYTES) if algorithm == ALGORITHM else None
    if key is None:
        return None
    y = int.from_bytes(key, "little") & (2**255 - 1)
    return key if y < FIELD_PRIME and y not in WEAK_Y else None


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _decode(text: str, num_bytes: int) -> bytes | None:
    """The bytes of base64 in its one canonical spelling, None for anything else."""
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return raw if len(raw) == num_bytes and _encode(raw) == text else None


def _read_private(path: Path) -> bytes:
    """The bytes of a file that its owner alone may touch. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"signing key {path} is open to other users of this machine (mode {stat.S_IMODE(mode):04o}), "
                    f"and must be open to its owner alone: run `chmod 600 {path}`; make a new key if others may have it"
                )
            return file.read()
    except FileNotFoundError:
        raise ConfigError(
            f"signing key {path} doesn't exist: make one with `composer-prime keygen {path}`, or correct the path"
        ) from None
    except OSError as error:
        raise ConfigError(f"signing key {path} can't be read ({error.strerror}): correct the path") from error


def _write_new(path: Path, data: bytes) -> None:
    """Create a file of mode 0600, whole or not at all. Raises OSError, FileExistsError when anything is there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
