"""The certificates of a cluster on one machine: an authority of its own, and an identity for each role.

Invariants: each role's certificate is renewed when a third of its time is left, each file by one rename; keys
are for their user alone. The authority is made anew, and everything below it, only before anything runs.
"""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.tls.wires import AUTHORITY, CERTIFICATE, KEY, ROLES, Role, name_of

_AUTHORITY_LIFE = dt.timedelta(days=3650)
_LIFE = dt.timedelta(days=30)
_RENEWED_WITH = _LIFE / 3
# Of machines whose clocks differ.
_SKEW = dt.timedelta(minutes=5)
_CA_KEY = "ca.key"


def prepare(root: Path, now: dt.datetime | None = None) -> None:
    """Makes what is missing or near its end below `root`: ca.crt, ca.key and a directory for each role."""
    now = now or dt.datetime.now(dt.UTC)
    root.mkdir(mode=0o700, exist_ok=True)
    authority = _certificate(root / AUTHORITY, root / _CA_KEY)
    if authority is None or _left(authority, now) < _AUTHORITY_LIFE / 10:
        _make_authority(root, now)
    renew(root, now)


def remove(root: Path) -> None:
    """Takes away what `prepare` made below `root`, and nothing else. Blocking.

    Raises:
        OSError: it cannot be taken away.
    """
    ours = {root / role: (AUTHORITY, CERTIFICATE, KEY) for role in ROLES} | {root: (AUTHORITY, _CA_KEY)}
    for directory, names in ours.items():
        if not directory.is_dir() or directory.is_symlink():
            continue
        for name in names:
            (directory / name).unlink(missing_ok=True)
            # What a process that was killed left.
            for temporary in directory.glob(f".{name}-*"):
                temporary.unlink(missing_ok=True)
        if not any(directory.iterdir()):
            directory.rmdir()


def renew(root: Path, now: dt.datetime | None = None) -> list[Role]:
    """Renews what is near its end, or of another authority; whose it was. Blocking."""
    now = now or dt.datetime.now(dt.UTC)
    authority = _certificate(root / AUTHORITY, root / _CA_KEY)
    assert authority is not None, "prepare comes first"
    due: list[Role] = []
    for role in ROLES:
        found = _certificate(root / role / CERTIFICATE, root / role / KEY)
        if found is None or found.issuer != authority.issuer or _left(found, now) < _RENEWED_WITH:
            _issue(root, role, authority, now)
            due.append(role)
    return due


def _make_authority(root: Path, now: dt.datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    # Named by its key, so that certificates of an earlier one are known as such.
    digest = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:16]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Tinsmith cluster {digest}")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    made = (
        _builder(name, key, now, _AUTHORITY_LIFE)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(root / _CA_KEY, _pem(key))
    _write(root / AUTHORITY, made.public_bytes(serialization.Encoding.PEM))


def _issue(root: Path, role: Role, authority: x509.Certificate, now: dt.datetime) -> None:
    signer = serialization.load_pem_private_key((root / _CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name_of(role))])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        _builder(name, key, now, _LIFE)
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name_of(role))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    directory = root / role
    directory.mkdir(mode=0o700, exist_ok=True)
    _write(directory / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
    # Between these two the files do not belong together, and their readers keep what they have.
    _write(directory / KEY, _pem(key))
    _write(directory / CERTIFICATE, made.public_bytes(serialization.Encoding.PEM))


def _builder(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, now: dt.datetime, life: dt.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _certificate(path: Path, key: Path) -> x509.Certificate | None:
    """The certificate of a file; None when there is none that can be read, or the key is not its own."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        own = serialization.load_pem_private_key(key.read_bytes(), None)
    except (FileNotFoundError, ValueError):
        return None
    return found if own.public_key() == found.public_key() else None


def _left(certificate: x509.Certificate, now: dt.datetime) -> dt.timedelta:
    return certificate.not_valid_after_utc - now


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Replaces a file that its user alone may read."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.replace(path)
