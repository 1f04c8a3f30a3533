"""A tenant in a process of its own that trains over and over, from its first job until stdin ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker

from bench.child import answer_jobs
from bench.stack import BASE_MODEL, RANK, next_token_datum, random_tokens, train

ROWS, TOKENS = 32, 128


def load() -> Callable[[Any], Any]:
    """Connects, and makes a model; a job starts the training and is answered when one step is done."""
    base_url, api_key, vocab = sys.argv[1:4]
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    model = service.create_lora_training_client(BASE_MODEL, rank=RANK).result()
    rng = np.random.default_rng(os.getpid())
    data = [next_token_datum(row) for row in random_tokens(rng, int(vocab), ROWS, TOKENS + 1)]

    def keep_training() -> None:
        while True:
            train(model, data, 1e-4)

    def begin(_: Any) -> str:
        train(model, data, 1e-4)
        threading.Thread(target=keep_training, daemon=True).start()
        return "trains"

    return begin


if __name__ == "__main__":
    answer_jobs(load)
