"""How `tinsmith up` begins and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tinker import types

from tests.cluster import batches
from tests.cluster.conftest import (
    BASE_MODEL,
    Cluster,
    launch_cluster,
    serves,
    start_cluster,
    stop_cluster,
    until,
)


@contextmanager
def halted_in_the_beginning(cluster: Cluster, *names: str) -> Iterator[None]:
    """Processes that have begun to load, and get no further until the end."""
    pid_files = [cluster.data_dir / "run" / f"{name}.pid" for name in names]
    until(cluster, lambda: all(file.exists() and file.read_text().strip() for file in pid_files), 300)
    halted = [psutil.Process(cluster.pid(name)) for name in names]
    for process in halted:
        process.suspend()
    try:
        yield
    finally:
        for process in halted:
            process.resume()


def test_clients_that_start_while_everything_still_loads_for_the_first_time_work_in_the_end(
    tmp_path: Path, model_dir: Path
) -> None:
    cluster = launch_cluster(tmp_path, model_dir)
    try:
        with halted_in_the_beginning(cluster, "trainer-0", "sampler-0"):
            until(cluster, lambda: serves(cluster), 300)
            assert cluster.ready() <= {"gateway-0"}, "nothing but the gateway is there"
            (model,) = cluster.rest_client().get_server_capabilities().result().supported_models
            assert (model.model_name, model.trainable, model.sampleable) == (BASE_MODEL, True, True)
            training = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=4, seed=2)
            sampling = cluster.service_client().create_sampling_client(base_model=BASE_MODEL).result()
            prompt = types.ModelInput.from_ints(batches.tokens(0, 10))
            sample = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=4, temperature=0.0, stop=[]))
            assert not training.future().done() and not sample.future().done()
        client = training.result()
        assert client.get_info().model_data.model_name == BASE_MODEL
        client.forward_backward([batches.cross_entropy(0, 20)], "cross_entropy").result()
        assert len(sample.result().sequences[0].tokens) == 4
    finally:
        left = stop_cluster(cluster)
    assert left == []


@pytest.mark.parametrize(
    "signal_number",
    [
        pytest.param(signal.SIGHUP, id="terminal closed", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_when_up_ends_state_survives_and_no_process_is_left(
    tmp_path: Path, model_dir: Path, signal_number: signal.Signals
) -> None:
    cluster = start_cluster(tmp_path, model_dir)
    client = cluster.service_client().create_lora_training_client(BASE_MODEL, rank=4, seed=2).result()
    client.forward_backward([batches.cross_entropy(0, 20)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("kept").result().path
    probe = [batches.cross_entropy(9, 20)]
    before = client.forward(probe, "cross_entropy").result().metrics["loss:sum"]
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(family) >= 4
    os.kill(cluster.process.pid, signal_number)
    cluster.process.wait(180)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []
    again = start_cluster(tmp_path, model_dir)
    try:
        service = again.service_client()
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward(probe, "cross_entropy").result().metrics["loss:sum"] == before
    finally:
        assert stop_cluster(again) == []
