"""Every loss, through the SDK, gives the value and the gradient of its formula written out in PyTorch.

The gradient is read off the weights: with eps far above it, AdamW's first step moves every weight by
learning_rate / eps times its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, VOCAB, Cluster
from tests.reference import Reference

LENGTHS = (4, 19, 11)
EPS = 1e6
READ_GRADIENT = types.AdamParams(learning_rate=EPS, eps=EPS, beta1=0.0, beta2=0.0)

Inputs = Mapping[str, torch.Tensor]
Formula = Callable[[torch.Tensor, Inputs, Mapping[str, float]], torch.Tensor]


def cross_entropy(lp: torch.Tensor, x: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    return -(x["weights"] * lp).sum()


def importance_sampling(lp: torch.Tensor, x: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    return -((lp - x["logprobs"]).exp() * x["advantages"]).sum()


def ppo(lp: torch.Tensor, x: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    ratio = (lp - x["logprobs"]).exp()
    low = x.get("clip_low_threshold", config.get("clip_low_threshold", 0.8))
    high = x.get("clip_high_threshold", config.get("clip_high_threshold", 1.2))
    bounded = torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high))
    return -torch.minimum(ratio * x["advantages"], bounded * x["advantages"]).sum()


def cispo(lp: torch.Tensor, x: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    ratio = (lp - x["logprobs"]).exp().detach()
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    return -(ratio.clamp(low, high) * lp * x["advantages"]).sum()


def dro(lp: torch.Tensor, x: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    sampled = (x["logprobs"] != 0) | (x["advantages"] != 0)
    terms = lp * x["advantages"] - 0.5 * config["beta"] * (lp - x["logprobs"]) ** 2
    return -terms[sampled].sum()


def gspo(lp: torch.Tensor, x: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    mask = x.get("sequence_ratio_mask", x["logprobs"].abs() + x["advantages"].abs()) != 0
    sequence = (lp.detach() - x["logprobs"])[mask].mean().exp()
    ratio = sequence * (lp - lp.detach()).exp()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    return -torch.minimum(ratio * x["advantages"], ratio.clamp(low, high) * x["advantages"]).sum()


CASES: dict[str, tuple[str, Formula, dict[str, float], frozenset[str]]] = {
    "cross_entropy": ("cross_entropy", cross_entropy, {}, frozenset({"weights"})),
    "importance_sampling": ("importance_sampling", importance_sampling, {}, frozenset()),
    "ppo with its default bounds": ("ppo", ppo, {}, frozenset()),
    "ppo with bounds of the request": (
        "ppo",
        ppo,
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05},
        frozenset(),
    ),
    "ppo with bounds of every token": (
        "ppo",
        ppo,
        {},
        frozenset({"clip_low_threshold", "clip_high_threshold"}),
    ),
    "cispo with its default bounds": ("cispo", cispo, {}, frozenset()),
    "cispo with bounds of the request": (
        "cispo",
        cispo,
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        frozenset(),
    ),
    "dro": ("dro", dro, {"beta": 0.05}, frozenset()),
    "gspo": (
        "gspo",
        gspo,
        {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
        frozenset({"sequence_ratio_mask"}),
    ),
    "gspo over the sampled tokens": ("gspo", gspo, {}, frozenset()),
}


def make_datum(seed: int, base: torch.Tensor, names: frozenset[str]) -> types.Datum:
    """A datum whose sampling log-probabilities are close to the base model's, `base` float32 [N]."""
    length = len(base)
    generator = torch.Generator().manual_seed(seed)
    if names == {"weights"}:
        return batches.cross_entropy(seed, length, torch.randn(length, generator=generator).tolist())
    q = base + 0.3 * torch.randn(length, generator=generator)
    advantages = torch.randn(length, generator=generator)
    # As the SDK's recipes mark a prompt: no log-probability and no advantage.
    q[:2], advantages[:2] = 0.0, 0.0
    datum = batches.policy(seed, length, q.tolist(), advantages.tolist())
    extra = {
        "clip_low_threshold": 0.6 + 0.3 * torch.rand(length, generator=generator),
        "clip_high_threshold": 1.0 + 0.3 * torch.rand(length, generator=generator),
        "sequence_ratio_mask": torch.tensor([0.0, 0.0] + [1.0] * (length - 2)),
    }
    datum.loss_fn_inputs.update({name: types.TensorData.from_torch(extra[name]) for name in names})
    return datum


