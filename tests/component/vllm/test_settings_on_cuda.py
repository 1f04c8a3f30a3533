"""What vLLM would make of a sampler's settings on a GPU, asked of its own code for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.sampler.engine.test_settings import config_of

ASKED = {
    "as it is": {},
    "float32": {"dtype": "float32", "max_loras": 0},
    "fp8 keys": {"kv_cache_dtype": "fp8"},
    "drafts": {"speculative_ngram_tokens": 4},
    "drafts on v2": {"speculative_ngram_tokens": 4, "model_runner": "v2"},
    "v1": {"model_runner": "v1"},
    "float32 head": {"head_dtype": "float32", "max_context": 256},
}


def test_vllm_takes_a_samplers_settings_on_a_gpu_and_makes_of_them_what_is_written(tmp_path: Path) -> None:
    config_of(tmp_path, "qwen3", architectures=["Qwen3ForCausalLM"])
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.component.vllm.on_cuda",
            str(tmp_path),
            json.dumps(list(ASKED.values())),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    made = dict(zip(ASKED, json.loads(ran.stdout.splitlines()[-1]), strict=True))
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
