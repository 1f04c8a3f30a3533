"""A client in a process of its own: each job is a number of one-token samples, all asked for at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker

from bench.child import answer_jobs
from bench.sampling.throughput import sample
from bench.stack import BASE_MODEL, random_tokens

PROMPT_TOKENS = 16


def load() -> Callable[[Any], float]:
    """Connects; a job is answered with its seconds."""
    base_url, api_key, vocab = sys.argv[1:4]
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    client = service.create_sampling_client(base_model=BASE_MODEL)
    rng = np.random.default_rng()

    def run(job: Any) -> float:
        prompts = random_tokens(rng, int(vocab), job["samples"], PROMPT_TOKENS)
        start = time.perf_counter()
        sample([client], prompts, 1)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    answer_jobs(load)
