"""Pages of lists: few in the making at once, and counted until their client has them, over both edges."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from services.common.process import rpc
from services.common.process.tasks import cancel_all
from services.gateway.access.memory import Memory
from services.gateway.access.page_turns import AT_ONCE, LISTS
from services.gateway.application import Application
from services.gateway.identity.rights import NEEDS
from tests.unit.gateway.edges import ALICE, BOB, Edges, new_model
from tinsmith.v1 import runs_pb2, service_pb2_grpc, sessions_pb2

MANY = 12


class Making:
    """How many pages are in the making, as the application is asked for them."""

    def __init__(self, app: Application) -> None:
        self.now = self.most = 0
        self._wrap(app.session_search, "search")
        self._wrap(app.session_search, "details")
        self._wrap(app.runs, "page")
        self._wrap(app.runs, "after")

    def _wrap(self, of: object, name: str) -> None:
        asked: Callable[..., Awaitable[object]] = getattr(of, name)

        async def counted(*args: object) -> object:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(0.02)
                return await asked(*args)
            finally:
                self.now -= 1

        setattr(of, name, counted)


async def test_few_pages_are_made_at_once_whoever_asks_and_however(edges: Edges) -> None:
    async with edges.http() as alice, edges.http(BOB) as bob, rpc.channel(edges.grpc_address) as channel:
        model = await new_model(edges, alice)
        session = model.partition(":")[0]
        making = Making(edges.app)
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        asks: list[Awaitable[object]] = []
        for _ in range(MANY):
            asks += [alice.get("training_runs"), bob.get("training_runs"), alice.get(f"sessions/{session}")]
            asks += [alice.post("sessions/search", json={"limit": 10})]
            metadata = (("x-api-key", ALICE),)
            asks += [
                stub.ListTrainingRuns(runs_pb2.ListTrainingRunsRequest(), metadata=metadata, timeout=30),
                stub.SearchSessions(sessions_pb2.SearchSessionsRequest(), metadata=metadata, timeout=30),
            ]
        answers = await asyncio.gather(*asks)
        assert len(answers) == 6 * MANY
        assert making.most == AT_ONCE


async def test_what_a_search_asks_counts_while_it_waits_for_its_turn(edges: Edges) -> None:
    turns, statuses = edges.app.page_turns, [{"type": "active"}] * 10_000
    async with edges.http() as alice, turns.held("somebody"), turns.held("somebody"):
        searching = asyncio.create_task(alice.post("sessions/search", json={"statuses": statuses}))
        async with asyncio.timeout(20):
            while not edges.app.budget.used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
        assert not searching.done()
        assert edges.app.budget.used > len(statuses) * 64
        searching.cancel()


@asynccontextmanager
async def never_read(address: str) -> AsyncIterator[str]:
    """Where calls to an address get through, and of whose answers little is ever read."""
    host, _, port = address.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def carry(source: asyncio.StreamReader, to: asyncio.StreamWriter, most: float) -> None:
        while most > 0 and (data := await source.read(4096)):
            most -= len(data)
            to.write(data)
        await asyncio.Event().wait()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(host, int(port), limit=4096)
        writers.extend((writer, upstream[1]))
        tasks.add(asyncio.create_task(carry(reader, upstream[1], math.inf)))
        tasks.add(asyncio.create_task(carry(upstream[0], writer, 2**16)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await cancel_all(list(tasks))
        for writer in writers:
            writer.close()


async def test_over_grpc_pages_that_are_not_read_take_the_share_of_their_key(edges: Edges) -> None:
    body = {"tags": [], "sdk_version": "0.38.0", "user_metadata": {"x": "y" * 64_000}}
    asked = sessions_pb2.SearchSessionsRequest(page_size=100)
    async with (
        edges.http() as alice,
        never_read(edges.grpc_address) as nowhere,
        rpc.channel(nowhere) as slow,
        rpc.channel(edges.grpc_address) as fast,
    ):
        await asyncio.gather(*(alice.post("create_session", json=body) for _ in range(100)))
        calls = [_searched(slow, ALICE, asked) for _ in range(8)]
        async with asyncio.timeout(60):
            # None counts for more than an eighth of the room, of which half is for others.
            while edges.app.answers.held < Memory.of().answers // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _searched(fast, ALICE, asked)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--memory-mib" in (refused.value.details() or "")
        await _searched(fast, BOB, asked)
        for call in calls:
            call.cancel()
        async with asyncio.timeout(60):
            while edges.app.answers.held:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len((await _searched(fast, ALICE, asked)).sessions) == 100


def _searched(
    channel: grpc.aio.Channel, key: str, asked: sessions_pb2.SearchSessionsRequest
) -> grpc.aio.UnaryUnaryCall:
    stub = service_pb2_grpc.TinsmithServiceStub(channel)
    return stub.SearchSessions(asked, metadata=(("x-api-key", key),), timeout=60)


@pytest.mark.parametrize("method", sorted(LISTS))
def test_what_takes_a_turn_is_a_method(method: str) -> None:
    assert method in NEEDS
