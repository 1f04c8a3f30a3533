"""What is counted for a request is what it takes, whatever its form."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from services.common.process import rpc
from services.gateway.access.body_budget import COPIES
from services.gateway.access.limits import MIB
from tests.unit.gateway.edge.peak_memory import CONTEXT
from tests.unit.gateway.edges import ALICE, BASE, new_session
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import service_pb2_grpc, training_pb2, types_pb2

SIZE = 20 * MIB
TOKENS = 1 << 16
PROTO = {"content-type": "application/x-protobuf"}


def datums() -> int:
    """How many of TOKENS tokens make SIZE bytes: 4 of input, 8 of target, 4 of weight each."""
    return SIZE // (16 * TOKENS)


def of_the_sdk(model_id: str, seq_id: int) -> bytes:
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    tokens = np.arange(TOKENS)
    for _ in range(datums()):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        for name, dtype, kind in (
            ("target_tokens", "<i8", tinker_pb2.TINKER_DATA_TYPE_INT64),
            ("weights", "<f4", tinker_pb2.TINKER_DATA_TYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = tokens.astype(dtype).tobytes(), kind
            tensor.shape.append(TOKENS)
    return message.SerializeToString()


def sparse(model_id: str, seq_id: int) -> bytes:
    """Targets and weights of 16 columns, of which one has an entry."""
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    rows, columns = 4096, 16
    for _ in range(SIZE // (rows * (4 + 12 * columns))):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(rows, dtype="<i4").tobytes()
        for name, dtype, kind in (
            ("target_tokens", "<i8", tinker_pb2.TINKER_DATA_TYPE_INT64),
            ("weights", "<f4", tinker_pb2.TINKER_DATA_TYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = kind
            tensor.shape.extend([rows, columns])
            tensor.sparse_csr.values = np.ones(rows, dtype).tobytes()
            tensor.sparse_csr.crow_indices = np.arange(rows + 1, dtype="<i8").tobytes()
            tensor.sparse_csr.col_indices = np.zeros(rows, "<i8").tobytes()
    return message.SerializeToString()


def over_grpc(model_id: str, seq_id: int) -> training_pb2.ForwardBackwardRequest:
    request = training_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id)
    request.forward_backward.loss_fn = "cross_entropy"
    kinds = {
        "<i4": types_pb2.DATA_TYPE_INT32,
        "<i8": types_pb2.DATA_TYPE_INT64,
        "<f4": types_pb2.DATA_TYPE_FLOAT32,
    }

    def tensor(dtype: str) -> types_pb2.Tensor:
        data = np.arange(TOKENS).astype(dtype).tobytes()
        return types_pb2.Tensor(dtype=kinds[dtype], shape=[TOKENS], data=data)

    for _ in range(datums()):
        datum = request.forward_backward.data.add()
        datum.tokens.CopyFrom(tensor("<i4"))
        datum.loss_inputs["target_tokens"].CopyFrom(tensor("<i8"))
        datum.loss_inputs["weights"].CopyFrom(tensor("<f4"))
    return request


class Measured:
    """A gateway that is asked what a request took."""

    def __init__(self, process: Process, client: httpx.AsyncClient, grpc_address: str) -> None:
        self._process = process
        self.client = client
        self.grpc_address = grpc_address

    async def ask(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60))

    async def peak(self, send: Callable[[], Awaitable[None]]) -> float:
        """Memory at the peak of a request, in times of its counted bytes."""
        await self.ask()
        await send()
        return await self.ask()

    async def model(self) -> str:
        session = await new_session(self.client)
        body = {"session_id": session, "base_model": BASE, "model_seq_id": 0, "lora_config": {"rank": 4}}
        assert (await self.client.post("create_model", json=body)).status_code == 200
        return f"{session}:train:0"

    async def post(self, verb: str, body: bytes, **headers: str) -> None:
        response = await self.client.post(verb, content=body, headers=headers)
        assert response.status_code == 200, response.text


@pytest.fixture
async def gateway(redis_url: str, tmp_path: Path) -> AsyncIterator[Measured]:
    command = ("-m", "tests.unit.gateway.edge.peak_memory", redis_url, str(tmp_path))
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        base_url, grpc_address = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        url, headers = f"{base_url}/api/v1/", {"x-api-key": ALICE}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            yield Measured(process, client, grpc_address)
    finally:
        process.kill()
        await process.wait()


def steady(peaks: list[float]) -> float:
    """What every request takes after the first, which also takes what stays. One that shares its time with
    other work of the process, or of the machine, takes some of that too."""
    return min(peaks[1:])


@pytest.mark.parametrize("make", [of_the_sdk, sparse])
@pytest.mark.parametrize("encoding", ["identity", "zstd"])
async def test_no_batch_over_http_takes_more_than_is_counted(
    gateway: Measured, make: Callable[[str, int], bytes], encoding: str
) -> None:
    model = await gateway.model()
    headers = {**PROTO, "content-encoding": encoding}

    async def send() -> None:
        await gateway.post("forward_backward", body, **headers)

    peaks = []
    for seq_id in (1, 2, 3):
        body = make(model, seq_id)
        if encoding == "zstd":
            body = zstandard.compress(body)
        peaks.append(await gateway.peak(send))
    assert 1 < steady(peaks) <= COPIES


async def test_no_batch_over_grpc_takes_more_than_is_counted(gateway: Measured) -> None:
    model = await gateway.model()
    async with rpc.channel(gateway.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)

        async def send() -> None:
            await stub.ForwardBackward(request, metadata=(("x-api-key", ALICE),), timeout=60)

        peaks = []
        for seq_id in (1, 2, 3):
            request = over_grpc(model, seq_id)
            peaks.append(await gateway.peak(send))
    assert 1 < steady(peaks) <= COPIES


async def test_no_sample_in_json_takes_more_than_is_counted(gateway: Measured) -> None:
    session = await new_session(gateway.client)
    body = {"session_id": session, "base_model": BASE, "sampling_session_seq_id": 0}
    opened = await gateway.client.post("create_sampling_session", json=body)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [300] * (CONTEXT - 8)}]}
    asked = {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
    asked["sampling_session_id"] = opened.json()["sampling_session_id"]

    async def send() -> None:
        await gateway.post("asample", content)

    for seq_id in (1, 2):
        content = json.dumps(asked | {"seq_id": seq_id}, separators=(",", ":")).encode()
        peak = await gateway.peak(send)
    assert 1 < peak <= COPIES
