"""A certificate for servers of tests: for some addresses, signed by an authority that comes with it, a day long."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID


def write_certificate(folder: Path, *addresses: str) -> tuple[str, str]:
    """(certificate, key) files for these addresses. The first holds the authority too, and so serves as a bundle."""
    now, keys = datetime.datetime.now(datetime.UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, of)]) for of in (addresses[0], "authority")]
    known = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)) for address in addresses])
    own = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    made = []
    for number, extensions in enumerate(((known, own), ())):
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[number])
            .issuer_name(names[1])
            .public_key(keys[number].public_key())
            .serial_number(number + 1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=number == 1, path_length=None), True)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, False)
        made.append(builder.sign(keys[1], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(b"".join(made))
    files[1].write_bytes(
        keys[0].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return str(files[0]), str(files[1])
