"""Redis behind TLS, with a certificate authority of one's own."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from services.common.process.tasks import cancel_all
from services.common.state import redis_client


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that signs itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    files = directory / "redis.crt", directory / "redis.key"
    files[0].write_bytes(certificate.public_bytes(encoding))
    files[1].write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.fixture
async def behind_tls(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[int, Path]]:
    """Port that speaks TLS for a real server, and the certificate to trust."""
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    pumps: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(1 << 16):
            sink.write(chunk)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        pumps.update({asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))})

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1], certificate
    server.close()
    await cancel_all(pumps)


async def test_a_server_whose_authority_is_named_is_used(behind_tls: tuple[int, Path]) -> None:
    port, certificate = behind_tls
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
    async with redis_client.connect(url) as client:
        assert await client.set("over", "tls")
        assert await client.get("over") == b"tls"
    blocking = redis_client.connect_sync(url)
    assert await asyncio.to_thread(blocking.get, "over") == b"tls"
    blocking.close()


async def test_a_server_that_nobody_vouches_for_is_not(behind_tls: tuple[int, Path]) -> None:
    port, _ = behind_tls
    async with redis_client.connect(f"rediss://127.0.0.1:{port}/0") as client:
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            await client.ping()
