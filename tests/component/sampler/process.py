"""A real sampler process with its own Redis, and adapters to sample from."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from safetensors.torch import load_file, save_file

from services.common import weights
from services.common.contract.tensors import TensorSpec
from services.common.process import rpc
from services.common.storage.data_dir import DataDir
from services.launcher.machine import free_port
from services.launcher.tiny_model import make_tiny_model
from tests.component.own_redis import redis_server
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.v1 import models_pb2, sampling_pb2, types_pb2

MODEL_ID = "session:train:0"
BASE_MODEL = "tinsmith/tiny"
NEVER = sampling_pb2.StopCondition(never={})
VOCAB, HIDDEN, LAYERS, CONTEXT, INTERMEDIATE = 512, 64, 2, 512, 128
ATTN = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, 32),
    "v_proj": (HIDDEN, 32),
    "o_proj": (HIDDEN, HIDDEN),
}
MLP = {
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}


RUNNER = os.environ.get("TINSMITH_MODEL_RUNNER", "")
"""The model runner of vLLM that all samplers here have, when one is named (`make test-runner`)."""

PATIENCE = 1200 if RUNNER == "v2" else 120
"""Seconds for a sample. An interpreter of kernels takes its time."""

_seq_ids = itertools.count(1)


def make_model(directory: Path, *, tied: bool, vocab: int = VOCAB) -> Path:
    """A tiny Qwen3 whose head size (32) vLLM's CPU attention can do."""
    return make_tiny_model(
        directory,
        vocab=vocab,
        hidden=HIDDEN,
        heads=2,
        kv_heads=1,
        layers=LAYERS,
        intermediate=INTERMEDIATE,
        context=CONTEXT,
        tie_embeddings=tied,
    )


def make_adapter(
    seed: int,
    rank: int,
    *,
    attn: bool = True,
    mlp: bool = True,
    unembed: bool = True,
    vocab: int = VOCAB,
) -> dict[str, torch.Tensor]:
    """Random matrices "<module>.lora_A" and "<module>.lora_B", large enough to change every answer."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in ATTN.items() if attn}
        shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in MLP.items() if mlp}
    if unembed:
        shapes["lm_head"] = (HIDDEN, vocab)
    tensors = {}
    for module, (inputs, outputs) in shapes.items():
        tensors[f"{module}.lora_A"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"{module}.lora_B"] = torch.randn(outputs, rank, generator=generator) * 0.1 * rank**0.5
    return tensors


def write_snapshot(directory: Path, tensors: dict[str, torch.Tensor], rank: int) -> Path:
    """The adapter in PEFT format, as the trainer stores it."""
    directory.mkdir(parents=True)
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    modules = sorted({name.rsplit(".", 2)[-2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "target_modules": modules,
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def make_full(model_dir: Path, seed: int) -> dict[str, torch.Tensor]:
    """All weights of the model, each a little off, so that every answer is another one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model_dir / "model.safetensors").items()
    }


