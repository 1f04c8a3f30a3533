"""The yardstick for sampling: vLLM's own `LLM.generate` with its own defaults, in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.child import Child, answer_jobs
from bench.stack import RANK

ADAPTERS = 4


class BareVllm(Child):
    """A child process with an `LLM`."""

    def __init__(self, model_dir: Path, threads: int, kind: str, log: Path) -> None:
        """Starts loading; the first `generate` waits for it.

        Args:
            kind: "plain", "lora", or "eager": plain, and nothing is compiled.
        """
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DISABLE_COMPILE_CACHE": "1",
        }
        if kind == "eager":
            environment["TORCH_COMPILE_DISABLE"] = "1"
        super().__init__("bench.sampling.bare_vllm", [str(model_dir), kind], environment, log)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, adapters: list[Path], group: int = 1
    ) -> float:
        """Seconds that `LLM.generate` takes for `max_tokens` tokens of each answer.

        Args:
            adapters: PEFT directories, one prompt each in turn; none = the base model.
            group: answers to each prompt.

        Raises:
            RuntimeError: the child ended.
        """
        names = [str(adapter) for adapter in adapters]
        job = {"prompts": prompts, "max_tokens": max_tokens, "adapters": names, "group": group}
        return float(self.ask(job))


def _load(model_dir: str, kind: str) -> Callable[[Any], float]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = (
        {"enable_lora": True, "max_lora_rank": RANK, "max_loras": ADAPTERS} if kind == "lora" else {}
    )
    llm = LLM(
        model=model_dir,
        dtype="float32",
        enforce_eager=kind == "eager",
        kv_cache_memory_bytes=1 << 30,
        **options,
    )

    def generate(job: Any) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        params = SamplingParams(
            n=job["group"], max_tokens=job["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
        )
        loaded = [LoRARequest(path, number + 1, path) for number, path in enumerate(job["adapters"])]
        requests = [loaded[n % len(loaded)] for n in range(len(prompts))] if loaded else None
        start = time.perf_counter()
        llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        return time.perf_counter() - start

    return generate


if __name__ == "__main__":
    answer_jobs(lambda: _load(sys.argv[1], sys.argv[2]))
