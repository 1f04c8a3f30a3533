"""Models that the trainer service saves, loads, publishes, parks and deletes, in worlds of several sizes."""

from __future__ import annotations

import json
import time

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from services.common.state import keys
from tests.component.trainer.receiver import Receiver
from tests.component.trainer.world import (
    BASE_MODEL,
    EPOCH,
    VOCAB,
    TrainedModel,
    TrainerWorld,
    batch,
    forward_backward,
    logprobs,
    status_of,
    step,
)
from tinsmith.internal.v1 import operation_pb2, trainer_pb2
from tinsmith.v1 import types_pb2

pytestmark = pytest.mark.heavy


def save(name: str, overwrite: bool = False) -> operation_pb2.SaveState:
    return operation_pb2.SaveState(checkpoint_id=f"weights/{name}", overwrite=overwrite)


def load(model: TrainedModel, name: str, optimizer: bool) -> operation_pb2.LoadState:
    return operation_pb2.LoadState(
        source_model_id=model.model_id, checkpoint_id=f"weights/{name}", optimizer=optimizer
    )


def test_a_model_resumed_from_saved_state_goes_on_bit_for_bit(world: TrainerWorld) -> None:
    data = batch(10)
    original = TrainedModel(world)
    original.create()
    original.forward_backward(data)
    original.step()
    saved = original.run(save_state=save("here")).save_state
    assert saved.path == f"tinker://{original.model_id}/weights/here"
    directory = world.data_dir / "checkpoints" / original.model_id / "weights" / "here" / "3"
    assert saved.size_bytes == sum(path.stat().st_size for path in directory.iterdir())

    resumed = TrainedModel(world)
    made = resumed.run(
        create_model=operation_pb2.CreateModel(
            base_model=BASE_MODEL, from_state=load(original, "here", optimizer=True)
        )
    )
    assert made.create_model.lora.rank == 4
    for model in (original, resumed):
        model.forward_backward(data)
        model.step()
    for a, b in zip(original.forward(data), resumed.forward(data), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loading_replaces_weights_and_drops_the_gradient(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(11)
    model.create()
    before = model.forward(data)
    model.run(save_state=save("start"))
    model.forward_backward(data)
    model.step()
    model.forward_backward(data)
    assert model.run(load_state=load(model, "start", optimizer=False)).HasField("load_state")
    for a, b in zip(before, model.forward(data), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.step().optim_step.metrics["skipped"] == 1


def test_checkpoint_names_are_taken_until_overwritten(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    model.create()
    first = model.operation(save_state=save("name"))
    assert world.send(first).result().HasField("save_state")
    taken = model.run(save_state=save("name"))
    assert (taken.error.code, taken.error.category) == ("checkpoint_exists", types_pb2.ERROR_CATEGORY_USER)
    assert model.run(save_state=save("name", overwrite=True)).HasField("save_state")
    missing = model.run(load_state=load(model, "other", optimizer=False))
    assert missing.error.code == "checkpoint_not_found"


def test_state_of_another_shape_is_refused_and_changes_nothing(world: TrainerWorld) -> None:
    small, large, data = TrainedModel(world), TrainedModel(world), batch(12)
    small.create(rank=2)
    small.run(save_state=save("small"))
    large.create(rank=8)
    large.forward_backward(data)
    refused = large.run(load_state=load(small, "small", optimizer=True))
    assert refused.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "skipped" not in large.step().optim_step.metrics


def test_a_snapshot_is_stored_in_peft_format_without_any_sampler(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(13)
    model.create(rank=4)
    model.forward_backward(data)
    model.step()
    result = model.run(save_for_sampler=operation_pb2.SaveForSampler(checkpoint_id="sampler_weights/v"))
    assert (result.save_for_sampler.version, result.save_for_sampler.receivers) == (3, 0)
    directory = world.data_dir / "snapshots" / model.model_id / "3"
    assert result.save_for_sampler.size_bytes == sum(path.stat().st_size for path in directory.iterdir())
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    tensors = load_file(directory / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[key].shape == (4, 32)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (VOCAB, 4)


def test_snapshots_reach_every_live_receiver_bit_for_bit(world: TrainerWorld, redis_url: str) -> None:
    model, data = TrainedModel(world), batch(17)
    model.create(rank=4)
    publish = {"save_for_sampler": operation_pb2.SaveForSampler(sampling_session_id="s:sample:0")}
    with Receiver(redis_url, "one") as one, Receiver(redis_url, "two") as two:
        model.forward_backward(data)
        model.step()
        result = model.run(**publish).save_for_sampler
        assert result.receivers == 2
        first_epoch = one.epoch
        assert one.snapshots.keys() == two.snapshots.keys() == {(model.model_id, 3)}
        stored = load_file(world.data_dir / "snapshots" / model.model_id / "3" / "adapter_model.safetensors")
        for receiver in (one, two):
            tensors = receiver.snapshots[model.model_id, 3]
            assert result.wire_bytes >= sum(tensor.nbytes for tensor in tensors.values()) > 0
            assert {f"base_model.model.{name}.weight" for name in tensors} == stored.keys()
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(tensor, stored[f"base_model.model.{name}.weight"])
        assert model.run(**publish).save_for_sampler.receivers == 2
        assert one.epoch == first_epoch

        # A receiver that is gone but still listed fails no publish, and is left out of the next.
        two.vanish()
        started = time.monotonic()
        assert model.run(**publish).HasField("save_for_sampler")
        assert model.run(**publish).save_for_sampler.receivers == 1
        assert time.monotonic() - started < 20
        assert one.epoch > first_epoch
    assert model.run(**publish).save_for_sampler.receivers == 0


def test_a_receiver_that_was_dead_before_the_group_formed_costs_no_deadline(
    world: TrainerWorld, redis_url: str
) -> None:
    model = TrainedModel(world)
    model.create(rank=4)
    with Receiver(redis_url, "live"), Receiver(redis_url, "dead") as dead:
        dead.vanish()
        started = time.monotonic()
        result = model.run(save_for_sampler=operation_pb2.SaveForSampler(sampling_session_id="s:sample:1"))
        assert result.save_for_sampler.receivers == 1
        # Forming a group may take 20 s before it is given up.
        assert time.monotonic() - started < 18


def test_an_unloaded_model_is_gone_and_can_be_restored(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    model.create()
    world.wait_durable(model.model_id, 0)
    assert model.run(unload_model=operation_pb2.UnloadModel()).HasField("unload_model")
    assert world.status(model.model_id) is None
    call = world.send(model.operation(optim_step=step()))
    assert status_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert world.restore(model.model_id) == 0


def test_a_parked_model_frees_its_memory_and_comes_back_bit_for_bit(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(19)
    model.create()
    model.forward_backward(data)
    model.step()
    before = model.forward(data)
    world.stub.Park(trainer_pb2.ParkRequest(model_id=model.model_id, epoch=EPOCH), timeout=120)
    assert world.status(model.model_id) is None
    call = world.send(model.operation(optim_step=step()))
    assert status_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert world.restore(model.model_id) == 2
    forward = model.operation(forward_backward=forward_backward(data, forward_only=True))
    after = logprobs(world.send(forward, after=2).result())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(grpc.RpcError) as caught:
        world.stub.Park(trainer_pb2.ParkRequest(model_id=model.model_id, epoch=EPOCH - 1), timeout=120)
    assert caught.value.code() is grpc.StatusCode.ABORTED


def test_a_copy_from_before_a_model_moved_is_dropped_and_does_not_become_durable(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    model.create()
    world.wait_durable(model.model_id, 0)
    model.forward_backward(batch(19))
    moved = EPOCH + 1
    world.redis.set(keys.epoch(model.model_id), moved)
    assert world.restore(model.model_id, moved, moved) == 0
    known = world.status(model.model_id)
    assert known is not None and known.applied_seq_id == 0
    assert world.restore(model.model_id, moved, moved) == 0

    world.send(model_step(model.model_id, 1), epoch=moved).result()
    world.redis.set(keys.epoch(model.model_id), moved + 1)
    away = trainer_pb2.ParkRequest(model_id=model.model_id, epoch=moved + 1, moved_epoch=moved + 1)
    world.stub.Park(away, timeout=120)
    assert world.status(model.model_id) is None
    location = world.redis.hget(keys.journal_meta(model.model_id), "location")
    assert not location.endswith(str(moved + 1).encode())


def test_a_number_that_another_operation_has_by_now_is_executed_anew_as_the_journal_has_it(
    world: TrainerWorld,
) -> None:
    model = TrainedModel(world)
    model.create()
    world.wait_durable(model.model_id, 0)
    lost, instead = (
        operation_pb2.Operation(
            model_id=model.model_id,
            seq_id=1,
            forward_backward=forward_backward(batch(seed)),
            origin=operation_pb2.Origin(accepted_at=seed),
        )
        for seed in (20, 21)
    )
    before = world.send(lost).result()
    assert world.send(lost).result() == before
    assert status_of(world.send(instead)) is grpc.StatusCode.FAILED_PRECONDITION
    assert world.restore(model.model_id) == 0
    assert world.send(instead).result() != before
    assert world.send(instead).result() != before


def model_step(model_id: str, seq_id: int) -> operation_pb2.Operation:
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, optim_step=step())


def test_only_a_closed_model_is_deleted_and_what_has_a_name_stays(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    model.create()
    for checkpoint_id in ("", "sampler_weights/kept"):
        model.run(save_for_sampler=operation_pb2.SaveForSampler(checkpoint_id=checkpoint_id))
    model.run(save_state=save("kept"))
    world.wait_durable(model.model_id, 0)
    delete = trainer_pb2.DeleteModelRequest(model_id=model.model_id, snapshots=True, kept_versions=[2])
    with pytest.raises(grpc.RpcError) as caught:
        world.stub.DeleteModel(delete, timeout=120)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    world.redis.hset(keys.journal_meta(model.model_id), "closed", b"over")
    for _ in range(2):
        world.stub.DeleteModel(delete, timeout=120)
        assert world.status(model.model_id) is None
        assert not (world.data_dir / "state" / model.model_id).exists()
        snapshots = world.data_dir / "snapshots" / model.model_id
        assert [path.name for path in snapshots.iterdir()] == ["2"]
        assert (world.data_dir / "checkpoints" / model.model_id / "weights" / "kept").is_dir()


def test_a_model_without_durable_snapshot_cannot_be_restored(world: TrainerWorld) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        world.restore("nobody:train:0")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
