"""Certificates for tests, of authorities that last as long as the test."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme

from services.common.tls.wires import AUTHORITY, CERTIFICATE, KEY, Role, name_of


def write_identity(
    directory: Path,
    authority: trustme.CA,
    *names: str,
    believed: trustme.CA | None = None,
    expires: dt.datetime | None = None,
) -> Path:
    """The files of an identity with these names in its certificate.

    Args:
        believed: the authority that it takes others' certificates of; None: its own.
    """
    directory.mkdir(exist_ok=True, parents=True)
    issued = authority.issue_cert(*names, not_after=expires)
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    (directory / AUTHORITY).write_bytes((believed or authority).cert_pem.bytes())
    (directory / KEY).write_bytes(issued.private_key_pem.bytes())
    (directory / CERTIFICATE).write_bytes(chain)
    return directory


def write_role(directory: Path, authority: trustme.CA, role: Role, **more: object) -> Path:
    return write_identity(directory / role, authority, name_of(role), **more)  # type: ignore[arg-type]
