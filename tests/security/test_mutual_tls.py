"""Among services: who shows the wrong certificate, or none, is not answered, and a renewal costs no call."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.contract.errors import InvalidRequest, PermissionDenied
from services.common.process import rpc
from services.common.process.carrier.answering import Carrier
from services.common.process.carrier.asking import Link
from services.common.tls.files import KeyFiles
from services.common.tls.wires import CERTIFICATE, ROLES, Identity, Role, identity, mutual
from services.launcher.certificates import authority
from tests.security.certificates import write_identity, write_role

_CALL_S = 60.0


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def trainer(tmp_path: Path, ca: trustme.CA) -> AsyncIterator[str]:
    """Address of a server that takes calls of gateways."""
    who = Identity(write_role(tmp_path, ca, "trainer"))
    server = await rpc.serve([], "127.0.0.1:0", tls=mutual(who, "gateway", "operator"))
    yield f"127.0.0.1:{server.port}"
    await server.drain(0)


async def call(address: str, who: Identity | None, peer: Role = "trainer") -> grpc.StatusCode:
    """How a call ends."""
    async with rpc.channel(address, who, peer) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_CALL_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_gateway_of_the_cluster_is_answered(trainer: str, tmp_path: Path, ca: trustme.CA) -> None:
    assert await call(trainer, Identity(write_role(tmp_path, ca, "gateway"))) is grpc.StatusCode.OK


async def test_calls_that_a_stream_carries_are_answered_for_those_who_may_call(
    tmp_path: Path, ca: trustme.CA
) -> None:
    carrier = Carrier(health_pb2_grpc.add_HealthServicer_to_server, health.aio.HealthServicer())
    tls = mutual(Identity(write_role(tmp_path, ca, "trainer")), "gateway", "operator")
    server = await rpc.serve([carrier.service], "127.0.0.1:0", tls=tls)

    async def ask(role: Role) -> health_pb2.HealthCheckResponse:
        who = Identity(write_role(tmp_path, ca, role))
        async with rpc.channel(f"127.0.0.1:{server.port}", who, "trainer") as channel:
            link, request = Link(channel), health_pb2.HealthCheckRequest()
            try:
                method = "/grpc.health.v1.Health/Check"
                return await link.ask(method, request, health_pb2.HealthCheckResponse, _CALL_S)
            finally:
                await link.close()

    assert (await ask("gateway")).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(PermissionDenied):
        await ask("sampler")
    await server.drain(0)


async def test_who_shows_no_certificate_is_not_answered(trainer: str, ca: trustme.CA) -> None:
    assert await call(trainer, None) is grpc.StatusCode.UNAVAILABLE
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    named = [("grpc.ssl_target_name_override", "trainer.tinsmith.internal")]
    async with grpc.aio.secure_channel(trainer, credentials, options=named) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_another_authority_is_not_taken(
    trainer: str, tmp_path: Path, ca: trustme.CA
) -> None:
    stranger = write_identity(tmp_path / "x", trustme.CA(), "gateway.tinsmith.internal", believed=ca)
    assert await call(trainer, Identity(stranger)) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_is_not_taken(trainer: str, tmp_path: Path, ca: trustme.CA) -> None:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    late = write_role(tmp_path, ca, "gateway", expires=past)
    assert await call(trainer, Identity(late)) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["sampler.tinsmith.internal", "mail.example.com"])
async def test_a_certificate_of_the_authority_for_something_else_is_refused(
    trainer: str, tmp_path: Path, ca: trustme.CA, name: str
) -> None:
    other = Identity(write_identity(tmp_path / "x", ca, name))
    assert await call(trainer, other) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_gateway_calls_nobody_who_is_not_what_it_looks_for(
    trainer: str, tmp_path: Path, ca: trustme.CA
) -> None:
    gateway = Identity(write_role(tmp_path, ca, "gateway"))
    assert await call(trainer, gateway, "sampler") is grpc.StatusCode.UNAVAILABLE
    mistaken = write_identity(tmp_path / "y", ca, "gateway.tinsmith.internal", believed=trustme.CA())
    assert await call(trainer, Identity(mistaken)) is grpc.StatusCode.UNAVAILABLE


async def test_renewals_under_load_cost_no_call(tmp_path: Path) -> None:
    """Both sides get new certificates again and again, and new connections are made with each."""
    authority.prepare(tmp_path)
    # Each question is a look.
    clock = partial(next, itertools.count(step=2))
    gateway, trainer = Identity(tmp_path / "gateway", clock), Identity(tmp_path / "trainer", clock)
    server = await rpc.serve([], "127.0.0.1:0", tls=mutual(trainer, "gateway"))
    address, ended, stop = f"127.0.0.1:{server.port}", [], asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            ended.append(await call(address, gateway))

    async def steady() -> None:
        async with rpc.channel(address, gateway, "trainer") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not stop.is_set():
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_S)

    running = [asyncio.create_task(one) for one in (load(), load(), steady())]
    for _ in range(3):
        before = len(ended)
        for role in ROLES:
            # What is gone is due. Never a certificate of another time: somebody would show it meanwhile.
            (tmp_path / role / CERTIFICATE).unlink()
        assert authority.renew(tmp_path) == list(ROLES)
        while len(ended) < before + 6 and not any(task.done() for task in running):
            await asyncio.wait(running, timeout=0.02)
    stop.set()
    await asyncio.gather(*running)
    await server.drain(0)
    assert gateway.number >= 3 and trainer.number >= 3
    assert set(ended) == {grpc.StatusCode.OK}


@pytest.mark.parametrize(("bind", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
async def test_a_service_in_the_clear_warns_when_other_machines_reach_it(
    caplog: pytest.LogCaptureFixture, bind: str, warned: bool
) -> None:
    server = await rpc.serve([], bind)
    await server.drain(0)
    assert ("in the clear" in caplog.text) == warned


def test_files_that_do_not_belong_together_change_nothing(tmp_path: Path, ca: trustme.CA) -> None:
    seconds = itertools.count(step=2)
    directory = write_role(tmp_path, ca, "gateway")
    files = KeyFiles(directory / "tls.crt", directory / "tls.key", directory / "ca.crt", seconds.__next__)
    first = files.material
    (directory / "tls.key").write_bytes(ca.issue_cert("other").private_key_pem.bytes())
    assert files.material is first
    (directory / "tls.key").unlink()
    assert files.material is first
    write_role(tmp_path, ca, "gateway")
    assert files.material.number == 1


def test_an_identity_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tls\.crt"):
        identity(tmp_path)
    assert identity(Path()) is None
