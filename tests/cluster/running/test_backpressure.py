"""A client that sends faster than it is served is slowed down, and nothing else happens to it."""

from __future__ import annotations

import time

import tinker
import torch
from tinker import types

from services.common.process.faults import armed
from services.common.state import keys, redis_client
from tests.cluster import batches
from tests.cluster.conftest import PENDING_BYTES, Cluster

REQUESTS = 6
TARGETS = 16


def large_datum(seed: int) -> types.Datum:
    """About 80 kB: many targets at each position."""
    tokens = batches.tokens(seed, 400)
    targets = torch.tensor(tokens).unsqueeze(1).expand(-1, TARGETS).contiguous()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(targets),
            "weights": types.TensorData.from_torch(torch.full(targets.shape, 0.01)),
        },
    )


def test_a_journal_never_holds_more_than_its_bound_and_all_requests_are_done(
    cluster: Cluster, training: tinker.TrainingClient
) -> None:
    armed.arm(cluster.failpoints, "trainer.before_pass", "delay:4")
    data = [large_datum(seed) for seed in range(5)]
    futures = [training.forward_backward(data, "cross_entropy") for _ in range(REQUESTS)]
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    seen: set[int] = set()
    url = (cluster.data_dir / "run" / "redis_url").read_text()
    with redis_client.connect_sync(url) as client:
        deadline = time.monotonic() + 300
        while not step.future().done():
            found = client.hget(keys.journal_meta(training.model_id), "pending_bytes")
            seen.add(int(found or 0))
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [len(future.result().loss_fn_outputs) for future in futures] == [5] * REQUESTS
    assert step.result().metrics is not None
    assert PENDING_BYTES / 2 < max(seen) <= PENDING_BYTES
