"""A downloaded adapter is an ordinary PEFT adapter to vLLM as it is.

That PEFT computes with one what the trainer does is asserted in tests/cluster/training/test_exports.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tinker import types
from tinker_cookbook import weights

from tests.ecosystem.recipes import POLICY, Kitchen

# The first test of a session waits for the cluster.
pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.heavy
def test_stock_vllm_computes_with_a_downloaded_adapter_what_samplers_do(
    kitchen: Kitchen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = kitchen.cluster
    service = cluster.service_client()
    training = service.create_lora_training_client(POLICY, rank=8, seed=3).result()
    tokens = torch.randint(0, 600, [33], generator=torch.Generator().manual_seed(5)).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 32},
    )
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    prompt = types.ModelInput.from_ints(tokens)
    sampler = training.save_weights_and_get_sampling_client().result()
    expected = torch.tensor(sampler.compute_logprobs(prompt).result()[1:])
    plain = service.create_sampling_client(base_model=POLICY).result()
    base = torch.tensor(plain.compute_logprobs(prompt).result()[1:])
    assert (expected - base).abs().max() > 0.1

    path = training.save_state("given").result().path
    monkeypatch.setenv("TINKER_API_KEY", cluster.api_key)
    weights.download(tinker_path=path, output_dir=str(tmp_path / "adapter"), base_url=cluster.base_url)
    found = by_vllm(cluster.model_dir, tmp_path / "adapter", tokens, tmp_path / "found.json")
    assert found == pytest.approx(expected.tolist(), abs=1e-3)


def by_vllm(model: Path, adapter: Path, prompt: list[int], to: Path) -> list[float]:
    """What tests.ecosystem.stock_vllm finds, in a process of its own."""
    environment = {
        **os.environ,
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.ecosystem.stock_vllm"]
    command += [str(model), str(adapter), json.dumps(prompt), str(to)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return list(json.loads(to.read_text()))
