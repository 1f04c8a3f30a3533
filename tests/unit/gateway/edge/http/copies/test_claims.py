"""HTTP: copies that are asked for twice, by way of several gateways, or that a gateway leaves or loses."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.common.state import keys
from services.common.storage.base import Key
from services.gateway.records.stores import Stores
from services.gateway.training import copies as copies_module
from services.gateway.training.copies import Wanted
from services.gateway.wiring import Gateway
from tests.unit.gateway.edge.http.copies.copying import SlowDisk, copied, copy, runs_of
from tests.unit.gateway.edges import Edges, new_model, new_session
from tests.unit.gateway.saved import save, save_sampler


async def test_a_copy_beside_another_version_of_it_is_a_conflict(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was deleted and saved again, and another gateway was quicker to copy the new one."""
    async with edges.http() as client:
        model, session = await new_model(edges, client), await new_session(client)
        await save_sampler(edges, client, model, 1, "s")
        here = copies_module._copy_snapshot

        def quicker(source: Path, target: Path, go_on: Callable[[], None]) -> int | None:
            record = asyncio.run_coroutine_threadsafe(other_version(), loop).result(30)
            assert record
            return here(source, target, go_on)

        async def other_version() -> bool:
            source = await edges.records.get(model, "sampler_weights/s")
            assert source is not None
            run = f"{session}:train:3"
            return await edges.records.put(msgspec.structs.replace(source, model_id=run, version=7))

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(copies_module, "_copy_snapshot", quicker)
        source = f"tinker://{model}/sampler_weights/s"
        refused = await copy(client, source, session_id=session, model_seq_id=3)
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        # The run is the other's.
        assert f"{session}:train:3" in await runs_of(client)


async def test_a_copy_ends_when_another_gateway_took_its_claim_and_leaves_the_run_to_that(
    edges: Edges, slow_disk: SlowDisk
) -> None:
    copies = edges.app.copies
    copies._claims._renew_s = 0.05
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        run = f"{session}:train:3"
        asked = asyncio.create_task(copy(client, path, session_id=session, model_seq_id=3))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        await edges.redis.set(keys.copying(run), "another")
        # While its thread hangs, too.
        async with asyncio.timeout(60):
            refused = await asked
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        slow_disk.goes_on.set()
        assert run in await runs_of(client)
        assert await edges.records.get(run, "weights/a") is None
        assert await edges.redis.get(keys.copying(run)) == b"another"


async def test_a_copy_that_fails_after_another_gateway_took_its_claim_leaves_the_run_to_that(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        run = f"{session}:train:3"

        async def taken() -> None:
            await edges.redis.set(keys.copying(run), "another")

        def fails(*_: object) -> int | None:
            asyncio.run_coroutine_threadsafe(taken(), loop).result(30)
            raise OSError(errno.ENOSPC, "No space left on device")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(edges.files.storage, "copy", fails)
        failed = await copy(client, path, session_id=session, model_seq_id=3)
        assert failed.status_code == 507
        assert run in await runs_of(client)


@pytest.mark.parametrize("lost", ["run", "claim"])
async def test_what_was_copied_gets_no_record_without_its_run_or_its_claim(
    edges: Edges, slow_disk: SlowDisk, lost: str
) -> None:
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        run = f"{session}:train:3"
        asked = asyncio.create_task(copy(client, path, session_id=session, model_seq_id=3))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        if lost == "run":
            models = Stores.over(edges.redis).models
            record = await models.get(run)
            assert record is not None
            await models.drop(record)
        else:
            await edges.redis.set(keys.copying(run), "another")
        slow_disk.goes_on.set()
        refused = await asked
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        assert await edges.records.get(run, "weights/a") is None


async def test_two_gateways_make_one_copy(edges: Edges, slow_disk: SlowDisk) -> None:
    other = Gateway("gateway-1", edges.redis, edges.app.keys, edges.files.storage, edges.data)
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        first = asyncio.create_task(copied(client, path, session_id=session, model_seq_id=3))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        repeated = other.application.copies.into_session("alice", Wanted(path), session, 3)
        second = asyncio.create_task(repeated)
        await asyncio.wait([second], timeout=0.1)
        assert not second.done()
        slow_disk.goes_on.set()
        assert await second == await first
        assert slow_disk.copies == 1
        assert not await edges.redis.exists(keys.copying(f"{session}:train:3"))


async def test_a_copy_that_takes_long_is_waited_for_again_and_keeps_its_files(
    edges: Edges, slow_disk: SlowDisk
) -> None:
    copies = edges.app.copies
    copies._patience, copies._claims._renew_s = 0.05, 0.05
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        asked = await copy(client, path, "k")
        assert (asked.status_code, asked.json()["code"]) == (503, "unavailable")
        (making,) = copies._making
        # As if it had taken more than an hour by now.
        await edges.records.look_again(making[0], time.time() - 1)
        await edges.redis.pexpire(keys.copying(making[0].model_id), 1000)
        async with asyncio.timeout(60):
            while making[0] in await edges.records.due(10):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # A renewal may have been between its two steps.
            while await edges.redis.pttl(keys.copying(making[0].model_id)) <= 50_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        copies._patience = 20.0
        slow_disk.goes_on.set()
        assert (await copied(client, path, "k")).startswith(f"tinker://{making[0].model_id}/")
        assert slow_disk.copies == 1


async def test_a_gateway_that_ends_leaves_its_copies_to_another(
    edges: Edges, slow_disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "_END_S", 0.1)
    other = Gateway("gateway-1", edges.redis, edges.app.keys, edges.files.storage, edges.data)
    async with edges.http() as client:
        path = await save(edges, client, await new_model(edges, client), 1, "a")
        session = await new_session(client)
        first = asyncio.create_task(copy(client, path, session_id=session, model_seq_id=3))
        assert await asyncio.to_thread(slow_disk.begun.wait, 30)
        await edges.app.copies.stop()
        assert ((await first).status_code, (await first).json()["code"]) == (503, "draining")
        # For as long as its thread copies.
        assert await edges.redis.exists(keys.copying(f"{session}:train:3"))
        slow_disk.goes_on.set()
        await asyncio.wait(edges.app.copies._ending, timeout=20)
        assert not await edges.redis.exists(keys.copying(f"{session}:train:3"))
        assert edges.files.storage.files(Key(f"{session}:train:3", "weights/a", 1)) is None
        there = await other.application.copies.into_session("alice", Wanted(path), session, 3)
        assert there == f"tinker://{session}:train:3/weights/a"
