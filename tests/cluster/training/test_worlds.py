"""However many ranks train, and however ZeRO shards them, a client gets the same numbers.

The cluster of the other tests has one rank at stage 0; here two ranks train the same models at other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster, start_cluster, stop_cluster

LENGTHS = (5, 33, 12, 40, 7)
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, grad_clip_norm=0.5)


LONG = pytest.mark.long
STAGES = [pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3]


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: f"zero-{stage}")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Cluster]:
    options = ("--trainer-ranks", "2", "--zero-stage", str(request.param), "--samplers", "0")
    running = start_cluster(tmp_path_factory.mktemp("two-ranks"), model_dir, *options)
    yield running
    for client in running.clients:
        client.close("success")
    assert stop_cluster(running) == []


def train(client: tinker.TrainingClient) -> list[Any]:
    """Loss, log-probabilities and gradient norm of each of two steps on data of mixed lengths."""
    seen: list[Any] = []
    for step in range(2):
        data = [batches.cross_entropy(10 * step + i, n) for i, n in enumerate(LENGTHS)]
        # In two requests, which accumulate.
        outputs = [client.forward_backward(part, "cross_entropy") for part in (data[:2], data[2:])]
        metrics = client.optim_step(ADAM).result().metrics or {}
        seen += [output.result().metrics["loss:sum"] for output in outputs] + [metrics["grad_norm"]]
        seen += [lp.tolist() for output in outputs for lp in batches.logprobs(output.result())]
    return seen


def published(
    cluster: Cluster, client: tinker.TrainingClient, file: str = "adapter_model.safetensors"
) -> dict[str, torch.Tensor]:
    client.save_weights_for_sampler("trained").result()
    return load_file(cluster.snapshot(client.model_id) / file)


def test_two_ranks_at_any_zero_stage_train_a_lora_model_as_one_rank_does(
    cluster: Cluster, two_ranks: Cluster
) -> None:
    seen, weights = [], []
    for running in (cluster, two_ranks):
        service = running.service_client()
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
        seen.append(train(client))
        weights.append(published(running, client))
    for ours, theirs in zip(*seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-5)


def test_two_ranks_at_any_zero_stage_train_all_weights_as_one_rank_does(
    cluster: Cluster, two_ranks: Cluster
) -> None:
    seen, weights = [], []
    for running in (cluster, two_ranks):
        client = running.service_client().create_lora_training_client(BASE_MODEL, rank=0).result()
        seen.append(train(client))
        weights.append(published(running, client, "model.safetensors"))
    for ours, theirs in zip(*seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-5)
