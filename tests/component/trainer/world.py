"""A real trainer world, its Redis and a gRPC client of it, for tests."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import redis

from services.common.state import keys
from services.common.state.registry import ServiceRecord
from services.launcher.tiny_model import make_tiny_model
from services.trainer.world.launch import launch_command
from tests.announced import find
from tinsmith.internal.v1 import operation_pb2, trainer_pb2, trainer_pb2_grpc
from tinsmith.v1 import models_pb2, results_pb2, training_pb2, types_pb2

BASE_MODEL = "tinsmith/tiny"
VOCAB = 320
EPOCH = 1
_session = itertools.count()
_trainer = itertools.count()


def make_model(directory: Path) -> Path:
    """A base model small enough for a world of two ranks; its context is 128 tokens."""
    return make_tiny_model(directory, vocab=VOCAB, hidden=32, layers=2, intermediate=64, context=128)


def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for a scope of tests: `model_dir = pytest.fixture(made_model, scope=..., name="model_dir")`."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Datum:
    """Tokens with a weight of 1 on every next token."""

    tokens: list[int]

    def to_pb(self) -> training_pb2.Datum:
        read, targets = self.tokens[:-1], self.tokens[1:]
        return training_pb2.Datum(
            tokens=_tensor(np.array(read, "<i4"), types_pb2.DATA_TYPE_INT32),
            loss_inputs={
                "target_tokens": _tensor(np.array(targets, "<i8"), types_pb2.DATA_TYPE_INT64),
                "weights": _tensor(np.ones(len(targets), "<f4"), types_pb2.DATA_TYPE_FLOAT32),
            },
        )


def _tensor(values: np.ndarray, dtype: types_pb2.DataType.ValueType) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=dtype, shape=values.shape, data=values.tobytes())


def batch(seed: int, rows: int = 6, longest: int = 24) -> list[Datum]:
    """Random datums of different lengths."""
    random = np.random.default_rng(seed)
    return [Datum(random.integers(0, VOCAB, int(random.integers(4, longest))).tolist()) for _ in range(rows)]


def logprobs(result: results_pb2.OperationResult) -> list[np.ndarray]:
    """Per datum."""
    field = result.forward_backward.outputs["logprobs"]
    values = np.frombuffer(field.data, "<f4")
    return [values[a // 4 : b // 4] for a, b in itertools.pairwise(field.offsets)]


def status_of(call: Future[results_pb2.OperationResult]) -> grpc.StatusCode:
    """The status that a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return caught.value.code()


class TrainedModel:
    """Numbers and sends the operations of one model.

    Attributes:
        micro_batch_tokens: that its operations are journaled with, as gateways do.
    """

    def __init__(self, world: TrainerWorld) -> None:
        self.world = world
        self.micro_batch_tokens = world.record.micro_batch_tokens
        self.model_id = f"s{next(_session)}-{os.getpid()}:train:0"
        self.next_seq = 0
        self.sent: list[operation_pb2.Operation] = []
        world.redis.set(keys.epoch(self.model_id), EPOCH)

    def operation(self, **kind: Any) -> operation_pb2.Operation:
        """The model's next operation, not sent."""
        if "forward_backward" in kind:
            kind.setdefault("micro_batch_tokens", self.micro_batch_tokens)
        made = operation_pb2.Operation(model_id=self.model_id, seq_id=self.next_seq, **kind)
        self.next_seq += 1
        self.sent.append(made)
        return made

    def run(self, **kind: Any) -> results_pb2.OperationResult:
        return self.world.send(self.operation(**kind)).result()

    def create(self, rank: int = 4, seed: int = 7) -> results_pb2.OperationResult:
        return self.run(create_model=create(rank, seed))

    def forward_backward(self, data: Sequence[Datum], **options: Any) -> results_pb2.OperationResult:
        return self.run(forward_backward=forward_backward(data, **options))

    def step(self, learning_rate: float = 1e-2) -> results_pb2.OperationResult:
        return self.run(optim_step=step(learning_rate))

    def forward(self, data: Sequence[Datum]) -> list[np.ndarray]:
        return logprobs(self.forward_backward(data, forward_only=True))


