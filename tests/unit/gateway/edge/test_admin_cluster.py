"""The administration of a cluster over gRPC, and by `tinsmith admin`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.common.contract import ids
from services.common.state import keys
from services.common.state.known_models import parse
from services.launcher import cli
from tests.unit.gateway.edges import BASE, BOB, ROOT, Edges, new_model, new_session, running
from tinsmith.v1 import admin_pb2, admin_pb2_grpc


class Admin:
    """Calls with the key of an admin."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def __call__(self, method: str, **fields: Any) -> Any:
        request = getattr(admin_pb2, f"{method}Request")(**fields)
        return await getattr(self._stub, method)(request, metadata=(("x-api-key", ROOT),), timeout=20)

    async def refusal(self, method: str, **fields: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self(method, **fields)
        return caught.value.code()

    async def pages(self, method: str, field: str, size: int, **fields: Any) -> list[list[Any]]:
        """All pages of a list."""
        found, token = [], ""
        while True:
            answer = await self(method, page_size=size, page_token=token, **fields)
            found.append(list(getattr(answer, field)))
            token = answer.next_page_token
            if not token:
                return found


@pytest.fixture
async def admin(edges: Edges) -> AsyncIterator[Admin]:
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
        yield Admin(channel)


async def test_sessions_of_all_owners_are_listed_by_pages_and_anybodys_can_be_ended(
    edges: Edges, admin: Admin
) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob:
        model = await new_model(edges, alice)
        hers, his = ids.session_of(model), await new_session(bob)
        pages = await admin.pages("ListClusterSessions", "sessions", 1)
        assert [len(page) for page in pages] == [1, 1]
        found = {one.session_id: one for page in pages for one in page}
        assert {(one.session_id, one.owner, one.models, one.over) for one in found.values()} == {
            (hers, "alice", 1, False),
            (his, "bob", 0, False),
        }
        await admin("EndSession", session_id=his, detail="runs wild")
        assert (await bob.post("session_heartbeat", json={"session_id": his})).status_code == 410
        assert (await alice.post("session_heartbeat", json={"session_id": hers})).status_code == 200
    assert [one.session_id for one in (await admin("ListClusterSessions")).sessions] == [hers]
    (over,) = (await admin("ListClusterSessions", owner="bob")).sessions
    assert (over.session_id, over.over) == (his, True)
    record = await edges.app.administration.session(his)
    assert record.finish_detail == "ended by root: runs wild"
    assert await admin.refusal("EndSession", session_id="nobodys") is grpc.StatusCode.NOT_FOUND


async def test_a_drained_service_is_given_nothing_until_that_is_taken_back(
    edges: Edges, admin: Admin
) -> None:
    await edges.discovery.refresh()
    (trainer,) = edges.discovery.trainers.serving(BASE)
    assert trainer.state == "ready"
    await admin("DrainService", id="trainer-0")
    # What it says of itself changes nothing.
    await edges.announcers["trainer"].update(edges.announcers["trainer"].record)
    await edges.discovery.refresh()
    (trainer,) = edges.discovery.trainers.serving(BASE)
    assert trainer.state == "draining"
    (sampler,) = edges.discovery.samplers.serving(BASE)
    assert sampler.state == "ready"
    pages = await admin.pages("ListServices", "services", 1)
    assert [[(one.id, one.ready, one.drained) for one in page] for page in pages] == [
        [("trainer-0", False, True)],
        [("sampler-0", True, False)],
    ]
    # It stays drained while it is not there.
    await edges.announcers["trainer"].stop()
    listed = (await admin("ListServices")).services
    assert [(one.id, one.alive, one.drained) for one in listed] == [
        ("trainer-0", False, True),
        ("sampler-0", True, False),
    ]
    await admin("UndrainService", id="trainer-0")
    assert await edges.redis.hlen(keys.DRAINED) == 0
    for method in ("DrainService", "UndrainService"):
        assert await admin.refusal(method, id="trainer-0") is grpc.StatusCode.NOT_FOUND


async def test_a_base_model_is_retired_when_nothing_serves_it(edges: Edges, admin: Admin) -> None:
    assert await admin.refusal("RetireBaseModel", base_model=BASE) is grpc.StatusCode.ALREADY_EXISTS
    assert await admin.refusal("RetireBaseModel", base_model="org/other") is grpc.StatusCode.NOT_FOUND
    for announcer in edges.announcers.values():
        await announcer.stop()
    await admin("RetireBaseModel", base_model=BASE)
    known, _ = parse(await edges.redis.hgetall(keys.BASE_MODELS))
    assert known[BASE].retired


async def test_what_cannot_be_read_is_listed_and_dropped_from_where_it_was_met(
    edges: Edges, admin: Admin
) -> None:
    poison, samples = edges.records._poison, keys.gateway_samples("gateway-0")
    await edges.redis.zadd(keys.CHECKPOINTS_DUE, {"no checkpoint": 0})
    await edges.redis.sadd(samples, "no request")
    assert await edges.records.due(10) == []
    poison.note(f"{samples} no request", "it is none")
    poison.note(keys.session("s"), "damaged")
    await poison.write()
    pages = await admin.pages("ListUnreadable", "unreadable", 2)
    names = [one.name for page in pages for one in page]
    assert [len(page) for page in pages] == [2, 1]
    assert names == sorted(
        [f"{keys.CHECKPOINTS_DUE} no checkpoint", f"{samples} no request", keys.session("s")]
    )
    assert [(await admin("DropUnreadable", name=name)).removed for name in names] == [
        name != keys.session("s") for name in names
    ]
    assert await edges.redis.zcard(keys.CHECKPOINTS_DUE) == await edges.redis.scard(samples) == 0
    assert list((await admin("ListUnreadable")).unreadable) == []
    assert await admin.refusal("DropUnreadable", name=names[0]) is grpc.StatusCode.NOT_FOUND
    # What is met again is noted again.
    poison.note(keys.session("s"), "damaged")
    await poison.write()
    assert [one.name for one in (await admin("ListUnreadable")).unreadable] == [keys.session("s")]


async def test_every_owners_use_is_listed_with_what_each_may_have(edges: Edges, admin: Admin) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob:
        await new_model(edges, alice)
        await new_session(bob)
    pages = await admin.pages("ListOwners", "owners", 1)
    assert [[(one.owner, one.sessions, one.models) for one in page] for page in pages] == [
        [("alice", 1, 1)],
        [("bob", 1, 0)],
    ]
    assert pages[0][0].state_bytes > 0
    limits = (await admin("ListOwners")).limits
    assert limits.models == edges.app.limits.owners.models


@pytest.mark.parametrize("method", ["ListClusterSessions", "ListServices", "ListUnreadable", "ListOwners"])
async def test_pages_are_bounded(admin: Admin, method: str) -> None:
    for size in (-1, 1001):
        assert await admin.refusal(method, page_size=size) is grpc.StatusCode.INVALID_ARGUMENT
    assert await admin.refusal(method, page_token="x") is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_command_does_what_the_service_does(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(redis_url, tmp_path) as edges, edges.http() as client:
        session = await new_session(client)

        async def tinsmith(*verb: str, key: str = ROOT) -> tuple[int, str, str]:
            monkeypatch.setenv("TINKER_API_KEY", key)
            status = await asyncio.to_thread(cli.main, ["admin", *verb, "--address", edges.grpc_address])
            said = capsys.readouterr()
            return status, said.out, said.err

        status, said, _ = await tinsmith("sessions")
        assert status == 0
        assert session in said
        assert "alice" in said
        assert "trainer-0" in (await tinsmith("services"))[1]
        assert "nothing new" in (await tinsmith("drain", "trainer-0"))[1]
        assert "drained" in (await tinsmith("services"))[1]
        assert (await tinsmith("undrain", "trainer-0"))[0] == 0
        assert "each may have" in (await tinsmith("owners"))[1]
        edges.records._poison.note("tinsmith:odd", "why not")
        await edges.records._poison.write()
        assert "tinsmith:odd: why not" in (await tinsmith("unreadable"))[1]
        assert "forgotten" in (await tinsmith("drop", "tinsmith:odd"))[1]
        assert "serve org/tiny" in (await tinsmith("retire", BASE))[2]
        assert (await tinsmith("end-session", session))[0] == 0
        status, _, why = await tinsmith("sessions", key=BOB)
        assert (status, "role admin" in why) == (1, True)
        # No more than was asked for, and it says so.
        await new_session(client)
        await new_session(client)
        said = (await tinsmith("sessions", "--most", "1"))[1]
        assert len(said.splitlines()) == 3
        assert "and more" in said
        assert (await tinsmith("sessions", key=""))[0] == 2
    monkeypatch.setenv("TINKER_API_KEY", ROOT)
    assert await asyncio.to_thread(cli.main, ["admin", "owners", "--address", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1 does not answer" in capsys.readouterr().err
