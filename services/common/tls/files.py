"""A certificate and its key, read again when their files change.

Invariants: what is in use is always a certificate with its own key, whichever file was written first; files
that are gone or do not belong together change nothing, and one line of the log says so.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.contract.errors import InvalidRequest

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_NOTHING = object()


@dataclass(frozen=True)
class Material:
    """What the files held at one time.

    Attributes:
        certificate, key: PEM, the certificate with the chain above it.
        authority: PEM of the authorities whose certificates are believed; empty: of none.
        context: for servers of HTTP.
        number: grows with every rotation.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    context: ssl.SSLContext
    number: int


class KeyFiles:
    """The files of one certificate, looked at once a second at most, while it is asked for.

    The look is a few `stat` calls, and reading some kilobytes after a rotation: it is done where it is asked.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        authority: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the files.

        Raises:
            InvalidRequest: one cannot be read, or they do not belong together.
        """
        self._paths = (certificate, key, *([authority] if authority else []))
        self._clock = clock
        self._lock = threading.Lock()
        try:
            self._stamp = self._stamps()
            self._material = self._read(0)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{certificate} and {key}: {error}") from error
        self._refused: object = _NOTHING
        """What was found last and not taken over; None: a file was gone."""
        self._looked_at = clock()

    @property
    def material(self) -> Material:
        """What is to be used now. From any thread."""
        if self._clock() - self._looked_at >= _LOOK_S and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looked_at = self._clock()
                self._lock.release()
        return self._material

    def _look(self) -> None:
        stamp: object = None
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                self._refused = _NOTHING
                return
            read = self._read(self._material.number + 1)
            # Else a file changed meanwhile: the next look finds it whole.
            if self._stamps() == stamp:
                self._material, self._stamp = read, stamp
                self._refused = _NOTHING
                log.info("took over a new certificate from %s", self._paths[0])
        except (OSError, ValueError) as error:
            if stamp != self._refused:
                log.error("%s: %s; the certificate before stays in use", self._paths[0], error)
            self._refused = stamp

    def _read(self, number: int) -> Material:
        certificate, key, *authority = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A key with a password is refused; without this the terminal would be asked for it.
        context.load_cert_chain(certificate, key, password=lambda: b"")
        believed = authority[0].read_bytes() if authority else b""
        if authority:
            context.load_verify_locations(cadata=believed.decode("ascii"))
        return Material(certificate.read_bytes(), key.read_bytes(), believed, context, number)

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        found = [path.stat() for path in self._paths]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)
