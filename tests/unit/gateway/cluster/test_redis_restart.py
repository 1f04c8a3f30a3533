"""What a gateway acknowledged is there again after Redis came back without it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import pytest
import redis.asyncio

from services.common.contract.errors import Overloaded, Unavailable
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.redis_client import connect
from services.gateway.cluster import redis_restart as module
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from tests.conftest import redis_server, redis_server_kinds
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import training_pb2

MODEL = "s:train:0"
STEP = operation_pb2.Operation(
    model_id=MODEL,
    seq_id=1,
    optim_step=operation_pb2.OptimStep(adam=training_pb2.AdamParams(learning_rate=0.1)),
)
CREATE = operation_pb2.Operation(model_id=MODEL, seq_id=0, create_model={"base_model": "org/tiny"})


class ForgetfulRedis:
    """A server that can come back without anything that it knew."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = self._start()
        self.url = self._running.__enter__()

    def _start(self) -> AbstractContextManager[str]:
        return redis_server(redis_server_kinds()["valkey"], self._directory)

    def restart(self, forget: bool) -> None:
        self._running.__exit__(None, None, None)
        if forget:
            shutil.rmtree(self._directory)
        self._running = self._start()
        self._running.__enter__()

    def close(self) -> None:
        self._running.__exit__(None, None, None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForgetfulRedis]:
    # A socket's path must be short.
    made = ForgetfulRedis(tmp_path / "r")
    yield made
    made.close()


@pytest.fixture
async def client(server: ForgetfulRedis) -> AsyncIterator[redis.asyncio.Redis]:
    made = connect(server.url)
    yield made
    await made.aclose()


async def test_operations_that_redis_lost_are_accepted_again_in_order_and_only_once(
    server: ForgetfulRedis, client: redis.asyncio.Redis
) -> None:
    journal = Journal(client)
    known = RedoLog(client, journal.announce_again)
    await known._look()
    for operation in (CREATE, STEP):
        await known.perform(lambda operation=operation: journal.accept(operation, "alice"))
    for forget in (True, False):
        server.restart(forget)
        await known._look()
        assert await journal.operations(MODEL, [0, 1]) == [CREATE, STEP]
        assert (await journal.index(MODEL, -1)).pending == 2
        assert [model for model, _ in await journal.models_with_work()] == [MODEL]
        assert await client.hget(keys.future(MODEL, 1), "state") == b"pending"


