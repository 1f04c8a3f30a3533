"""Training through the SDK gives the numbers that plain PyTorch gives."""

from __future__ import annotations

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import Cluster
from tests.reference import Reference

LENGTHS = (5, 33, 12)
ADAM = types.AdamParams(
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.05
)


def snapshot_weights(cluster: Cluster, training: tinker.TrainingClient) -> dict[str, torch.Tensor]:
    training.save_weights_and_get_sampling_client().result()
    return load_file(cluster.snapshot(training.model_id) / "adapter_model.safetensors")


def assert_same_weights(ours: dict[str, torch.Tensor], reference: dict[str, torch.nn.Parameter]) -> None:
    assert ours.keys() == reference.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, reference[name].detach(), rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_forward_logprobs_equal_a_plain_pytorch_forward(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    data = [batches.cross_entropy(seed, length) for seed, length in enumerate(LENGTHS)]
    output = training.forward(data, "cross_entropy").result()
    reference = Reference(cluster.model_dir)
    with torch.no_grad():
        for datum, ours in zip(data, batches.logprobs(output), strict=True):
            expected = reference.logprobs(batches.inputs(datum), batches.targets(datum))
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_the_loss_is_the_weighted_token_sum_over_the_request(training: tinker.TrainingClient) -> None:
    weights = [1.0, 0.0, -0.5, 2.0, 0.25]
    data = [batches.cross_entropy(0, 5, weights), batches.cross_entropy(1, 33)]
    output = training.forward_backward(data, "cross_entropy").result()
    expected = -sum(
        float((batches.field(datum, "weights") * lp).sum())
        for datum, lp in zip(data, batches.logprobs(output), strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_two_cross_entropy_steps_equal_pytorch_with_every_adam_field(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    training.save_weights_and_get_sampling_client().result()
    reference = Reference(cluster.model_dir, cluster.snapshot(training.model_id))
    parameters = reference.parameters()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1, foreach=False
    )
    for step in range(2):
        data = [batches.cross_entropy(10 * step + i, n, [(i + 1) * 0.5] * n) for i, n in enumerate(LENGTHS)]
        training.forward_backward(data, "cross_entropy")
        metrics = training.optim_step(ADAM).result().metrics or {}
        optimizer.zero_grad()
        for datum in data:
            lp = reference.logprobs(batches.inputs(datum), batches.targets(datum))
            (-(batches.field(datum, "weights") * lp).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.05)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    assert_same_weights(snapshot_weights(cluster, training), parameters)


def test_an_importance_sampling_step_equals_pytorch(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    training.save_weights_and_get_sampling_client().result()
    reference = Reference(cluster.model_dir, cluster.snapshot(training.model_id))
    parameters = reference.parameters()
    generator = torch.Generator().manual_seed(3)
    data = [
        batches.policy(
            seed,
            length,
            (-6 + torch.randn(length, generator=generator)).tolist(),
            torch.randn(length, generator=generator).tolist(),
        )
        for seed, length in enumerate(LENGTHS)
    ]
    output = training.forward_backward(data, "importance_sampling").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-4)).result()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0, foreach=False
    )
    loss = torch.zeros(())
    for datum in data:
        lp = reference.logprobs(batches.inputs(datum), batches.targets(datum))
        ratio = torch.exp(lp - batches.field(datum, "logprobs"))
        loss = loss - (ratio * batches.field(datum, "advantages")).sum()
    loss.backward()
    optimizer.step()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_weights(snapshot_weights(cluster, training), parameters)


def test_a_batch_in_two_requests_gives_the_same_step_as_in_one(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    data = [batches.cross_entropy(seed, 20) for seed in range(6)]
    results = []
    for parts in ([data], [data[:1], data[1:]]):
        client = service.create_lora_training_client("tinsmith/tiny", rank=4, seed=1).result()
        for part in parts:
            client.forward_backward(part, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-4)).result()
        results.append(snapshot_weights(cluster, client))
    for name in results[0]:
        # AdamW divides by the root of the second moment, so the rounding of a tiny gradient grows.
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-3, atol=1e-5)


def test_a_forward_leaves_the_gradient_alone(training: tinker.TrainingClient) -> None:
    datum = batches.cross_entropy(0, 16)
    training.forward_backward([datum], "cross_entropy")
    alone = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    training.forward_backward([datum], "cross_entropy")
    training.forward([batches.cross_entropy(5, 30)], "cross_entropy")
    beside = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert alone is not None and beside is not None
    assert beside["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)


def test_a_custom_loss_in_the_client_trains(training: tinker.TrainingClient) -> None:
    data = [batches.cross_entropy(seed, 12) for seed in range(3)]

    def squared(_: list[types.Datum], lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum(((lp + 3) ** 2).mean() for lp in lps)
        return loss, {"loss": float(loss)}

    losses = []
    for _ in range(4):
        output = training.forward_backward_custom(data, squared).result()
        losses.append(output.metrics["loss:sum"])
        training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    assert losses[-1] < 0.8 * losses[0]


def test_models_that_train_at_the_same_time_do_not_touch_each_other(service: tinker.ServiceClient) -> None:
    data = [[batches.cross_entropy(10 * model + i, 24) for i in range(3)] for model in range(3)]
    shapes = [(4, True, True), (16, False, True), (2, True, False)]

    def create(model: int) -> tinker.TrainingClient:
        rank, attn, mlp = shapes[model]
        return service.create_lora_training_client(
            "tinsmith/tiny", rank=rank, seed=model, train_attn=attn, train_mlp=mlp, train_unembed=mlp
        ).result()

    def run(clients: dict[int, tinker.TrainingClient]) -> dict[int, list[float]]:
        losses: dict[int, list[float]] = {model: [] for model in clients}
        for _ in range(3):
            futures = {m: c.forward_backward(data[m], "cross_entropy") for m, c in clients.items()}
            steps = [c.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-6)) for c in clients.values()]
            for model, future in futures.items():
                losses[model].append(future.result().metrics["loss:sum"])
            for step in steps:
                step.result()
        return losses

    together = run({model: create(model) for model in range(3)})
    for model in range(3):
        alone = run({model: create(model)})
        assert together[model] == pytest.approx(alone[model], rel=1e-5)
        assert alone[model][-1] < alone[model][0]