def write_full(directory: Path, model_dir: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The full model as the trainer stores it: a Hugging Face directory."""
    directory.mkdir(parents=True)
    shutil.copy(model_dir / "config.json", directory)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def int32(tokens: Sequence[int]) -> types_pb2.Tensor:
    data = struct.pack(f"<{len(tokens)}i", *tokens)
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(tokens)], data=data)


def ints(tensor: types_pb2.Tensor) -> list[int]:
    return list(struct.unpack(f"<{len(tensor.data) // 4}i", tensor.data))


def floats(tensor: types_pb2.Tensor) -> torch.Tensor:
    return torch.tensor(struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data))


def request(
    tokens: Sequence[int],
    version: int = 0,
    *,
    n: int = 1,
    scores: bool = False,
    topk: int = 0,
    **params: object,
) -> sampler_pb2.SampleRequest:
    """A new SampleRequest, with an id of its own; version 0 is the base model."""
    settings: dict[str, object] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_tokens": 8} | params
    return sampler_pb2.SampleRequest(
        request_id=f"session:sample:0:{next(_seq_ids)}",
        snapshot=sampler_pb2.Snapshot(model_id=MODEL_ID, version=version) if version else None,
        prompt=int32(tokens),
        num_samples=n,
        params=sampling_pb2.SamplingParams(**settings),  # type: ignore[arg-type]
        prompt_logprobs=scores,
        topk_prompt_logprobs=topk,
    )


@dataclass
class Sampler:
    """A running `python -m services.sampler`."""

    process: subprocess.Popen[bytes]
    data_dir: DataDir
    model_dir: Path
    redis_url: str
    address: str
    metrics_port: int
    log: Path

    def family(self) -> list[psutil.Process]:
        """Its child processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stored(self, version: int) -> Path:
        """Where a snapshot of MODEL_ID lies in the store, or would."""
        return self.data_dir.snapshot(MODEL_ID, version)

    def store_adapter(self, version: int, rank: int = 8, **shape: Any) -> Path:
        """Has one lie there as `make_adapter` makes it of its version."""
        return write_snapshot(self.stored(version), make_adapter(version, rank, **shape), rank)

    def store_full(self, version: int) -> Path:
        """The same of a full model."""
        return write_full(self.stored(version), self.model_dir, make_full(self.model_dir, version))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[sampler_pb2_grpc.SamplerServiceStub]:
        """A client of its own."""
        async with rpc.channel(self.address) as channel:
            yield sampler_pb2_grpc.SamplerServiceStub(channel)

    def stop(self) -> int:
        """Ends it with SIGTERM; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(150)


def launch(
    directory: Path,
    model_dir: Path,
    redis_url: str,
    *options: str,
    program: Sequence[str] = ("-m", "services.sampler"),
) -> Sampler:
    """Starts a sampler process without waiting for it. program: what Python is to run."""
    directory.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_port(), free_port()
    log = directory / "sampler.log"
    command = [
        *(sys.executable, *program, "--id", "sampler-0", "--port", str(port)),
        *("--model", f"{BASE_MODEL}={model_dir}", "--data-dir", str(directory / "data")),
        *("--metrics-port", str(metrics_port), *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TINSMITH_REDIS_URL": redis_url},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Sampler(
        process,
        DataDir(directory / "data"),
        model_dir,
        redis_url,
        f"127.0.0.1:{port}",
        metrics_port,
        log,
    )


def wait_ready(sampler: Sampler, timeout: float = 420) -> Sampler:
    """Waits until it answers.

    Raises:
        AssertionError: it ended or did not answer in time; the message holds its log.
    """
    deadline = time.monotonic() + timeout
    # Else gRPC tries ever more rarely, and finds a sampler that serves half a minute later.
    often = [(f"grpc.{which}_reconnect_backoff_ms", 200) for which in ("initial", "min", "max")]
    with grpc.insecure_channel(sampler.address, often) as channel:
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        while time.monotonic() < deadline and sampler.process.poll() is None:
            try:
                stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=20)
            except grpc.RpcError:
                time.sleep(0.2)
            else:
                if RUNNER:
                    assert f"model runner {RUNNER.upper()} computes" in sampler.log.read_text()
                return sampler
    sampler.process.kill()
    raise AssertionError(f"the sampler did not come up:\n{sampler.log.read_text()[-6000:]}")


@contextmanager
def replica(
    directory: Path,
    model_dir: Path,
    *options: str,
    program: Sequence[str] = ("-m", "services.sampler"),
) -> Iterator[Sampler]:
    """A sampler of one worker or of several, with its own Redis, once it answers. It has to end in order."""
    with redis_server(directory) as redis_url:
        started = launch(directory, model_dir, redis_url, *options, program=program)
        try:
            yield wait_ready(started)
        finally:
            assert started.stop() == 0, started.log.read_text()[-3000:]


# A client of the sampler.


async def sample(
    stub: sampler_pb2_grpc.SamplerServiceStub, wanted: sampler_pb2.SampleRequest
) -> sampling_pb2.SampleResult:
    """The answer; as a gateway does, asks again when the sampler takes on no more at the moment."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                response = await stub.Sample(wanted, timeout=PATIENCE)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.05)
            else:
                assert response.WhichOneof("kind") == "result", response.error
                return response.result


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def status(
    stub: sampler_pb2_grpc.SamplerServiceStub,
) -> sampler_pb2.GetSamplerStatusResponse:
    return await stub.GetSamplerStatus(sampler_pb2.GetSamplerStatusRequest(), timeout=60)


async def until_running(stub: sampler_pb2_grpc.SamplerServiceStub, condition: Callable[[int], bool]) -> None:
    """Waits for a number of running requests; there is nothing to subscribe to."""
    async with asyncio.timeout(120):
        while not condition((await status(stub)).running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Weight exchange: the test process is the trainer, rank 0 of the group.


async def join(
    stub: sampler_pb2_grpc.SamplerServiceStub, sampler: Sampler, epoch: int, workers: int = 1
) -> weights.WeightGroup:
    """Both ends join; the trainer's end is returned."""
    with ThreadPoolExecutor(1) as pool:
        mine = asyncio.get_running_loop().run_in_executor(
            pool, weights.join, BASE_MODEL, epoch, 0, 1 + workers, "cpu", sampler.redis_url, 120
        )
        wanted = sampler_pb2.JoinGroupRequest(
            epoch=epoch,
            first_rank=1,
            world_size=1 + workers,
            timeout_seconds=120,
            medium=sampler_pb2.WEIGHT_MEDIUM_GLOO,
        )
        await stub.JoinGroup(wanted, timeout=150)
        return await mine


def incoming(
    epoch: int, version: int, rank: int, buffer: torch.Tensor, specs: list[TensorSpec]
) -> sampler_pb2.ReceiveSnapshotRequest:
    """That a whole adapter is broadcast, packed."""
    return sampler_pb2.ReceiveSnapshotRequest(
        epoch=epoch,
        snapshot=sampler_pb2.Snapshot(model_id=MODEL_ID, version=version),
        lora=models_pb2.LoraConfig(rank=rank, train_attn=True, train_mlp=True, train_unembed=True),
        tensors=[
            sampler_pb2.TensorSpec(name=s.name, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=s.shape)
            for s in specs
        ],
        checksum=weights.checksum(buffer),
        timeout_seconds=120,
    )