async def test_what_was_acknowledged_long_before_is_not_kept(
    server: ForgetfulRedis, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    known = RedoLog(client)
    await known.perform(lambda: client.incr("count"))
    await known._look()
    server.restart(forget=True)
    await known._look()
    assert await client.get("count") is None


async def test_a_write_that_was_under_way_when_redis_came_back_without_its_beginning_is_made_again(
    server: ForgetfulRedis, client: redis.asyncio.Redis
) -> None:
    known = RedoLog(client)
    await known._look()
    tries = 0

    async def write() -> int:
        nonlocal tries
        tries += 1
        await client.set("begin", tries)
        if tries == 1:
            server.restart(forget=True)
            await known._look()
        await client.set("end", tries)
        return tries

    assert await known.perform(write) == 2
    assert (await client.get("begin"), await client.get("end")) == (b"2", b"2")


async def test_nothing_is_written_to_the_redis_of_before_once_another_one_was_seen(tmp_path: Path) -> None:
    # The address leads to the second one by now, and the first one does not know it yet.
    address = tmp_path / "a"
    address.mkdir()
    with ExitStack() as running:
        for name in ("1", "2"):
            running.enter_context(redis_server(redis_server_kinds()["valkey"], tmp_path / name))
        (address / "redis.sock").symlink_to(tmp_path / "1" / "redis.sock")
        client = connect(f"unix://{address}/redis.sock")
        known = RedoLog(client)
        await known._look()
        await asyncio.gather(*(client.ping() for _ in range(4)))
        in_use = asyncio.create_task(client.blpop(["nothing"], 1))
        await asyncio.sleep(0.1)
        (address / "redis.sock").unlink()
        (address / "redis.sock").symlink_to(tmp_path / "2" / "redis.sock")
        with pytest.raises(Unavailable, match="restarted"):
            await known.refuse_while_restoring()
        assert await in_use is None
        await asyncio.gather(*(known.perform(partial(client.set, str(n), 1)) for n in range(5)))
        await client.aclose()
        async with connect(f"unix://{tmp_path}/2/redis.sock") as second:
            assert await second.dbsize() == 5


async def test_what_was_acknowledged_before_a_long_absence_of_redis_is_kept(
    server: ForgetfulRedis, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RedoLog(client)
    await known._look()
    await known.perform(lambda: client.incr("count"))
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    server.restart(forget=True)
    await known._look()
    assert await client.get("count") == b"1"


async def test_what_there_is_no_room_to_keep_waits_until_there_is(
    server: ForgetfulRedis, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RedoLog(client, most_bytes=3 * module._ENTRY_BYTES)
    await known._look()
    for name in ("one", "two"):
        await known.perform(lambda name=name: client.set(name, 1), module._ENTRY_BYTES // 2)
    much = asyncio.create_task(known.perform(lambda: client.set("much", 1), 2 * module._ENTRY_BYTES))
    small = asyncio.create_task(known.perform(lambda: client.set("small", 1)))
    # What the accepted came to is kept at once.
    await known.perform(lambda: client.set("result", 1), 10, accepts=False)
    server.restart(forget=True)
    await known._look()
    assert await client.exists("one", "two", "result") == 3
    assert not await client.exists("much", "small")
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    await known._look()
    # Alone it has room; who came later waits for it.
    assert await much and not small.done()
    await known._look()
    assert await small


async def test_what_the_accepted_came_to_keeps_nothing_from_being_accepted_and_is_bounded_by_itself(
    server: ForgetfulRedis, client: redis.asyncio.Redis
) -> None:
    known = RedoLog(client, most_bytes=4 * module._ENTRY_BYTES)
    await known._look()
    for name in ("old", "new", "newest"):
        await known.perform(lambda name=name: client.set(name, 1), module._ENTRY_BYTES // 2, accepts=False)
    assert await known.perform(lambda: client.set("large", 1), 3 * module._ENTRY_BYTES)
    server.restart(forget=True)
    await known._look()
    assert (await client.exists("old"), await client.exists("new", "newest", "large")) == (0, 3)


@pytest.mark.parametrize("accepts", [True, False])
async def test_what_is_larger_than_the_room_waits_for_none_and_is_not_kept(
    server: ForgetfulRedis, client: redis.asyncio.Redis, accepts: bool
) -> None:
    known = RedoLog(client, most_bytes=2 * module._ENTRY_BYTES)
    await known._look()
    await known.perform(lambda: client.set("small", 1))
    assert await known.perform(lambda: client.set("huge", 1), 9 * module._ENTRY_BYTES, accepts=accepts)
    server.restart(forget=True)
    await known._look()
    assert (await client.exists("small"), await client.exists("huge")) == (1, 0)


async def test_who_finds_no_room_for_long_is_told_to_try_again(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROOM_WITHIN_S", 0.05)
    known = RedoLog(client, most_bytes=module._ENTRY_BYTES)
    await known.perform(lambda: client.set("one", 1))
    with pytest.raises(Overloaded, match="try again"):
        await known.perform(lambda: client.set("two", 1))
    assert not await client.exists("two")
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    for _ in range(2):
        await known._look()
    await known.perform(lambda: client.set("two", 1))


async def test_a_write_that_failed_takes_no_room(client: redis.asyncio.Redis) -> None:
    known = RedoLog(client, most_bytes=module._ENTRY_BYTES)
    for _ in range(2):
        with pytest.raises(redis.exceptions.ResponseError):
            await known.perform(lambda: client.execute_command("NOTHING"))
    await known.perform(lambda: client.set("one", 1))


async def test_what_was_written_again_is_written_again_when_that_is_lost_too(
    server: ForgetfulRedis, client: redis.asyncio.Redis
) -> None:
    known = RedoLog(client)
    await known._look()
    await known.perform(lambda: client.set("here", 1))
    # Redis was away for long.
    known._writes[0].written -= 60 * module.KEPT_S
    for _ in range(2):
        server.restart(forget=True)
        await known._look()
        assert await client.exists("here")
        await known._look()


async def test_writes_are_repeated_after_those_that_they_came_after_and_the_others_at_once(
    server: ForgetfulRedis, client: redis.asyncio.Redis
) -> None:
    known, running, most, order = RedoLog(client), 0, 0, []
    await known._look()

    async def write(name: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        order.append(name)
        running -= 1

    await known.perform(partial(write, "begin"))
    await asyncio.gather(*(known.perform(partial(write, "beside")) for _ in range(500)))
    await known.perform(partial(write, "end"))
    server.restart(forget=True)
    order, most = [], 0
    await known._look()
    assert order == ["begin", *["beside"] * 500, "end"]
    assert 1 < most <= 64


async def test_what_is_missing_right_after_a_restart_is_not_called_unknown(
    server: ForgetfulRedis, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RedoLog(client)
    await known.refuse_while_restoring()
    server.restart(forget=True)
    with pytest.raises(Unavailable, match="restarted"):
        await known.refuse_while_restoring()
    monkeypatch.setattr(module, "RESTORED_AFTER_S", 0.0)
    await known.refuse_while_restoring()


async def test_a_session_that_is_stored_again_stays_what_it_became(client: redis.asyncio.Redis) -> None:
    store = Stores.over(client).sessions
    record = SessionRecord(session_id="s", owner="alice", created_at=1.0, last_heartbeat=1.0)
    assert await store.create(record, "key") == record
    await store.finish("s", "done", "")
    assert (await store.create(record, "key")).session_id == "s"
    found = await store.get("s")
    assert found is not None and found.finished


async def test_however_much_is_not_found_redis_is_asked_rarely(
    redis_client: redis.asyncio.Redis,
) -> None:
    redo_log = RedoLog(redis_client)
    # From the first on they are in the statistics.
    await redis_client.info()
    before = (await redis_client.info("commandstats"))["cmdstat_info"]["calls"]
    await asyncio.gather(*(redo_log.refuse_while_restoring() for _ in range(500)))
    asked = (await redis_client.info("commandstats"))["cmdstat_info"]["calls"] - before
    assert asked <= 4
