"""A critic, made and trained through the SDK, beside a policy on the same base model."""

from __future__ import annotations

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.reference import Reference

LENGTHS = (7, 30)
CLIP = 0.3
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)


@pytest.fixture
def critic(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(
        BASE_MODEL, rank=8, seed=5, user_metadata={"model_role": "critic"}
    ).result()


def datum(seed: int, length: int) -> types.Datum:
    """A third of prompt, then sampled tokens with returns."""
    generator = torch.Generator().manual_seed(seed)
    return types.Datum(
        model_input=types.ModelInput.from_ints(batches.tokens(seed, length)),
        loss_fn_inputs={
            "values": types.TensorData.from_torch(torch.randn(length, generator=generator) * 0.2),
            "returns": types.TensorData.from_torch(torch.randn(length, generator=generator) + 0.5),
            "weights": types.TensorData.from_torch((torch.arange(length) >= length // 3).float()),
        },
    )


def values(output: tinker.ForwardBackwardOutput) -> list[torch.Tensor]:
    return [record["values"].to_torch() for record in output.loss_fn_outputs]


def train(client: tinker.TrainingClient, data: list[types.Datum]) -> tinker.ForwardBackwardOutput:
    future = client.forward_backward(data, "ppo_critic", {"value_clip": CLIP})
    client.optim_step(ADAM).result()
    return future.result()


def saved_weights(cluster: Cluster, client: tinker.TrainingClient, name: str) -> dict[str, torch.Tensor]:
    """Saves the model; the adapter's matrices and the value head by name."""
    client.save_state(name).result()
    directory = cluster.data_dir / "checkpoints" / client.model_id / "weights" / name
    (file,) = directory.glob("*/adapter.safetensors")
    return load_file(file)


class CriticReference:
    """transformers' backbone, PEFT's adapter and a linear head, in float32."""

    def __init__(self, cluster: Cluster, client: tinker.TrainingClient) -> None:
        saved = saved_weights(cluster, client, "reference")
        self.head = torch.nn.Parameter(saved.pop("value_head.weight").clone())
        self.base = Reference(cluster.model_dir).model
        self.scale = 32 / 8
        self.matrices = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in saved.items()}
        for name in {name.rpartition(".")[0] for name in saved}:
            self.base.get_submodule(name).register_forward_hook(self._adapted(name))

    def _adapted(self, name: str):
        a, b = self.matrices[f"{name}.lora_A"], self.matrices[f"{name}.lora_B"]
        return lambda _, args, output: output + args[0] @ a.T @ b.T * self.scale

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {**self.matrices, "value_head.weight": self.head}

    def values(self, item: types.Datum) -> torch.Tensor:
        tokens = torch.tensor([batches.inputs(item)])
        hidden = self.base.base_model(tokens).last_hidden_state[0]
        return (hidden @ self.head.T)[:, 0]

    def loss(self, item: types.Datum) -> torch.Tensor:
        v, (old, returns, weights) = (
            self.values(item),
            (batches.field(item, name) for name in ("values", "returns", "weights")),
        )
        bounded = torch.minimum(torch.maximum(v, old - CLIP), old + CLIP)
        return (0.5 * weights * torch.maximum((v - returns) ** 2, (bounded - returns) ** 2)).sum()


def test_values_and_two_steps_equal_pytorch(cluster: Cluster, critic: tinker.TrainingClient) -> None:
    data = [datum(seed, length) for seed, length in enumerate(LENGTHS)]
    assert all(
        not v.any() and v.shape == (n,)
        for v, n in zip(values(critic.forward(data, "ppo_critic").result()), LENGTHS, strict=True)
    )
    reference = CriticReference(cluster, critic)
    parameters = reference.parameters()
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, foreach=False
    )
    for _ in range(3):
        output = train(critic, data)
        for item, ours in zip(data, values(output), strict=True):
            torch.testing.assert_close(ours, reference.values(item).detach(), rtol=1e-5, atol=1e-5)
        optimizer.zero_grad()
        loss = sum(reference.loss(item) for item in data)
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
    for name, tensor in saved_weights(cluster, critic, "trained").items():
        torch.testing.assert_close(tensor, parameters[name].detach(), rtol=1e-4, atol=2e-6)
    assert output.metrics["value_tokens:sum"] == sum(n - n // 3 for n in LENGTHS)


def test_a_critic_and_a_policy_train_at_the_same_time_as_if_alone(
    service: tinker.ServiceClient, critic: tinker.TrainingClient
) -> None:
    policy = service.create_lora_training_client(BASE_MODEL, rank=4, seed=2).result()
    alone_critic = service.create_lora_training_client(
        BASE_MODEL, rank=8, seed=5, user_metadata={"model_role": "critic"}
    ).result()
    data, text = [datum(seed, 20) for seed in range(3)], [batches.cross_entropy(9, 25)]
    together = []
    for _ in range(3):
        learned = policy.forward_backward(text, "cross_entropy")
        policy.optim_step(types.AdamParams(learning_rate=1e-2))
        together.append(train(critic, data).metrics["loss:sum"])
        learned.result()
    assert together == pytest.approx(
        [train(alone_critic, data).metrics["loss:sum"] for _ in range(3)], rel=1e-5
    )
    assert together[-1] != together[0]


def test_a_critic_resumes_bit_for_bit_and_stays_a_critic(
    cluster: Cluster, service: tinker.ServiceClient, critic: tinker.TrainingClient
) -> None:
    data = [datum(4, 24)]
    train(critic, data)
    path = critic.save_state("midway").result().path
    continued = [train(critic, data).metrics for _ in range(2)]
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert [train(resumed, data).metrics for _ in range(2)] == continued
    critic.load_state_with_optimizer(path).result()
    assert [train(critic, data).metrics for _ in range(2)] == continued
    with pytest.raises(tinker.RequestFailedError, match="critic"):
        resumed.forward_backward([batches.cross_entropy(0, 5)], "cross_entropy").result()


def test_what_a_role_cannot_do_is_refused_with_what_to_do_instead(
    service: tinker.ServiceClient, critic: tinker.TrainingClient, training: tinker.TrainingClient
) -> None:
    with pytest.raises(tinker.RequestFailedError, match="use ppo_critic"):
        critic.forward_backward([batches.cross_entropy(0, 5)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="model_role"):
        training.forward_backward([datum(0, 5)], "ppo_critic").result()
    with pytest.raises(tinker.RequestFailedError, match="no tokens to sample"):
        critic.save_weights_and_get_sampling_client().result()
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="'policy' or 'critic'"):
        service.create_lora_training_client(
            BASE_MODEL, rank=4, user_metadata={"model_role": "judge"}
        ).result()
