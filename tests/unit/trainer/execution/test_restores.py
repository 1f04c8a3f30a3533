"""A model that a trainer dies of while it brings it back keeps no other from being brought back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.contract.errors import Internal
from services.common.process.crashes import MOST_CRASHES, REST_S, CrashLedger
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution.residency import AT_ONCE, Restores
from services.trainer.files.copy_room import LoadRoom
from services.trainer.world.channel import WorldFailure
from tests.unit.trainer.execution.residing import MODEL, SEQ_ID, Trainer, until

OTHER, LORA = "s:train:7", LoraSpec(8)
LOADS = LoadRoom(2**40, lambda _: 1)


def started(path: Path, seconds: float = 0.0) -> Restores:
    """Those of a trainer that starts so much later."""
    return Restores(CrashLedger[tuple[str, int]](path, tuple[str, int], "trainer", lambda: seconds), LOADS)


async def died(path: Path, *model_ids: str, times: int = 1) -> Restores:
    """Of one whose predecessor died while it brought models back, so many times in a row."""
    for _ in range(times):
        before = started(path)
        for model_id in model_ids:
            await before.turn(model_id, LORA).__aenter__()
    return started(path)


async def brought_back(restores: Restores, model_id: str) -> None:
    restores.check(model_id)
    async with restores.turn(model_id, LORA):
        pass


async def test_after_three_deaths_in_a_row_a_model_rests_and_others_come_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    (await died(path, MODEL, times=MOST_CRASHES - 1)).check(MODEL)
    restores = await died(path, MODEL)
    with pytest.raises(
        Internal, match=f"died 3 times in a row while it brought model {MODEL} back"
    ) as caught:
        restores.check(MODEL)
    assert caught.value.code == "crashed_trainer"
    await brought_back(restores, OTHER)
    started(path, seconds=REST_S).check(MODEL)


async def test_one_that_came_back_after_all_is_no_suspect_any_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    await brought_back(await died(path, MODEL, times=2), MODEL)
    (await died(path, MODEL)).check(MODEL)


async def test_what_is_refused_is_no_death_and_what_breaks_the_world_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for _ in range(MOST_CRASHES):
        with pytest.raises(Internal):
            async with started(path).turn(MODEL, LORA):
                raise Internal("no room")
    started(path).check(MODEL)
    for _ in range(MOST_CRASHES):
        with pytest.raises(WorldFailure):
            async with started(path).turn(OTHER, LORA):
                raise WorldFailure("a rank is gone")
    with pytest.raises(Internal, match="died 3 times"):
        started(path).check(OTHER)


async def test_a_suspect_is_brought_back_while_nothing_else_is(tmp_path: Path) -> None:
    restores = await died(tmp_path / "ledger", MODEL, OTHER)
    under_way: set[str] = set()
    together: list[set[str]] = []
    others = [f"s:train:{number}" for number in range(10, 10 + 2 * AT_ONCE)]

    async def bring_back(model_id: str) -> None:
        async with restores.turn(model_id, LORA):
            under_way.add(model_id)
            await asyncio.sleep(0.01)
            together.append(set(under_way))
            under_way.remove(model_id)

    async with asyncio.timeout(60):
        await asyncio.gather(*map(bring_back, [*others[:AT_ONCE], MODEL, OTHER, *others[AT_ONCE:]]))
    assert {MODEL} in together and {OTHER} in together
    assert max(map(len, together)) == AT_ONCE
    assert not any(len(seen) > 1 and seen & {MODEL, OTHER} for seen in together)


async def killed_while_it_brings_back(trainer: Trainer) -> None:
    """As far as its successors can tell: it never gets further, before the end of the test."""
    trainer.engine.gate.clear()
    restoring = asyncio.create_task(trainer.restore(trainer.stored(MODEL), 1))
    await until(lambda: trainer.engine.waiting == 1)
    restoring.cancel()


async def test_a_trainer_does_not_begin_to_bring_back_what_rests(
    tmp_path: Path, model_state: ModelState
) -> None:
    data, killed = DataDir(tmp_path), []
    for _ in range(MOST_CRASHES):
        killed.append(Trainer(data, model_state))
        await killed_while_it_brings_back(killed[-1])
    trainer = Trainer(data, model_state)
    with pytest.raises(Internal, match="died 3 times in a row"):
        await trainer.restore(trainer.stored(MODEL), 1)
    assert trainer.engine.waiting == 0 and not trainer.engine.done
    assert await trainer.restore(trainer.stored(OTHER), 1) == SEQ_ID
    for each in killed:
        each.engine.gate.set()
    await until(lambda: all(each.models for each in killed))


async def test_what_is_still_under_way_when_a_trainer_ends_in_order_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = CrashLedger[tuple[str, int]](path, tuple[str, int], "trainer")
    async with Restores(ledger, LOADS).turn(MODEL, LORA):
        ledger.close()
    assert not path.exists()
    started(path).check(MODEL)
