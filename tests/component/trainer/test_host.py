"""Adapters for which a world's device has no room are on its hosts, and come back without anybody's help."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.process.faults import armed
from services.launcher.machine import free_port
from tests.component.trainer.world import (
    TrainedModel,
    TrainerWorld,
    batch,
    create,
    forward_backward,
    step,
)
from tinsmith.internal.v1 import trainer_pb2
from tinsmith.v1 import results_pb2

pytestmark = pytest.mark.heavy

GIB = 2**30
MODELS, TURNS = 5, 3
RANK = 32
"""So large that two adapters take more memory than it takes to train."""

Result = results_pb2.OperationResult


class World(TrainerWorld):
    """A world of two ranks that tells what it counts."""

    def __init__(self, redis_url: str, model_dir: Path, data_dir: Path, *flags: str) -> None:
        self._metrics = free_port()
        super().__init__(redis_url, model_dir, data_dir, 2, 0, "--metrics-port", str(self._metrics), *flags)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)

    @property
    def held(self) -> trainer_pb2.GetTrainerStatusResponse:
        return self.stub.GetTrainerStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=60)


def run(model: TrainedModel, **kind: Any) -> Result:
    """An operation, as a gateway sends it: what is not there is restored, and its journal replayed."""
    operation = model.operation(**kind)
    deadline = time.monotonic() + 120
    while True:
        try:
            return model.world.send(operation).result()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, error
        assert time.monotonic() < deadline
        durable = model.world.restore(model.model_id)
        for earlier in model.sent[durable + 1 : operation.seq_id]:
            model.world.send(earlier).result()


def played(world: World, models: int, pause: float = 0.0) -> list[Result]:
    """What models come to that train in turns, each with a gradient pending while the others have theirs."""
    trained = [TrainedModel(world) for _ in range(models)]
    found = [run(model, create_model=create(RANK, seed=number)) for number, model in enumerate(trained)]
    for turn in range(TURNS):
        for number, model in enumerate(trained):
            time.sleep(pause)
            for seed in (turn, turn + 100):
                data = batch(10 * seed + number, rows=3)
                found.append(run(model, forward_backward=forward_backward(data)))
                if seed == turn:
                    found.append(run(model, optim_step=step()))
    return found


def as_bytes(results: list[Result]) -> list[bytes]:
    return [result.SerializeToString(deterministic=True) for result in results]


@pytest.fixture(scope="module")
def roomy(
    redis_url: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Result], int]:
    """What all come to where there is room for them, and the bytes of each."""
    world = World(redis_url, model_dir, tmp_path_factory.mktemp("roomy"))
    try:
        found = played(world, MODELS)
        held = world.held
        assert (held.adapter_host_bytes, held.adapter_host_room_bytes) == (0, 0)
        assert len(held.models) == MODELS and held.adapter_bytes == MODELS * held.models[0].adapter_bytes
        assert held.weight_bytes > 0 and held.pass_bytes > 0
        assert held.asked_micro_batch_tokens == world.record.micro_batch_tokens
        return found, held.models[0].adapter_bytes
    finally:
        world.kill()


def for_two(adapter_bytes: int) -> tuple[str, ...]:
    """Flags of a world with room for two adapters: of little memory they have a third of a sixteenth."""
    return ("--memory-gib", str(48 * 2.5 * adapter_bytes / GIB))


def test_five_train_in_the_room_of_two_as_if_there_were_room_for_all(
    redis_url: str, model_dir: Path, tmp_path: Path, roomy: tuple[list[Result], int]
) -> None:
    expected, size = roomy
    world = World(redis_url, model_dir, tmp_path, *for_two(size), "--adapter-host-gib", "0.5")
    try:
        assert as_bytes(played(world, MODELS)) == as_bytes(expected)
        held = world.held
        assert 2 * size <= held.adapter_room_bytes < 3 * size
        assert held.adapter_bytes == 2 * size
        assert [model.on_host for model in held.models].count(True) == MODELS - 2
        assert held.adapter_host_room_bytes == GIB // 2
        assert 0 < held.adapter_host_bytes < (MODELS - 2) * size
        assert held.adapter_host_bytes == world.metric("tinsmith_adapter_host_bytes")
        assert world.metric("tinsmith_models_reloaded_total") == 0
        assert world.metric("tinsmith_models_evicted_total") == 0
        # Each came back for each of its turns, and left before.
        assert world.metric("tinsmith_adapters_moved_total") >= 2 * (MODELS - 1) * TURNS
    finally:
        world.kill()


@pytest.mark.long
def test_what_a_full_host_has_no_room_for_goes_to_the_disk(
    redis_url: str, model_dir: Path, tmp_path: Path, roomy: tuple[list[Result], int]
) -> None:
    expected, size = roomy
    # An adapter takes half as much there as on the device.
    flags = (*for_two(size), "--adapter-host-gib", f"{0.6 * size / GIB:.9f}")
    world = World(redis_url, model_dir, tmp_path, *flags)
    try:
        assert as_bytes(played(world, MODELS)) == as_bytes(expected)
        held = world.held
        assert [model.on_host for model in held.models].count(True) == 1 and len(held.models) <= 3
        assert held.adapter_host_room_bytes * 0.5 < held.adapter_host_bytes <= held.adapter_host_room_bytes
        assert world.metric("tinsmith_models_reloaded_total") > 0
        assert world.metric("tinsmith_adapters_moved_total") > 0
    finally:
        world.kill()


def test_a_rank_without_memory_for_one_that_comes_back_has_another_leave(
    redis_url: str, model_dir: Path, tmp_path: Path, roomy: tuple[list[Result], int], faults: Path
) -> None:
    expected, size = roomy
    armed.arm(faults, "trainer.before_return[trainer-1]", "oom*2")
    world = World(redis_url, model_dir, tmp_path / "data", *for_two(size), "--adapter-host-gib", "0.5")
    try:
        found = played(world, 3, pause=0.7)
        assert armed.armed(faults) == set(), "no rank was refused memory"
        assert world.metric("tinsmith_models_reloaded_total") == 0
    finally:
        world.kill()
    turns = [expected[start : start + 9] for start in range(MODELS, len(expected), 3 * MODELS)]
    assert as_bytes(found) == as_bytes([*expected[:3], *(each for turn in turns for each in turn)])
