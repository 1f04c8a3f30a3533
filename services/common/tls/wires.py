"""What servers and channels are made with: mutual TLS among the services of a cluster, plain TLS for clients.

Invariants: among services each side shows a certificate of the cluster's authority with the name of its role,
and refuses another role than it expects; so a certificate that the authority gave to somebody else opens
nothing. A server takes a rotated certificate with the next connection, a channel when it is made.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from services.common.contract.errors import PermissionDenied
from services.common.tls.files import KeyFiles, Material

Role = Literal["gateway", "trainer", "sampler", "operator"]
ROLES: tuple[Role, ...] = ("gateway", "trainer", "sampler", "operator")

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""Names of an identity's files, as Kubernetes and cert-manager name them."""
_NAMES = "x509_subject_alternative_name"


def name_of(role: Role) -> str:
    """The DNS name in a role's certificate. It is never looked up."""
    return f"{role}.tinsmith.internal"


class Identity:
    """Who this process is to the others of its cluster, and whom it believes."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads ca.crt, tls.crt and tls.key of a directory.

        Raises:
            InvalidRequest: one of them cannot be read, or they do not belong together.
        """
        self.files = KeyFiles(directory / CERTIFICATE, directory / KEY, directory / AUTHORITY, clock)

    @property
    def number(self) -> int:
        """Grows when a certificate was renewed: channels made before have the one before."""
        return self.files.material.number

    def channel_credentials(self) -> grpc.ChannelCredentials:
        found = self.files.material
        return grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)


def identity(directory: Path) -> Identity | None:
    """The identity in a directory; None when no directory was named.

    Raises:
        InvalidRequest: as Identity.
    """
    return None if directory == Path() else Identity(directory)


@dataclass(frozen=True)
class ServerTls:
    """How a gRPC server is protected.

    Attributes:
        files: the server's certificate.
        callers: roles that may call; empty: anybody may, and shows no certificate.
    """

    files: KeyFiles
    callers: frozenset[Role] = frozenset()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files."""
        mutual = bool(self.callers)
        told = first = self.files.material

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            found = self.files.material
            if found.number == told.number:
                return None
            told = found
            return _configuration(found, mutual)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(first, mutual), newest, require_client_authentication=mutual
        )

    def check(self, shown: Mapping[str, Iterable[bytes]]) -> None:
        """Lets a caller in by the names in its certificate.

        Raises:
            PermissionDenied: it has the authority's certificate, and no role that may call here.
        """
        if self.callers:
            names = {name.decode(errors="replace") for name in shown.get(_NAMES, ())}
            if names.isdisjoint(name_of(role) for role in self.callers):
                raise PermissionDenied(f"only {' and '.join(sorted(self.callers))} may call this service")


def key_files(certificate: Path, key: Path) -> KeyFiles | None:
    """The certificate of a public port; None when none was named.

    Raises:
        InvalidRequest: as KeyFiles.
    """
    return None if certificate == Path() else KeyFiles(certificate, key)


def mutual(who: Identity | None, *callers: Role) -> ServerTls | None:
    """Among services; None without an identity: in the clear."""
    return None if who is None else ServerTls(who.files, frozenset(callers))


def public(files: KeyFiles | None) -> ServerTls | None:
    """For clients, which have API keys and no certificates; None: in the clear."""
    return None if files is None else ServerTls(files)


def https(files: KeyFiles) -> ssl.SSLContext:
    """For a server of HTTP: each handshake is done with what the files hold by then."""

    def choose(connection: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        connection.context = files.material.context

    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outer.minimum_version = ssl.TLSVersion.TLSv1_2
    outer.set_alpn_protocols(["http/1.1"])
    outer.sni_callback = choose
    return outer


def _configuration(material: Material, mutual: bool) -> grpc.ServerCertificateConfiguration:
    pair = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pair, material.authority if mutual else None)