def create(rank: int = 4, seed: int = 7) -> operation_pb2.CreateModel:
    lora = models_pb2.LoraConfig(rank=rank, seed=seed, train_attn=True, train_mlp=True, train_unembed=True)
    return operation_pb2.CreateModel(base_model=BASE_MODEL, lora=lora)


def forward_backward(data: Sequence[Datum], **options: Any) -> training_pb2.ForwardBackward:
    return training_pb2.ForwardBackward(
        data=[datum.to_pb() for datum in data], loss_fn="cross_entropy", **options
    )


def step(learning_rate: float = 1e-2) -> operation_pb2.OptimStep:
    adam = training_pb2.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-12)
    return operation_pb2.OptimStep(adam=adam)


class TrainerWorld:
    """A world on this machine: of one process, or of an agent and its ranks.

    Args:
        name: of its trainer; empty: one of its own.
    """

    def __init__(
        self,
        redis_url: str,
        model_dir: Path,
        data_dir: Path,
        ranks: int,
        zero_stage: int,
        *flags: str,
        name: str = "",
    ) -> None:
        self.redis = redis.Redis.from_url(redis_url)
        self.data_dir = data_dir
        self.ranks = ranks
        name = name or f"trainer-{next(_trainer)}"
        self.name = name
        args = ["--model", f"{BASE_MODEL}={model_dir}", "--device", "cpu", "--data-dir", str(data_dir)]
        args += ["--id", name, "--zero-stage", str(zero_stage), *flags]
        environment = {**os.environ, "TINSMITH_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}
        self.process = self._start(args, environment)
        self.record = self._wait_until_announced(420)
        self.channel = grpc.insecure_channel(self.record.address)
        self.stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    def _start(self, args: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(launch_command(self.ranks, args), env=environment)

    def _wait_until_announced(self, seconds: float) -> ServiceRecord:
        deadline = time.monotonic() + seconds
        while (record := find(self.redis, "trainer", self.name)) is None:
            assert self.process.poll() is None, f"the world exited with {self.process.returncode}"
            assert time.monotonic() < deadline, "the world did not become ready"
            time.sleep(0.1)
        return record

    def send(
        self, operation: operation_pb2.Operation, after: int | None = None, epoch: int = EPOCH
    ) -> Future[results_pb2.OperationResult]:
        """Sends an operation; by default it follows the seq_id before its own."""
        call = self.stub.Execute.future(
            trainer_pb2.ExecuteRequest(
                operation=operation,
                epoch=epoch,
                after_seq_id=operation.seq_id - 1 if after is None else after,
            ),
            timeout=300,
        )
        result: Future[results_pb2.OperationResult] = Future()

        def done(finished: Any) -> None:
            error = finished.exception()
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(finished.result().result)

        call.add_done_callback(done)
        return result

    def status(self, model_id: str) -> trainer_pb2.ResidentModel | None:
        models = self.stub.GetTrainerStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=60).models
        return next((model for model in models if model.model_id == model_id), None)

    def restore(self, model_id: str, epoch: int = EPOCH, moved: int = 0) -> int:
        request = trainer_pb2.RestoreRequest(model_id=model_id, epoch=epoch, moved_epoch=moved)
        return int(self.stub.Restore(request, timeout=240).seq_id)

    def wait_durable(self, model_id: str, seq_id: int) -> None:
        deadline = time.monotonic() + 240
        while (found := self.status(model_id)) is None or found.durable_seq_id < seq_id:
            assert time.monotonic() < deadline, f"{model_id} did not become durable at {seq_id}: {found}"
            time.sleep(0.02)

    def rank_pid(self, rank: int) -> int:
        return int((self.data_dir / "run" / f"trainer-{rank}.pid").read_text())

    def processes(self) -> list[psutil.Process]:
        """The agent of several ranks, and all ranks."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        """Ends everything at once."""
        processes = self.processes() if self.process.poll() is None else []
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(60)