class Gradients:
    """What the reference and the service make of the same loss of a fresh model."""

    def __init__(self, cluster: Cluster, client: tinker.TrainingClient) -> None:
        self._cluster, self._client = cluster, client
        self.reference = Reference(cluster.model_dir, self._saved())
        self._parameters = self.reference.parameters()

    def _saved(self) -> Path:
        self._client.save_weights_and_get_sampling_client().result()
        return self._cluster.snapshot(self._client.model_id)

    def assert_equal(self, loss: torch.Tensor) -> None:
        """Differentiates `loss`, of the reference, and compares with what the service accumulated."""
        loss.backward()
        gradients = {
            key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for key, parameter in self._parameters.items()
        }
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        metrics = self._client.optim_step(READ_GRADIENT).result().metrics or {}
        after = load_file(self._saved() / "adapter_model.safetensors")
        assert norm > 0
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert after.keys() == gradients.keys()
        for key, gradient in gradients.items():
            moved = self._parameters[key].detach() - after[key]
            torch.testing.assert_close(
                moved, gradient, rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_equal_pytorch(
    cluster: Cluster, training: tinker.TrainingClient, case: str
) -> None:
    name, formula, config, extra = CASES[case]
    gradients = Gradients(cluster, training)
    data, loss = [], torch.zeros(())
    for seed, length in enumerate(LENGTHS):
        plain = batches.cross_entropy(seed, length)
        lp = gradients.reference.logprobs(batches.inputs(plain), batches.targets(plain))
        datum = make_datum(seed, lp.detach(), extra)
        data.append(datum)
        inputs = {key: batches.field(datum, key) for key in datum.loss_fn_inputs}
        loss = loss + formula(lp, inputs, config)
    output = training.forward_backward(data, name, config).result()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    gradients.assert_equal(loss)


def test_several_weighted_targets_a_position_arrive_whole_when_the_sdk_sends_them_sparse(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    sequence = batches.tokens(1, 12)
    targets, weights = torch.zeros(12, 5, dtype=torch.int64), torch.zeros(12, 5)
    targets[3, 1], weights[3, 1], targets[9, 0], weights[9, 0] = 17, 0.75, 400, -0.5
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(sequence),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(targets),
            "weights": types.TensorData.from_torch_sparse(weights),
        },
    )
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    output = training.forward([datum], "cross_entropy").result()
    reference = Reference(cluster.model_dir)
    with torch.no_grad():
        expected = reference.distribution(sequence).gather(1, targets)
    ours = batches.logprobs(output)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * expected).sum().item(), rel=1e-4)


def test_datums_of_one_request_may_have_different_numbers_of_targets(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    gradients = Gradients(cluster, training)
    generator = torch.Generator().manual_seed(1)
    data, expected, loss = [], [], torch.zeros(())
    for seed, shape in enumerate([(12,), (7, 3), (5, 1), (9, 2), (12,)]):
        sequence = batches.tokens(seed, shape[0])
        targets = torch.randint(VOCAB, shape, generator=generator)
        weights = torch.randn(shape, generator=generator)
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(sequence),
                loss_fn_inputs={name: types.TensorData.from_torch(each) for name, each in inputs.items()},
            )
        )
        distribution = gradients.reference.distribution(sequence)
        lp = distribution.gather(1, targets.view(shape[0], -1)).view(shape)
        expected.append(lp.detach())
        loss = loss - (weights * lp).sum()
    output = training.forward_backward(data, "cross_entropy").result()
    for ours, theirs in zip(batches.logprobs(output), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    gradients.assert_equal(loss)


@pytest.mark.parametrize(
    ("flags", "adapted"),
    [
        ((True, False, False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ((False, True, False), {"gate_proj", "up_proj", "down_proj"}),
        ((False, False, True), {"lm_head"}),
    ],
)
def test_an_adapter_trains_what_its_flags_say_and_nothing_else(
    cluster: Cluster, service: tinker.ServiceClient, flags: tuple[bool, bool, bool], adapted: set[str]
) -> None:
    attn, mlp, unembed = flags
    client = service.create_lora_training_client(
        BASE_MODEL, rank=3, seed=5, train_attn=attn, train_mlp=mlp, train_unembed=unembed
    ).result()
    gradients = Gradients(cluster, client)
    stored = load_file(cluster.snapshot(client.model_id) / "adapter_model.safetensors")
    assert {key.split(".")[-3] for key in stored} == adapted
    assert all(3 in tensor.shape for tensor in stored.values())
    datum = batches.cross_entropy(4, 21)
    client.forward_backward([datum], "cross_entropy").result()
    lp = gradients.reference.logprobs(batches.inputs(datum), batches.targets(datum))
    gradients.assert_equal(-lp.sum())
