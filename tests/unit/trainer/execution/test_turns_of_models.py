"""In which order the executor has the world do what several models ask for at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from services.trainer.compute.memory.failures import NoMemory
from tests.unit.trainer.execution.executing import Recorded, Trainer, batch, ledger, resident, step
from tinsmith.internal.v1 import operation_pb2


async def told(
    tmp_path: Path, operations: Sequence[operation_pb2.Operation]
) -> list[tuple[str, tuple[str, ...]]]:
    """What the engine is told when these operations of several models are there at once."""
    names = dict.fromkeys(operation.model_id for operation in operations)
    trainer = Trainer(Recorded(), tmp_path, *map(resident, names))
    async with trainer.executes():
        for result in [await trainer.ask(operation) for operation in operations]:
            assert not (await result).HasField("error")
    return trainer.engine.commands  # type: ignore[no-any-return]


async def test_steps_that_are_due_come_before_the_pass_of_another_model_and_together(tmp_path: Path) -> None:
    operations = [step("a", 1), batch("b", 1), step("c", 1), step("d", 1)]
    assert await told(tmp_path, operations) == [("steps", ("a", "c", "d")), ("pass", ("b",))]


async def test_models_whose_steps_were_taken_have_their_next_batch_in_one_pass(tmp_path: Path) -> None:
    operations = [made(model, seq) for model in "abc" for seq, made in ((1, batch), (2, step), (3, batch))]
    assert await told(tmp_path, operations) == [
        ("pass", ("a", "b", "c")),
        ("steps", ("a", "b", "c")),
        ("pass", ("a", "b", "c")),
    ]


async def test_what_the_trainer_died_of_has_a_pass_for_itself_also_behind_others_of_its_model(
    tmp_path: Path,
) -> None:
    ledger(tmp_path / "executing").begin([("a", 2)])
    operations = [batch("a", 1), batch("a", 2), batch("a", 3), batch("b", 1)]
    for operation in operations:
        operation.forward_backward.forward_only = True
    passes = [models for _, models in await told(tmp_path, operations)]
    assert passes == [("a", "b"), ("a",), ("a",)]


async def test_models_that_train_in_small_steps_and_began_apart_come_to_share_their_passes(
    tmp_path: Path,
) -> None:
    trainer = Trainer(Recorded(pass_seconds=0.2), tmp_path, *map(resident, "abc"))

    async def train(model_id: str, begin: float) -> None:
        await asyncio.sleep(begin)
        for seq_id in range(1, 17, 2):
            passed = await trainer.ask(batch(model_id, seq_id))
            stepped = await trainer.ask(step(model_id, seq_id + 1))
            await asyncio.wait([passed, stepped])
            # What a client does before its next step.
            await asyncio.sleep(0.02)

    async with trainer.executes(), asyncio.TaskGroup() as clients:
        for number, model_id in enumerate("abc"):
            clients.create_task(train(model_id, 0.1 * number))
    passes = [models for what, models in trainer.engine.commands if what == "pass"]
    assert passes[0] == ("a",)
    assert ("a", "b", "c") in [tuple(sorted(models)) for models in passes[:-1]]


async def test_models_that_began_together_share_the_first_pass_after_their_next_rests(tmp_path: Path) -> None:
    trainer = Trainer(Recorded(pass_seconds=0.2), tmp_path, *map(resident, "abc"))

    async def begin(number: int, seq_id: int) -> None:
        await asyncio.sleep(0.01 * number)
        passed = await trainer.ask(batch("abc"[number], seq_id))
        stepped = await trainer.ask(step("abc"[number], seq_id + 1))
        await asyncio.wait([passed, stepped])

    first: list[tuple[str, ...]] = []
    async with trainer.executes():
        # A machine that stands still for a moment takes them apart for some rounds.
        while len(first) < 20 and ("a", "b", "c") not in first:
            began = len(trainer.engine.commands)
            await asyncio.gather(*(begin(number, 2 * len(first) + 1) for number in range(3)))
            first.append(trainer.engine.commands[began][1])
            # Longer than a pass waits at most.
            await asyncio.sleep(0.15)
    assert first[0] == ("a",)
    assert first[-1] == ("a", "b", "c")


async def test_a_step_without_memory_fails_alone_and_nothing_of_its_model_becomes_durable(
    tmp_path: Path,
) -> None:
    trainer = Trainer(Recorded(), tmp_path, *map(resident, "ab"))
    trainer.engine.refused["a"] = NoMemory("out of memory on the optimizer step")
    async with trainer.executes():
        steps = [await trainer.ask(step(name, 1)) for name in "ab"]
        results = [await answer for answer in steps]
        assert results[0].error.code == "out_of_memory" and not results[1].HasField("error")
        assert trainer.changed == ["b"]
        trainer.engine.refused.clear()
        assert not (await (await trainer.ask(step("a", 2)))).HasField("error")
    assert trainer.changed == ["b", "a"]
