"""Training by the trainer service: a world of ranks, real Redis, gRPC."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import pytest

from tests.component.trainer.world import (
    BASE_MODEL,
    VOCAB,
    Datum,
    TrainedModel,
    TrainerWorld,
    batch,
    create,
    forward_backward,
    logprobs,
    status_of,
    step,
)
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, types_pb2

pytestmark = pytest.mark.heavy


def test_the_world_announces_what_it_serves(world: TrainerWorld) -> None:
    record = world.record
    assert (record.base_model, record.vocab_size, record.context_length) == (BASE_MODEL, VOCAB, 128)
    assert (record.world_size, record.arch, record.device) == (world.ranks, "Qwen3ForCausalLM", "cpu")


def test_a_single_rank_is_the_process_that_was_started(world: TrainerWorld) -> None:
    # Several are the children of a launcher.
    assert (world.rank_pid(0) == world.process.pid) == (world.ranks == 1)
    assert len(world.processes()) == (1 if world.ranks == 1 else 1 + world.ranks)


def test_training_lowers_the_loss(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(1)
    model.create()
    losses = []
    for _ in range(8):
        losses.append(model.forward_backward(data).forward_backward.metrics["loss:sum"])
        metrics = model.step().optim_step.metrics
        assert metrics["grad_norm"] > 0
    assert losses[-1] < 0.8 * losses[0]


def test_outputs_come_back_in_request_order_and_shape(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(2, rows=9)
    model.create()
    together = model.forward(data)
    assert [len(row) for row in together] == [len(datum.tokens) - 1 for datum in data]
    one_by_one = [model.forward([datum])[0] for datum in data]
    for a, b in zip(together, one_by_one, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_operations_run_in_order_whatever_order_they_arrive_in(world: TrainerWorld) -> None:
    data = batch(3)
    in_order, shuffled = TrainedModel(world), TrainedModel(world)

    def operations(model: TrainedModel) -> list[operation_pb2.Operation]:
        kinds: list[dict[str, Any]] = [{"create_model": create()}]
        for _ in range(3):
            kinds += [{"forward_backward": forward_backward(data)}, {"optim_step": step()}]
        kinds += [{"forward_backward": forward_backward(data, forward_only=True)}]
        return [model.operation(**kind) for kind in kinds]

    expected = [world.send(operation).result() for operation in operations(in_order)]
    made = operations(shuffled)
    # What comes before its model is refused.
    world.send(made[0]).result()
    calls = [world.send(operation) for operation in reversed(made[1:])]
    found = [call.result() for call in reversed(calls)]
    for a, b in zip(logprobs(expected[-1]), logprobs(found[-1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert found[1].optim_step.metrics["grad_norm"] > 0


def test_a_repeated_operation_runs_once_and_gives_the_same_result(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(4)
    model.create()
    operation = model.operation(forward_backward=forward_backward(data))
    results = [call.result() for call in [world.send(operation) for _ in range(3)]]
    results.append(world.send(operation).result())
    assert all(result == results[0] for result in results)
    once = model.step().optim_step.metrics["grad_norm"]
    other = TrainedModel(world)
    other.create()
    other.forward_backward(data)
    assert other.step().optim_step.metrics["grad_norm"] == pytest.approx(once, rel=1e-5)


def test_tenants_that_run_together_train_as_if_alone(world: TrainerWorld) -> None:
    def train(model: TrainedModel, data: list[Datum], rank: int) -> list[Future[results_pb2.OperationResult]]:
        # Calls overtake each other, and what comes before its model is refused.
        model.create(rank, seed=rank)
        kinds: list[dict[str, Any]] = []
        for _ in range(3):
            kinds += [{"forward_backward": forward_backward(data)}, {"optim_step": step()}]
        kinds += [{"forward_backward": forward_backward(data, forward_only=True)}]
        return [world.send(model.operation(**kind)) for kind in kinds]

    datas = {2: batch(5, rows=3), 4: batch(6, rows=8), 8: batch(7, rows=2)}
    together = {rank: train(TrainedModel(world), data, rank) for rank, data in datas.items()}
    for rank, data in datas.items():
        calls = together[rank]
        alone = [call.result() for call in train(TrainedModel(world), data, rank)]
        for a, b in zip(logprobs(calls[-1].result()), logprobs(alone[-1]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_refused_operation_takes_its_place_and_the_model_goes_on(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(8)
    model.create()
    bad = model.forward_backward([*data, Datum([1, 2, VOCAB])])
    assert bad.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "vocabulary" in bad.error.message
    assert model.step().optim_step.metrics["skipped"] == 1
    model.forward_backward(data)
    assert "skipped" not in model.step().optim_step.metrics


def test_a_seq_id_that_was_used_up_elsewhere_is_passed_over(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(9)
    model.create()
    model.next_seq = 3
    operation = model.operation(forward_backward=forward_backward(data))
    assert world.send(operation, after=0).result().HasField("forward_backward")


def test_an_unknown_model_is_not_resident(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    model.next_seq = 1
    call = world.send(model.operation(optim_step=step()))
    assert status_of(call) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_lower_epoch_is_fenced_off(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    world.send(model.operation(create_model=create()), epoch=5).result()
    call = world.send(model.operation(optim_step=step()), epoch=4)
    assert status_of(call) is grpc.StatusCode.ABORTED


def test_a_model_that_could_not_be_created_answers_every_operation(world: TrainerWorld) -> None:
    model = TrainedModel(world)
    created = model.run(create_model=create(rank=1000))
    assert created.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "not created" in model.step().error.message


def test_a_gradient_that_is_not_finite_is_dropped_and_its_refusal_kept(world: TrainerWorld) -> None:
    model, data = TrainedModel(world), batch(18)
    model.create()
    before = model.forward(data)
    huge = forward_backward(data)
    for datum in huge.data:
        weights = np.full(datum.loss_inputs["weights"].shape[0], 3e38, "<f4")
        datum.loss_inputs["weights"].data = weights.tobytes()
    model.run(forward_backward=huge)
    refused = model.step()
    assert (refused.error.code, refused.error.category) == (
        "non_finite_gradient",
        types_pb2.ERROR_CATEGORY_USER,
    )
    world.wait_durable(model.model_id, 3)
    assert model.step().optim_step.metrics["skipped"] == 1
    for a, b in zip(before, model.forward(data), strict=True):
        np.testing.assert_array_equal(a, b)
