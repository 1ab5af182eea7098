"""The certificate of one transfer: made on the head, sent to its hosts over SSH, valid for nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    key: str = ""

    def __repr__(self) -> str:
        return "Certificate(***)"


def make_certificate() -> Certificate:
    """Return a new key (P-256) and certificate.

    Its dates have no meaning, because hosts' clocks may be wrong. Hosts trust it because it is pinned, and only during
    its transfer.
    """
    from cryptography import x509  # noqa: PLC0415 - only where a transfer begins
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gpurun transfer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=timezone.utc))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=timezone.utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())
