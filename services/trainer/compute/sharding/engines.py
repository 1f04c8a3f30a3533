"""What every DeepSpeed engine is told. Pure.

Invariant: an engine neither counts micro-batches nor measures time: who calls it does.
"""

from __future__ import annotations

from typing import Any

EVERY_ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    # To measure, the host would wait for all of the device before each forward pass.
    "timers": {"throughput": {"enabled": False}},
}
