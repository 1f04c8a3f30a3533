"""A trainer world that dies or is asked to end: what comes back, and what is left behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from services.common.process.crashes import MOST_CRASHES, CrashLedger
from services.common.process.faults import armed
from services.trainer.__main__ import _ORPHAN_S
from tests.announced import find
from tests.component.trainer.world import (
    TrainedModel,
    TrainerWorld,
    batch,
    forward_backward,
    status_of,
)

pytestmark = pytest.mark.heavy


def alive(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after waiting that long for their end."""
    return list(psutil.wait_procs(processes, timeout=seconds)[1])


def assert_by_shared_memory(ranks: list[psutil.Process]) -> None:
    """Two ranks of one machine exchange by memory that they share, and not by sockets."""
    assert len(ranks) == 2
    for rank in ranks:
        assert "deepspeed_allreduce_buffer" in Path(f"/proc/{rank.pid}/maps").read_text()


def test_a_killed_world_comes_back_with_every_accepted_operation(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    data, more = batch(14), batch(15, rows=3)
    first = TrainerWorld(redis_url, model_dir, tmp_path, 2, 0, "--micro-batch-tokens", "64")
    model = TrainedModel(first)
    try:
        model.create()
        results = [model.forward_backward(data), model.step()]
        first.wait_durable(model.model_id, 2)
        # The gradient of these is in no snapshot.
        results += [model.forward_backward(more), model.forward_backward(data)]

        # A rank that dies takes the whole world with it.
        processes = first.processes()
        assert_by_shared_memory(processes[1:])
        psutil.Process(first.rank_pid(1)).kill()
        assert first.process.wait(120) != 0
        assert alive(processes, 60) == []
    finally:
        first.kill()

    # What was accepted is cut as it was then.
    second = TrainerWorld(redis_url, model_dir, tmp_path, 2, 0, "--micro-batch-tokens", "4096")
    try:
        assert status_of(second.send(model.sent[3])) is grpc.StatusCode.FAILED_PRECONDITION
        # Not made afresh: it exists.
        assert status_of(second.send(model.sent[0])) is grpc.StatusCode.FAILED_PRECONDITION
        assert second.restore(model.model_id) == 2
        assert second.restore(model.model_id) == 2
        # Results from before the snapshot are still there for who never got them.
        assert second.send(model.sent[1]).result() == results[0]
        assert second.send(model.sent[2]).result() == results[1]
        replayed = [second.send(operation) for operation in model.sent[3:]]
        assert [call.result() for call in replayed] == results[2:]

        # From here on it is as if nothing had happened.
        model.world = second
        twin = TrainedModel(second)
        twin.micro_batch_tokens = model.micro_batch_tokens
        twin.create()
        twin.forward_backward(data)
        twin.step()
        twin.forward_backward(more)
        twin.forward_backward(data)
        assert model.step() == twin.step()
        for a, b in zip(model.forward(data), twin.forward(data), strict=True):
            np.testing.assert_array_equal(a, b)

        # An agent that is killed leaves no rank behind.
        processes = second.processes()
        second.process.kill()
        assert alive(processes, 90) == []
    finally:
        second.kill()


def test_sigterm_drains_and_leaves_nothing_behind(redis_url: str, model_dir: Path, tmp_path: Path) -> None:
    world = TrainerWorld(redis_url, model_dir, tmp_path, 2, 0)
    try:
        model = TrainedModel(world)
        model.create()
        call = world.send(model.operation(forward_backward=forward_backward(batch(16, rows=40))))
        time.sleep(0.05)
        processes = world.processes()
        started = time.monotonic()
        world.process.send_signal(signal.SIGTERM)
        assert world.process.wait(120) == 0
        # The other rank was dismissed: nothing waited for its alarm.
        assert time.monotonic() - started < _ORPHAN_S
        assert alive(processes, 30) == []
        assert list((tmp_path / "run").iterdir()) == []
        assert find(world.redis, "trainer", world.name) is None
        error = call.exception()
        if error is not None:
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        world.kill()


def test_a_model_that_trainers_die_of_while_they_bring_it_back_keeps_no_other_away(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    data = tmp_path / "data"

    def ledger(number: int) -> Path:
        """Of a world of this test, each of which has a name of its own."""
        return data / "run" / f"trainer-{number}.executing"

    first = TrainerWorld(redis_url, model_dir, data, 1, 0)
    number = int(first.name.rpartition("-")[2])
    deadly, other = TrainedModel(first), TrainedModel(first)
    try:
        for model in (deadly, other):
            model.create()
            first.wait_durable(model.model_id, 0)
    finally:
        first.kill()
    for _ in range(MOST_CRASHES - 1):
        dead = CrashLedger[tuple[str, int]](ledger(number + 1), tuple[str, int], "trainer")
        dead.begin([(deadly.model_id, -1)])

    armed.arm(faults, "trainer.mid_restore", "kill")
    second = TrainerWorld(redis_url, model_dir, data, 1, 0)
    try:
        with pytest.raises(grpc.RpcError):
            second.restore(deadly.model_id)
        assert second.process.wait(120) != 0
    finally:
        second.kill()

    ledger(number + 1).rename(ledger(number + 2))
    third = TrainerWorld(redis_url, model_dir, data, 1, 0)
    try:
        with pytest.raises(grpc.RpcError, match="died 3 times in a row while it brought model"):
            third.restore(deadly.model_id)
        assert third.restore(other.model_id) == 0
    finally:
        third.kill()


def test_a_world_that_fails_ends_at_once_whatever_a_disk_still_takes_its_time_for(
    redis_url: str, model_dir: Path, tmp_path: Path, faults: Path
) -> None:
    world = TrainerWorld(redis_url, model_dir, tmp_path / "data", 1, 0)
    model = TrainedModel(world)
    try:
        model.create()
        world.wait_durable(model.model_id, 0)
        armed.arm(faults, "trainer.before_rename", "delay:200")
        model.forward_backward(batch(14))
        model.step()
        deadline = time.monotonic() + 60
        while armed.armed(faults):
            assert time.monotonic() < deadline, "no snapshot is written"
            time.sleep(0.1)
        armed.arm(faults, "trainer.before_pass", "device")
        world.send(model.operation(forward_backward=forward_backward(batch(14))))
        assert world.process.wait(60) == 1
    finally:
        world.kill()


def test_a_world_that_is_asked_to_end_while_redis_hangs_drains_in_time(
    redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    world = TrainerWorld(redis_url, model_dir, tmp_path, 1, 0)
    hung = psutil.Process(world.redis.info("server")["process_id"])
    ledger = tmp_path / "run" / f"{world.name}.executing"
    assert ledger.exists()
    hung.suspend()
    try:
        world.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 25
        while ledger.exists():
            assert time.monotonic() < deadline, "who stopped it kills it, and what it does is blamed"
            time.sleep(0.1)
    finally:
        hung.resume()
        world.kill()
