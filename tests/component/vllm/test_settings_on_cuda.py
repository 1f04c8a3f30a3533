"""What vLLM would make of a sampler's settings on a GPU, asked of its own code for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.sampler.engine.test_settings import config_of

ASKED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "float32": {"dtype": "float32", "max_loras": 0},
    "fp8 keys": {"kv_cache_dtype": "fp8"},
    "drafts": {"speculative_ngram_tokens": 4},
    "drafts on v2": {"speculative_ngram_tokens": 4, "model_runner": "v2"},
    "v1": {"model_runner": "v1"},
    "float32 head": {"head_dtype": "float32", "max_context": 256},
}


def asked(model: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM makes of each of these settings, on a GPU."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.component.vllm.on_cuda", str(model), json.dumps(settings)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    made: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return made


def test_vllm_takes_a_samplers_settings_on_a_gpu_and_makes_of_them_what_is_written(tmp_path: Path) -> None:
    config_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"])
    made = dict(zip(ASKED, asked(tmp_path, list(ASKED.values())), strict=True))
    usual = {
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        # A sampler of one GPU computes in the process of the engine's core.
        "executor": "uni",
        # Each of its workers samples all rows.
        "sharded": False,
        "sequences": 1024,
        "tokens": 8192,
        # With graphs of whole steps, too: their weights and slots have to stay where they are.
        "graphs": "FULL_AND_PIECEWISE",
        "v2": True,
        "asynchronous": True,
        "dtype": "torch.bfloat16",
        "keys": "auto",
        "adapters": 8,
        "experts": False,
        "fits": True,
    }
    assert made == {
        "as it is": usual,
        "float32": usual | {"dtype": "torch.float32", "adapters": 0},
        "fp8 keys": usual | {"keys": "fp8"},
        "drafts": usual | {"v2": False, "asynchronous": False},
        "drafts on v2": usual | {"asynchronous": False},
        "v1": usual | {"v2": False},
        "float32 head": usual | {"fits": False},
    }


def test_on_a_gpu_vllm_notes_experts_beside_adapters_drafts_and_other_workers_with_graphs_of_whole_steps(
    tmp_path: Path,
) -> None:
    config_of(tmp_path, "qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    usual, *telling = asked(
        tmp_path,
        [
            {},
            {"routed_experts": True},
            {"routed_experts": True, "speculative_ngram_tokens": 4},
            {"routed_experts": True, "tensor_parallel_size": 2},
        ],
    )
    assert (usual["v2"], usual["graphs"], usual["adapters"]) == (True, "FULL_AND_PIECEWISE", 8)
    alone, drafting, shared = telling
    assert alone == usual | {"experts": True}
    assert drafting == usual | {"experts": True, "asynchronous": False}
    assert shared == usual | {"experts": True, "executor": "mp"}
