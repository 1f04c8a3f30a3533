"""What `tinsmith admin` prints of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import time

import pytest

from services.common.contract.errors import Unavailable
from services.launcher.clients import admin
from services.launcher.clients.admin import OWNERS, owner_line, service_line, session_line
from tinsmith.v1 import admin_pb2


def test_a_pods_name_stays_apart_from_what_is_told_of_it() -> None:
    """On Kubernetes services are called like their pods, whose names are longer than the column."""
    service = admin_pb2.Service(
        id="tinsmith-gateway-5b9b6c9db9-dz859",
        kind=admin_pb2.SERVICE_KIND_GATEWAY,
        ready=True,
        alive=True,
        address="tinsmith-trainer-smollm2-135m-instruct:9000",
        base_model="org/tiny",
    )
    told = ["tinsmith-gateway-5b9b6c9db9-dz859", "gateway", "ready", "0", "0", service.address, "org/tiny"]
    assert service_line(service).split() == told


def test_short_names_are_in_columns() -> None:
    services = [
        admin_pb2.Service(id=name, kind=admin_pb2.SERVICE_KIND_SAMPLER, address="a:1", base_model="org/tiny")
        for name in ("s-0", "sampler-10")
    ]
    first, second = (service_line(service) for service in services)
    assert first.index("sampler") == second.index("sampler", len("sampler-10"))
    assert first.index("org/tiny") == second.index("org/tiny")


def test_an_owner_with_a_long_name_stays_apart_from_the_date_of_a_session() -> None:
    session = admin_pb2.ClusterSession(
        session_id="s" * 41, owner="team-of-reinforcement-learning", models=1234567, display_name="run 7"
    )
    session.created_at.FromSeconds(400_000)
    session.last_heard_of_at.FromSeconds(999_950)
    told = [cell.strip() for cell in session_line(session, 1_000_000).split("  ") if cell]
    assert told == [session.session_id, session.owner, "6 d", "50 s", "1234567", "open", "run 7"]


async def test_a_gateway_that_is_too_slow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_TIMEOUT_S", 0.2)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    asked = argparse.Namespace(verb="services", address=address, ca=None, most=1)
    async with server:
        with pytest.raises(Unavailable, match=rf"{address} did not answer within"):
            await asyncio.to_thread(admin.run, asked, "tml-key")


def test_what_an_operator_lists_fits_a_terminal_of_100_columns() -> None:
    session = admin_pb2.ClusterSession(session_id="1552a17e-da96-4425-b625-913356d80723", owner="operator")
    assert len(session_line(session, time.time())) < 90
    figures = admin_pb2.OwnerUse(
        owner="operator",
        sessions=12_345,
        models=12_345,
        checkpoints=12_345,
        checkpoint_bytes=12_345_678 << 20,
        snapshot_bytes=1_234_567 << 20,
        state_bytes=123_456 << 20,
        waiting_operations=123_456,
    )
    line = owner_line(figures)
    assert len(line) == len(OWNERS) < 90
    assert line.split() == ["operator", *3 * ["12345"], "12345678", "1234567", "123456", "123456"]


def test_an_owner_with_a_long_name_stays_apart_from_what_it_has() -> None:
    owner = admin_pb2.OwnerUse(owner="team-of-reinforcement-learning", sessions=1234567)
    assert owner_line(owner).split()[:2] == [owner.owner, "1234567"]
