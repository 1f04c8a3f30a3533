"""What a gRPC call may send before its method sees it, and when it is refused."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from services.common.process import rpc
from services.gateway.access.limits import MIB, Limits
from services.gateway.access.memory import Memory
from services.gateway.edge.grpc import receive
from tests.unit.gateway.edges import ALICE, BOB, Edges, running
from tinsmith.v1 import sessions_pb2

SERVICE = "/tinsmith.v1.TinsmithService"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
HEALTH = health_pb2.HealthCheckRequest().SerializeToString()
MESSAGE = 4 * MIB


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    limits, memory = Limits(grpc_message_bytes=MESSAGE), replace(Memory.of(), requests=8 * MESSAGE)
    async with running(redis_url, tmp_path, limits, memory) as found:
        yield found


@pytest.fixture
async def channel(edges: Edges) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(edges.grpc_address) as found:
        yield found


def metadata(key: str = ALICE) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key),)


async def refusal(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


def begun(channel: grpc.aio.Channel, method: str, key: str) -> grpc.aio.StreamUnaryCall:
    """A call of a unary method whose message does not come."""
    return channel.stream_unary(f"{SERVICE}/{method}")(timeout=20, metadata=metadata(key))


async def heartbeat(channel: grpc.aio.Channel, key: str, session_id: str) -> None:
    request = sessions_pb2.HeartbeatRequest(session_id=session_id).SerializeToString()
    await channel.unary_unary(f"{SERVICE}/Heartbeat")(request, timeout=10, metadata=metadata(key))


async def session_of(channel: grpc.aio.Channel, key: str) -> str:
    create = channel.unary_unary(f"{SERVICE}/CreateSession")
    raw = await create(b"", timeout=10, metadata=metadata(key))
    return sessions_pb2.CreateSessionResponse.FromString(raw).session_id


@pytest.mark.parametrize("key", ["", "tml-wrong"])
async def test_a_call_without_a_known_key_ends_before_it_has_sent_anything(
    channel: grpc.aio.Channel, key: str
) -> None:
    for method in ("ForwardBackward", "ReadExternalWeights"):
        call = channel.stream_stream(f"{SERVICE}/{method}")(timeout=10, metadata=metadata(key) if key else ())
        error = await refusal(call.read())
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert dict(error.trailing_metadata())["tinsmith-code"] == "unauthenticated"


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_a_message_above_the_limit_is_refused_also_when_it_is_small_on_the_wire(
    channel: grpc.aio.Channel, compression: grpc.Compression | None
) -> None:
    call = channel.unary_unary(f"{SERVICE}/ForwardBackward")
    sent = call(bytes(MESSAGE + 1), timeout=10, metadata=metadata(), compression=compression)
    assert (await refusal(sent)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_compressed_message_is_read(channel: grpc.aio.Channel) -> None:
    request = sessions_pb2.CreateSessionRequest(tags=["t" * 200]).SerializeToString()
    call = channel.unary_unary(f"{SERVICE}/CreateSession")
    assert await call(request, timeout=10, metadata=metadata(), compression=grpc.Compression.Gzip)


async def test_a_call_that_ends_without_a_message_is_refused(channel: grpc.aio.Channel) -> None:
    call = begun(channel, "Heartbeat", ALICE)
    await call.done_writing()
    assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_slow_messages_take_the_share_of_their_key_and_nothing_of_others(
    edges: Edges, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "_MESSAGE_S", 8.0)
    sessions = {key: await session_of(channel, key) for key in (ALICE, BOB)}
    slow = [begun(channel, "ForwardBackward", ALICE) for _ in range(8)]
    codes = [asyncio.create_task(refusal(call)) for call in slow]
    # Half of the room is two messages that may become as large as can be.
    async with asyncio.timeout(7):
        while sum(task.done() for task in codes) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    refused = [task.result().code() for task in codes if task.done()]
    assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 6
    for key, session in sessions.items():
        await asyncio.wait_for(heartbeat(channel, key, session), 6)
    late = begun(channel, "CreateSession", BOB)
    await asyncio.sleep(0.5)
    await late.write(b"")
    await late.done_writing()
    assert await late
    ended = {error.code() for error in await asyncio.gather(*codes)}
    assert ended == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    with edges.app.budget.account("alice") as account:
        account.expect(2 * MESSAGE)


async def test_calls_that_send_nothing_do_not_keep_others_waiting(channel: grpc.aio.Channel) -> None:
    session = await session_of(channel, BOB)
    silent = [begun(channel, "Heartbeat", ALICE) for _ in range(100)]
    await asyncio.sleep(0.05)
    for _ in range(5):
        await asyncio.wait_for(heartbeat(channel, BOB, session), 20)
    for call in silent:
        call.cancel()


class Calls:
    """Calls whose messages come when the test says so. Counts how many are read at once."""

    def __init__(self) -> None:
        self.reading = self.most = 0
        self.comes = asyncio.Semaphore(0)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return metadata()

    async def read(self) -> bytes:
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.comes.acquire()
        finally:
            self.reading -= 1
        return b""


async def test_no_message_is_read_before_there_is_a_place_for_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "_AT_ONCE_S", 60.0)
    # One of these places is for callers without a key.
    limits, memory = Limits(grpc_message_bytes=MESSAGE), replace(Memory.of(), receiving=4 * 2 * MESSAGE)
    calls = Calls()

    async def answer(request: sessions_pb2.HeartbeatRequest, _: object) -> sessions_pb2.HeartbeatRequest:
        return request

    async def found(_: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(answer, sessions_pb2.HeartbeatRequest.FromString)

    async with running(redis_url, tmp_path, limits, memory) as edges:
        details = SimpleNamespace(method=f"{SERVICE}/Heartbeat")
        handler = await receive.Reception(edges.app, ()).intercept_service(found, details)
        answers = [asyncio.ensure_future(handler.stream_unary(None, calls)) for _ in range(20)]
        given_up = answers.pop()
        async with asyncio.timeout(60):
            while calls.reading < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            given_up.cancel()
            for _ in answers:
                calls.comes.release()
            assert await asyncio.gather(*answers) == [sessions_pb2.HeartbeatRequest()] * 19
        assert (given_up.cancelled(), calls.most, calls.reading) == (True, 3, 0)


async def test_health_takes_small_messages(channel: grpc.aio.Channel) -> None:
    check = channel.unary_unary(CHECK)
    assert (await refusal(check(bytes(5000), timeout=10))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await check(HEALTH, timeout=10)


async def test_watches_of_health_are_few_and_take_no_place_of_checks(channel: grpc.aio.Channel) -> None:
    watch, check = channel.unary_stream(WATCH), channel.unary_unary(CHECK)
    # One address has no more than is left for others.
    watching = [watch(HEALTH, timeout=60) for _ in range(receive._OPEN_STREAMS // 2)]
    for call in watching:
        await call.read()
    # What clients take for a server without health to watch, and go on.
    assert (await refusal(watch(HEALTH, timeout=10).read())).code() is grpc.StatusCode.UNIMPLEMENTED
    assert await check(HEALTH, timeout=10)
    watching.pop().cancel()
    while True:
        again = watch(HEALTH, timeout=10)
        try:
            await again.read()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        else:
            break
    for call in [*watching, again]:
        call.cancel()


async def test_checks_of_health_that_send_nothing_are_few_and_keep_no_caller_with_a_key_waiting(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, memory = Limits(grpc_message_bytes=MESSAGE), replace(Memory.of(), receiving=2 * MESSAGE)
    async with (
        running(redis_url, tmp_path, limits, memory) as edges,
        rpc.channel(edges.grpc_address) as channel,
    ):
        monkeypatch.setattr(receive, "_AT_ONCE_S", 60.0)
        check = channel.stream_unary(CHECK)
        silent = [check(timeout=60) for _ in range(receive._OPEN_CALLS // 2 + 1)]
        ended = {asyncio.ensure_future(refusal(call)) for call in silent}
        (refused,), waiting = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await heartbeat(channel, BOB, await session_of(channel, BOB))
        for task in waiting:
            task.cancel()


async def test_a_call_with_too_much_metadata_is_refused(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(f"{SERVICE}/CreateSession")
    many = tuple((f"x-filler-{number}", "v" * 100) for number in range(200))
    error = await refusal(call(b"", timeout=10, metadata=metadata() + many))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await call(b"", timeout=10, metadata=metadata())
