"""The yardstick for what surrounds the trainer's engine: that engine alone, in a process of its own.

No gateway, journal, scheduler, snapshot or RPC; the same units of work as the trainer makes of a request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.child import Child, answer_jobs
from bench.stack import RANK, SEED

MICRO_BATCH_TOKENS = 8192
"""The trainer's default."""


class BareEngine(Child):
    """A child process with an `Engine` and models."""

    def __init__(self, model_dir: Path, threads: int, log: Path) -> None:
        """Starts loading; the first call waits for it."""
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_RANK": "0",
        }
        super().__init__("bench.training.bare_engine", [str(model_dir)], environment, log)

    def train(self, batch: list[list[int]], learning_rate: float, *, shared: bool = True) -> float:
        """Seconds of one pass over the batch with its gradient, and one optimizer step.

        Args:
            shared: what sequences begin with alike is computed once.
        """
        return self._seconds([batch], learning_rate, shared)

    def train_together(self, batches: list[list[list[int]]], learning_rate: float) -> float:
        """Seconds of one pass over the small batches of different models, and the optimizer steps of all."""
        return self._seconds(batches, learning_rate, True)

    def forward(self, batch: list[list[int]]) -> float:
        """Seconds of one pass over the batch without a gradient."""
        return self._seconds([batch], None, True)

    def _seconds(self, batches: list[list[list[int]]], learning_rate: float | None, shared: bool) -> float:
        return float(self.ask({"batches": batches, "learning_rate": learning_rate, "shared": shared}))


def _load(model_dir: str) -> Callable[[Any], float]:
    import torch.distributed as dist

    from services.trainer.compute.data import AdamSpec, LoraSpec, PassOp
    from services.trainer.compute.engine import Engine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(model_path=model_dir, device="cpu", dtype="float32", zero_stage=0)
    seq_id, models, shares = 0, 0, engine.shares_prefixes

    def run(job: Any) -> float:
        nonlocal seq_id, models
        seq_id += 1
        learning_rate = job["learning_rate"]
        engine._rounds.shares_prefixes = shares and job["shared"]
        passes = []
        for number, batch in enumerate(job["batches"]):
            if number == models:
                engine.create_model(f"m{number}", LoraSpec(RANK, SEED))
                models += 1
            op = PassOp(f"m{number}", seq_id, "cross_entropy", forward_only=learning_rate is None)
            passes.append(_pass(op, batch, shared=engine.shares_prefixes))
        work = passes[0] if len(passes) == 1 else _together(passes)
        start = time.perf_counter()
        engine.run_pass(work)
        if learning_rate is not None:
            engine.optim_steps([(op.model_id, AdamSpec(learning_rate)) for op in work.ops])
        return time.perf_counter() - start

    return run


def _pass(op: Any, batch: list[list[int]], *, shared: bool = True) -> Any:
    from services.common.contract.tensors import HostTensor
    from services.trainer.compute.data import MicroBatch, Pass, Row
    from services.trainer.order.microbatch import split_operation

    rows = []
    for index, sequence in enumerate(batch):
        count = len(sequence) - 1
        targets = np.array(sequence[1:], "<i8").tobytes()
        inputs = {
            "target_tokens": HostTensor("int64", (count,), targets),
            "weights": HostTensor("float32", (count,), np.ones(count, "<f4").tobytes()),
        }
        rows.append(Row(0, index, np.array(sequence[:-1], "<i4").tobytes(), inputs))
    units = split_operation([row.tokens for row in rows], MICRO_BATCH_TOKENS, shared=shared)
    return Pass([op], [MicroBatch([rows[index] for index in unit.datums]) for unit in units])


def _together(passes: Sequence[Any]) -> Any:
    """One pass, of one micro-batch, with the work of small ones."""
    from services.trainer.compute.data import MicroBatch, Pass

    ops = [op for each in passes for op in each.ops]
    rows = [
        msgspec.structs.replace(row, op=number)
        for number, each in enumerate(passes)
        for batch in each.micro_batches
        for row in batch.rows
    ]
    return Pass(ops, [MicroBatch(rows)])


if __name__ == "__main__":
    answer_jobs(lambda: _load(sys.argv[1]))
