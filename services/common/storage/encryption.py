"""Encryption of exported files with age (age-encryption.org/v1).

Invariant: what was encrypted can be read only with the key of one of its recipients; the cluster keeps none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyrage

from services.common.contract.errors import InvalidRequest
from services.common.storage.base import Writer, os_error

MAX_RECIPIENTS = 10
SUFFIX = ".age"


def parse_recipients(texts: Sequence[str]) -> list[Any]:
    """The public keys: native ones ("age1...") or those of SSH.

    Raises:
        InvalidRequest: there are too many, or one is none.
    """
    if len(texts) > MAX_RECIPIENTS:
        raise InvalidRequest(
            f"{len(texts)} age_encryption_recipients; give at most {MAX_RECIPIENTS}", "bad_recipient"
        )
    recipients = []
    for number, text in enumerate(texts):
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise InvalidRequest(
                f"age_encryption_recipients[{number}] is not a public key of age (age1...) or SSH: {error}",
                "bad_recipient",
            ) from error
    return recipients


def encrypted(files: Mapping[str, Writer], recipients: Sequence[str]) -> dict[str, Writer]:
    """The same files, each encrypted to all recipients and named "<file>.age".

    Raises:
        InvalidRequest: as `parse_recipients`.
    """
    parsed = parse_recipients(recipients)
    return {f"{name}{SUFFIX}": _encrypting(write, parsed) for name, write in files.items()}


def _encrypting(write: Writer, recipients: Sequence[Any]) -> Writer:
    def encrypt(path: Path) -> None:
        plain = path.with_name(f"{path.name}.plain")
        try:
            write(plain)
            pyrage.encrypt_file(str(plain), str(path), recipients)
        except pyrage.EncryptError as error:
            # What fails here is reading or writing.
            raise os_error(f"encrypting failed: {error}") from error
        finally:
            plain.unlink(missing_ok=True)

    return encrypt
