"""The yardstick for sampling: vLLM's own `LLM.generate`, in a process of its own.

Run as a program it answers lines of JSON on stdin with lines of JSON on stdout, until stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .stack import RANK


class BareVllm:
    """A child process with an `LLM`; a context manager."""

    def __init__(self, model_dir: Path, threads: int, lora: bool, log: Path) -> None:
        """Starts loading; the first `generate` waits for it."""
        environment = dict(os.environ) | {
            "OMP_NUM_THREADS": str(threads),
            # As the sampler has them, so that only the stack around the engine differs.
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "bench.bare_vllm", str(model_dir), "lora" if lora else "plain"]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        self._log = log

    def generate(self, prompts: list[list[int]], max_tokens: int, adapter: Path | None = None) -> float:
        """Seconds that `LLM.generate` takes for `max_tokens` tokens from each prompt.

        Raises:
            RuntimeError: the child ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"prompts": prompts, "max_tokens": max_tokens, "adapter": adapter and str(adapter)}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"bare vLLM ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return float(json.loads(answer)["seconds"])

    def __enter__(self) -> BareVllm:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(model_dir: str, lora: bool) -> None:
    # What vLLM prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK} if lora else {}
    llm = LLM(
        model=model_dir,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=2048,
        distributed_executor_backend="uni",
        **options,
    )
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        params = SamplingParams(max_tokens=job["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False)
        request = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
        start = time.perf_counter()
        llm.generate(prompts, params, lora_request=request, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2] == "lora")
