"""Training state saved and loaded through the SDK."""

from __future__ import annotations

import pytest
import tinker
import torch
from tinker import types

from tests.cluster import batches

ADAM = types.AdamParams(learning_rate=1e-2)


def train(client: tinker.TrainingClient, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        output = client.forward_backward([batches.cross_entropy(seed % 3, 20)], "cross_entropy").result()
        losses.append(output.metrics["loss:sum"])
        client.optim_step(ADAM).result()
    return losses


def test_training_resumed_with_its_optimizer_continues_bit_for_bit(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train(training, range(4))
    path = training.save_state("midway").result().path
    assert path == f"tinker://{training.model_id}/weights/midway"
    continued = train(training, range(4, 8))
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, range(4, 8)) == continued


def test_a_client_from_state_without_optimizer_has_the_weights_and_a_fresh_optimizer(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    train(training, range(4))
    path = training.save_state("weights-only").result().path
    continued = train(training, range(4, 7))
    resumed = service.create_training_client_from_state(path).result()
    losses = train(resumed, range(4, 7))
    assert losses[0] == continued[0]
    assert losses[2] != continued[2]


def test_loading_a_state_undoes_later_steps_and_drops_pending_gradient(
    training: tinker.TrainingClient,
) -> None:
    probe = [batches.cross_entropy(50, 30)]
    train(training, range(2))
    path = training.save_state("early").result().path
    before = batches.logprobs(training.forward(probe, "cross_entropy").result())[0]
    train(training, range(3))
    assert not torch.equal(batches.logprobs(training.forward(probe, "cross_entropy").result())[0], before)
    training.forward_backward(probe, "cross_entropy").result()
    training.load_state(path).result()
    metrics = training.optim_step(ADAM).result().metrics
    assert metrics is not None and metrics["skipped"] == 1
    assert torch.equal(batches.logprobs(training.forward(probe, "cross_entropy").result())[0], before)


def test_a_name_that_exists_is_refused_unless_overwritten(training: tinker.TrainingClient) -> None:
    training.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="exists") as caught:
        training.save_state("twice").result()
    assert caught.value.category == types.RequestErrorCategory.User
    training.save_state("twice", overwrite=True).result()


def test_a_state_that_does_not_exist_cannot_be_loaded(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    missing = f"tinker://{training.model_id}/weights/nothing"
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="nothing"):
        service.create_training_client_from_state(missing).result()
