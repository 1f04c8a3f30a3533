"""The public ports with a certificate, and behind a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import os
import socket
import ssl
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import trustme
import uvloop

from services.common.tls.files import KeyFiles
from services.gateway.edge.grpc import service
from services.gateway.edge.http.server import HttpServer
from services.gateway.edge.http.wire.connection import ConnectionLimits
from tests.security.certificates import write_identity
from tests.unit.gateway.edges import ALICE, BASE, Edges, new_model, running
from tests.unit.gateway.saved import export
from tinsmith.v1 import server_pb2, service_pb2_grpc

_S = 60.0

# Its successor chooses the loop of every test that is run together with these.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that gateways run on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA) -> KeyFiles:
    """Each question is a look at them."""
    write(tmp_path, ca)
    clock: Callable[[], float] = itertools.count(step=2).__next__
    return KeyFiles(tmp_path / "public" / "tls.crt", tmp_path / "public" / "tls.key", clock=clock)


def write(tmp_path: Path, ca: trustme.CA) -> None:
    write_identity(tmp_path / "public", ca, "127.0.0.1", "localhost")


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path, files: KeyFiles) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path, tls=files) as found:
        yield found


def believing(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


def client(edges: Edges, ca: trustme.CA) -> httpx.AsyncClient:
    headers = {"x-api-key": ALICE}
    return httpx.AsyncClient(
        base_url=f"{edges.base_url}/api/v1/", headers=headers, timeout=_S, verify=believing(ca)
    )


async def served(edges: Edges, ca: trustme.CA) -> list[str]:
    """What a client of gRPC is told over a connection of its own."""
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    async with grpc.aio.secure_channel(edges.grpc_address, credentials) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        call = stub.GetServerInfo(
            server_pb2.GetServerInfoRequest(), timeout=_S, metadata=(("x-api-key", ALICE),)
        )
        return [model.name for model in (await call).models]


async def test_both_ports_speak_tls(edges: Edges, ca: trustme.CA) -> None:
    async with client(edges, ca) as asking:
        assert (await asking.get("get_server_capabilities")).status_code == 200
    assert await served(edges, ca) == [BASE]


async def test_who_believes_another_authority_does_not_talk_to_them(edges: Edges) -> None:
    stranger = trustme.CA()
    async with client(edges, stranger) as asking:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await asking.get("healthz")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served(edges, stranger)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_clear_is_not_answered(edges: Edges) -> None:
    async with httpx.AsyncClient(timeout=_S) as asking:
        with pytest.raises(httpx.TransportError):
            await asking.get(f"{edges.base_url.replace('https', 'http')}/api/v1/healthz")


def serial(port: int, ca: trustme.CA) -> str:
    """Of the certificate that the port shows to a new connection."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=_S) as plain,
        believing(ca).wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        return str((wrapped.getpeercert() or {})["serialNumber"])


async def test_rotations_under_load_cost_no_request_and_no_connection(
    edges: Edges, tmp_path: Path, ca: trustme.CA
) -> None:
    ended: list[int] = []
    stop = asyncio.Event()
    port = int(edges.base_url.rpartition(":")[2])

    async def load(anew: bool) -> None:
        """New connections all the time, or one that is kept."""
        async with client(edges, ca) as kept:
            while not stop.is_set():
                async with client(edges, ca) as fresh:
                    answer = await (fresh if anew else kept).get("get_server_capabilities")
                    ended.append(answer.status_code)

    async def calls() -> None:
        while not stop.is_set():
            assert await served(edges, ca) == [BASE]

    tasks = [asyncio.create_task(one) for one in (load(True), load(False), calls())]
    shown = set()
    for _ in range(4):
        shown.add(await asyncio.to_thread(serial, port, ca))
        write(tmp_path, ca)
        before = len(ended)
        while len(ended) < before + 6 and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.02)
    stop.set()
    await asyncio.gather(*tasks)
    assert set(ended) == {200}
    assert len(shown) == 4


async def test_an_expired_certificate_is_noticed_by_clients(
    redis_url: str, tmp_path: Path, ca: trustme.CA
) -> None:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    directory = write_identity(tmp_path / "late", ca, "127.0.0.1", expires=past)
    late = KeyFiles(directory / "tls.crt", directory / "tls.key")
    async with running(redis_url, tmp_path, tls=late) as edges, client(edges, ca) as asking:
        with pytest.raises(httpx.ConnectError, match="expired"):
            await asking.get("healthz")


