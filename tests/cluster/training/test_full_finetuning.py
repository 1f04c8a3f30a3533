"""Models that train all their weights, through the SDK: lora_rank 0."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.cluster.training.test_checkpoints import train
from tests.cluster.training.test_training_numbers import ADAM
from tests.reference import Reference

PROBE = [batches.cross_entropy(60, 30)]


def test_a_model_with_all_weights_resumes_and_survives_a_killed_trainer_bit_for_bit(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    client = service.create_lora_training_client(BASE_MODEL, rank=0).result()
    info = client.get_info()
    assert info.is_lora is False and info.lora_rank is None
    start = train(client, range(3))
    path = client.save_state("midway").result().path
    continued = train(client, range(3, 6))
    assert continued[0] < start[0]

    cluster.kill_and_wait("trainer-0")
    probe = batches.logprobs(client.forward(PROBE, "cross_entropy").result())[0]
    # There is room for one such model: this one takes the other's place.
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().is_lora is False
    assert train(resumed, range(3, 6)) == continued
    again = batches.logprobs(resumed.forward(PROBE, "cross_entropy").result())[0]
    assert again.tolist() == probe.tolist()


def test_two_clipped_steps_with_decay_equal_pytorch(cluster: Cluster, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL, rank=0).result()
    reference = Reference(cluster.model_dir).model
    optimizer = torch.optim.AdamW(
        reference.parameters(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    for step in range(2):
        data = [batches.cross_entropy(10 * step + i, n) for i, n in enumerate((5, 33, 12))]
        # In two requests, which accumulate.
        outputs = [client.forward_backward(part, "cross_entropy") for part in (data[:1], data[1:])]
        metrics = client.optim_step(ADAM).result().metrics or {}
        optimizer.zero_grad()
        ours = [lp for output in outputs for lp in batches.logprobs(output.result())]
        for datum, seen in zip(data, ours, strict=True):
            logits = reference(torch.tensor([batches.inputs(datum)])).logits[0].float()
            targets = torch.tensor(batches.targets(datum))[:, None]
            expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
            torch.testing.assert_close(seen, expected.detach(), rtol=0, atol=1e-5)
            (-expected.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), ADAM.grad_clip_norm)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    client.save_weights_for_sampler("trained").result()
    trained = load_file(cluster.snapshot(client.model_id) / "model.safetensors")
    expected_weights = dict(reference.named_parameters())
    assert trained.keys() == expected_weights.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, expected_weights[name].detach(), rtol=1e-4, atol=2e-6)


def test_a_sampler_answers_with_all_the_trained_weights(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL, rank=0).result()
    train(client, range(3))
    tokens = batches.tokens(61, 20)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    learner = batches.logprobs(client.forward([datum], "cross_entropy").result())[0].numpy()
    sampler = client.save_weights_and_get_sampling_client().result()
    seen = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(np.array(seen[1:], float), learner, atol=1e-4)


def test_rank_0_with_a_part_left_out_is_refused(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.APIStatusError, match="rank 0 trains all weights"):
        service.create_lora_training_client(BASE_MODEL, rank=0, train_mlp=False).result()
