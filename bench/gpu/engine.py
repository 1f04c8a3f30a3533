"""Our side: the trainer's engine in this process, as a world of one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from bench.gpu import device as devices
from bench.gpu.shapes import RANK, Shape, fill, lengths, write_without_weights
from services.common.contract.errors import TinsmithError
from services.common.contract.tensors import from_values
from services.trainer.compute.data import AdamSpec, LoraSpec, MicroBatch, Pass, PassOp, Row
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.failures import free_cache


def alone(device: str) -> None:
    """Makes this process a world of one rank, unless it is one."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)


def start(
    directory: Path, device: str, dtype: str, *, checkpointing: bool = True, offload: bool = False
) -> Engine:
    """An engine of this process. `offload`: full models step on the host."""
    alone(device)
    return Engine(
        model_path=str(directory),
        device=device,
        dtype=dtype,
        zero_stage=0,
        offload_optimizer=offload,
        activation_checkpointing=checkpointing,
    )


def row(op: int, index: int, tokens: np.ndarray) -> Row:
    """A datum of `cross_entropy`: each token is the target of the one before it, the first of the last."""
    inputs = {
        "target_tokens": from_values(np.roll(tokens, -1).astype("<i8")),
        "weights": from_values(np.ones(len(tokens), "<f4")),
    }
    return Row(op, index, tokens.astype("<i4").tobytes(), inputs)


def one_micro_batch(models: Sequence[str], sequences: Sequence[np.ndarray], seq_id: int = 1) -> Pass:
    """One operation of each model, whose sequences are dealt in turn; all in one flat batch."""
    ops = [PassOp(model_id, seq_id, "cross_entropy") for model_id in models]
    rows = [
        row(number % len(models), number // len(models), tokens) for number, tokens in enumerate(sequences)
    ]
    return Pass(ops, [MicroBatch(rows)])


_NO_ROOM = 1
"""Bytes in which no block keeps anything."""


class OurSide:
    """An engine with a random base model in bfloat16, whose blocks are checkpointed."""

    def __init__(self, shape: Shape, device: str, scratch: Path) -> None:
        directory = write_without_weights(shape, "bfloat16", scratch / "model")
        self._engine = start(directory, device, "bfloat16")
        fill(self._engine._base._scorer)
        self._shape, self._device = shape, device
        self._models: list[str] = []

    def train(self, tokens: int, adapters: int, limit_s: float) -> dict[str, object]:
        """Times passes over one flat batch with a gradient, without optimizer steps.

        All passes are parts of one operation of each model: so each has one gradient, however many passes
        there are.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        self._have(adapters)
        rng = np.random.default_rng(adapters)
        sequences = [rng.integers(0, self._shape.vocab, length) for length in lengths(tokens, adapters)]
        work = one_micro_batch(self._models, sequences)
        before = devices.out_of_memory_events(self._device)
        found, failed = self._measured(work, limit_s)
        if failed:
            self._forget()
            return {"failed": failed}
        split = devices.out_of_memory_events(self._device) - before
        took = {"seconds": found.seconds, "peak_bytes": found.peak_bytes, "out_of_memory_and_split": split}
        return took | self._with_kept_blocks(work, limit_s / 3)

    def _with_kept_blocks(self, work: Pass, limit_s: float) -> dict[str, object]:
        """The same passes where blocks keep their activations as far as there is room, as a trainer has it by
        itself; PEFT has all of them computed again, so it is not compared."""
        self._engine.keep_blocks(0)
        try:
            found, failed = self._measured(work, limit_s)
        finally:
            self._engine.keep_blocks(_NO_ROOM)
            # The other side is on this device too.
            free_cache()
        return {} if failed else {"kept_seconds": found.seconds, "kept_peak_bytes": found.peak_bytes}

    def step(self, adapters: int) -> dict[str, object]:
        """Times an optimizer step of all adapters after one that made their moments, each with a gradient.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        self._have(adapters)
        due = [(model_id, AdamSpec(1e-4)) for model_id in self._models]
        sequences = [np.arange(16) % self._shape.vocab] * adapters
        seconds = 0.0
        for seq_id in (2, 3):
            self._engine.run_pass(one_micro_batch(self._models, sequences, seq_id))
            devices.synchronize(self._device)
            start = time.perf_counter()
            answers = self._engine.optim_steps(due)
            devices.synchronize(self._device)
            seconds = time.perf_counter() - start
            for answer in answers:
                if isinstance(answer, TinsmithError):
                    raise answer
        self._forget()
        return {"seconds": [seconds]}

    def prefix(
        self, prompts: int, prompt: int, answers: int, answer: int, limit_s: float
    ) -> dict[str, object]:
        """Times passes over answers to prompts, with what they share computed once and for each anew.

        Args:
            prompts: how many, each of `prompt` tokens, with so many `answers` of `answer` tokens.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        if not self._engine.shares_prefixes:
            return {"left_out": "this device computes every sequence by itself"}
        self._have(1)
        rng, sequences = np.random.default_rng(0), []
        for _ in range(prompts):
            begin = rng.integers(0, self._shape.vocab, prompt)
            sequences += [
                np.concatenate([begin, rng.integers(0, self._shape.vocab, answer)]) for _ in range(answers)
            ]
        work = one_micro_batch(self._models, sequences)
        seconds: dict[str, object] = {}
        try:
            for name, shares in (("apart", False), ("shared", True)):
                self._engine._rounds.shares_prefixes = shares
                found, failed = self._measured(work, limit_s)
                if failed:
                    self._forget()
                    return {"failed": failed}
                seconds[name] = min(found.seconds)
        finally:
            self._engine._rounds.shares_prefixes = True
        return seconds

    def _measured(self, work: Pass, limit_s: float) -> tuple[devices.Measured, str]:
        """What passes take, and why one failed."""
        failures: list[str] = []

        def step() -> None:
            results = self._engine.run_pass(work)
            failures.extend(result.failure.message for result in results if result.failure is not None)

        return devices.measure(step, self._device, limit_s), next(iter(failures), "")

    def _have(self, adapters: int) -> None:
        """So many models are there; after a failure, or of another number before, all are made afresh."""
        if len(self._models) == adapters:
            return
        self._forget()
        for number in range(adapters):
            model_id = f"adapter-{number}"
            self._engine.create_model(model_id, LoraSpec(RANK, number))
            self._models.append(model_id)

    def _forget(self) -> None:
        for model_id in self._models:
            self._engine.drop_model(model_id)
        self._models.clear()