async def connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a server that is just starting."""
    async with asyncio.timeout(_S):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.02)


async def test_a_handshake_that_does_not_end_is_ended(edges: Edges, files: KeyFiles) -> None:
    http = HttpServer(edges.app, "127.0.0.1", 0, ConnectionLimits(head_seconds=0.3), tls=files)
    http.start()
    try:
        reader, writer = await connection(http.port)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), _S)
        writer.close()
    finally:
        await http.drain()


async def test_who_only_connects_takes_little_memory(edges: Edges) -> None:
    port, most = int(edges.base_url.rpartition(":")[2]), 100
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        silent = [await connection(port) for _ in range(most)]
        # What was accepted last has been made by then.
        async with httpx.AsyncClient(verify=False, timeout=_S) as asking:
            assert (await asking.get(f"{edges.base_url}/api/v1/healthz")).status_code == 200
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Those of the client's side are in it.
    assert taken / most < 64 * 1024
    for _, writer in silent:
        writer.transport.abort()


async def test_handshakes_that_do_not_end_give_way_to_clients(
    edges: Edges, files: KeyFiles, ca: trustme.CA
) -> None:
    http = HttpServer(edges.app, "127.0.0.1", 0, ConnectionLimits(connections=2), tls=files)
    http.start()
    silent = [await connection(http.port) for _ in range(3)]
    try:
        # The first of three, for whom there are two places; then the second, for one who speaks.
        assert await asyncio.wait_for(silent[0][0].read(1), _S) == b""
        async with httpx.AsyncClient(verify=believing(ca), timeout=_S) as asking:
            answer = await asking.get(f"https://127.0.0.1:{http.port}/api/v1/healthz")
            assert answer.status_code == 200
            assert await asyncio.wait_for(silent[1][0].read(1), _S) == b""
            # Those who never ended theirs do not count for ever.
            silent[2][1].write(b"no TLS at all" * 10)
            assert b"HTTP" not in await asyncio.wait_for(silent[2][0].read(), _S)
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await http.drain()


async def test_a_hello_that_comes_with_its_connection_is_answered(edges: Edges, ca: trustme.CA) -> None:
    port = int(edges.base_url.rpartition(":")[2])
    plain = []
    # The gateway first looks when all of them are connected and have sent their first words.
    for _ in range(20):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = believing(ca).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        plain.append(socket.create_connection(("127.0.0.1", port), timeout=_S))
        plain[-1].sendall(outgoing.read())
    for one in plain:
        with one:
            assert await asyncio.to_thread(one.recv, 1)


async def test_what_comes_right_behind_a_handshake_is_answered(edges: Edges, ca: trustme.CA) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = believing(ca).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await connection(int(edges.base_url.rpartition(":")[2]))
    while True:
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await asyncio.wait_for(reader.read(65536), _S))
    # In one piece with the end of the handshake.
    client.write(b"GET /api/v1/healthz HTTP/1.1\r\nhost: tinsmith\r\n\r\n")
    writer.write(outgoing.read())
    answer = b""
    while b"\r\n\r\n" not in answer:
        with contextlib.suppress(ssl.SSLWantReadError):
            answer += client.read()
            continue
        incoming.write(await asyncio.wait_for(reader.read(65536), _S))
    assert answer.startswith(b"HTTP/1.1 200 ")
    writer.transport.abort()


async def test_unfinished_handshakes_count_among_the_connections_of_grpc(
    edges: Edges, files: KeyFiles, ca: trustme.CA
) -> None:
    server = await service.serve(edges.app, "127.0.0.1:0", connections=2, tls=files)
    silent = [await connection(server.port) for _ in range(3)]
    try:
        assert await asyncio.wait_for(silent[2][0].read(1), _S) == b""
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await server.drain(0)


_SERVER = """
import sys
import services.gateway.__main__
import grpc
from concurrent import futures
certificate, key = (open(path, "rb").read() for path in sys.argv[1:])
server = grpc.server(futures.ThreadPoolExecutor())
print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)])), flush=True)
server.start()
sys.stdin.read()
"""


def test_handshakes_and_records_that_are_none_write_nothing_into_the_log(
    tmp_path: Path, ca: trustme.CA
) -> None:
    write(tmp_path, ca)
    files = [tmp_path / "public" / name for name in ("tls.crt", "tls.key")]
    # gRPC's core writes past the interpreter, and is told so when it is imported.
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        in_the_clear = socket.create_connection(("127.0.0.1", port), timeout=_S)
        in_the_clear.sendall(b"GET / HTTP/1.1\r\n\r\n")
        _read_to_the_end(in_the_clear)
        context = believing(ca)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", port), timeout=_S)
        wrapped = context.wrap_socket(plain, server_hostname="127.0.0.1")
        damaged = socket.socket(fileno=wrapped.detach())
        damaged.settimeout(_S)
        damaged.sendall(b"\x17\x03\x03\x00\x20" + b"a" * 32)
        _read_to_the_end(damaged)
        _, told = server.communicate(timeout=_S)
    assert told == b""


def _read_to_the_end(connection: socket.socket) -> None:
    with connection, contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass


async def test_the_sdk_believes_the_authority_of_ssl_cert_file(
    edges: Edges, tmp_path: Path, ca: trustme.CA
) -> None:
    ca.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    program = "import tinker; print(tinker.ServiceClient().get_server_capabilities().supported_models[0])"
    environment = {
        **os.environ,
        "TINKER_BASE_URL": edges.base_url,
        "TINKER_API_KEY": ALICE,
        "SSL_CERT_FILE": str(tmp_path / "authority.pem"),
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "org/tiny" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("proxies", "scheme"), [(("127.0.0.0/8",), "https"), (("10.0.0.0/8",), "http"), ((), "http")]
)
async def test_forwarded_headers_are_believed_of_named_proxies_alone(
    redis_url: str, tmp_path: Path, proxies: tuple[str, ...], scheme: str
) -> None:
    async with running(redis_url, tmp_path, proxies=proxies) as edges, edges.http() as asking:
        path = await export(edges, asking, await new_model(edges, asking), 1, "e")
        run, _, rest = path.removeprefix("tinker://").partition("/")
        forwarded = {"host": "tinsmith.example.com", "x-forwarded-proto": "https"}
        answer = await asking.get(
            f"training_runs/{run}/checkpoints/{rest}/external_weights_urls", headers=forwarded
        )
        (link,) = answer.json()["urls"].values()
        assert link.startswith(f"{scheme}://tinsmith.example.com/api/v1/")
