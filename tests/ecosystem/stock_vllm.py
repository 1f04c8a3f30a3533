"""Writes log-probabilities of a prompt's tokens after the first, by stock vLLM with an adapter, as JSON.

python -m tests.ecosystem.stock_vllm MODEL_DIR ADAPTER_DIR '[token ids]' FILE

To a file, because vLLM's engine logs to standard output until its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, adapter: str, prompt: list[int], to: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=512,
        enable_lora=True,
        max_lora_rank=8,
        distributed_executor_backend="uni",
    )
    (answer,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        lora_request=LoRARequest("adapter", 1, adapter),
        use_tqdm=False,
    )
    scores = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    to.write_text(json.dumps([found[token].logprob for token, found in scores]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
