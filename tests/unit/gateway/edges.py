"""Both edges over the real application layer and a real Redis, without trainer or sampler processes.

A test answers operations itself, through the journal, in the trainer's place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from services.common.contract import ids
from services.common.state import keys, redis_client
from services.common.state.journal import Journal
from services.common.state.journal_records import Published
from services.common.state.registry import Announcer, ServiceRecord
from services.common.storage.data_dir import DataDir
from services.common.storage.location import connect
from services.common.tls.files import KeyFiles
from services.gateway.access.limits import Limits
from services.gateway.access.memory import Memory
from services.gateway.application import Application
from services.gateway.checkpoints.files import CheckpointFiles
from services.gateway.cluster.discovery import Discovery
from services.gateway.dispatch.record_results import ResultRecorder
from services.gateway.dispatch.used import used_by
from services.gateway.edge.grpc import service
from services.gateway.edge.http.server import HttpServer
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing
from services.gateway.records.checkpoint import CheckpointStore
from services.gateway.records.sample_journal import SampleJournal
from services.gateway.retention.checkpoint_sweep import CheckpointSweep
from services.gateway.retention.snapshot_plan import SnapshotBudget
from services.gateway.wiring import Gateway
from tinsmith.internal.v1 import operation_pb2, sampler_pb2
from tinsmith.v1 import models_pb2, results_pb2, sampling_pb2

ALICE, BOB, ROOT = "tml-alice", "tml-bob", "tml-root"
BASE = "org/tiny"
VOCAB, CONTEXT = 100, 64
LORA = models_pb2.LoraConfig(rank=4, train_attn=True, train_mlp=True, train_unembed=True)
EPOCH = 1


@dataclass
class Edges:
    """Where the edges listen, and what stands behind them."""

    base_url: str
    grpc_address: str
    app: Application
    redis: redis.asyncio.Redis
    journal: Journal
    samples: SampleJournal
    recorder: ResultRecorder
    data: DataDir
    records: CheckpointStore
    files: CheckpointFiles
    sweep: CheckpointSweep
    announcers: dict[str, Announcer]
    """Of the trainer and the sampler, by kind."""
    discovery: Discovery
    """It looks when a request needs it to, not by itself."""

    def http(self, key: str = ALICE) -> httpx.AsyncClient:
        """A client that authenticates with the key."""
        return httpx.AsyncClient(base_url=f"{self.base_url}/api/v1/", headers={"x-api-key": key}, timeout=20)

    async def operation(self, model_id: str, seq_id: int) -> operation_pb2.Operation | None:
        """What the journal holds under a seq_id."""
        return (await self.journal.operations(model_id, [seq_id]))[0]

    async def answer(self, model_id: str, seq_id: int, **result: Any) -> None:
        """Publishes an operation's result as the dispatcher does."""
        operation = await self.operation(model_id, seq_id)
        assert operation is not None
        outcome = results_pb2.OperationResult(**result)
        outcome = await self.recorder.record(operation, outcome)
        await self.redis.set(keys.epoch(model_id), EPOCH)
        payload, use = outcome.SerializeToString(), used_by(operation, outcome)
        published = await self.journal.publish(model_id, EPOCH, seq_id, payload, use=use)
        assert published is Published.PUBLISHED

    async def sample(self, request_id: str, gateway_id: str = "gateway-0") -> sampler_pb2.SampleRequest:
        """What a sampler would be asked."""
        raw = await self.samples.claim(request_id, gateway_id, gateway_id)
        assert isinstance(raw, bytes)
        return sampler_pb2.SampleRequest.FromString(raw)

    async def answer_sample(self, request_id: str, result: sampling_pb2.SampleResult) -> None:
        """Publishes a sample's result as the sample dispatcher does."""
        outcome = results_pb2.OperationResult(sample=result)
        assert await self.samples.publish(request_id, outcome)


@asynccontextmanager
async def running(
    redis_url: str,
    directory: Path,
    limits: Limits | None = None,
    memory: Memory | None = None,
    tls: KeyFiles | None = None,
    proxies: Sequence[str] = (),
    snapshots: SnapshotBudget | None = None,
) -> AsyncIterator[Edges]:
    """Both edges on free ports, with one base model announced."""
    (directory / "keys").write_text(f"{ALICE} alice\n{BOB} bob\n{ROOT} root role=admin\n")
    client = redis_client.connect(redis_url)
    await client.flushall()
    fields: dict[str, Any] = {
        "base_model": BASE,
        "model_path": str(directory),
        "arch": "Qwen3ForCausalLM",
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "address": "127.0.0.1:1",
    }
    announcers = {
        "trainer": Announcer(client, ServiceRecord(kind="trainer", id="trainer-0", **fields)),
        "sampler": Announcer(
            client, ServiceRecord(kind="sampler", id="sampler-0", max_lora_rank=64, **fields)
        ),
    }
    for announcer in announcers.values():
        await announcer.start()

    data = DataDir(directory)
    # Nothing but futures is started: operations and samples stay where the test finds them.
    gateway = Gateway(
        "gateway-0",
        client,
        KeyRing(directory / "keys", KeyStore(client)),
        connect("", data),
        data,
        limits=limits,
        snapshots=snapshots,
        memory=memory,
    )
    app, stores = gateway.application, gateway.stores
    await app.futures.start()
    await app.keys.start()
    await app.keys.look()
    http = HttpServer(app, "127.0.0.1", 0, None, True, tls, proxies)
    http.start()
    rpc_server = await service.serve(app, "127.0.0.1:0", tells=True, tls=tls)
    try:
        yield Edges(
            f"{'https' if tls else 'http'}://127.0.0.1:{http.port}",
            f"127.0.0.1:{rpc_server.port}",
            app,
            client,
            gateway.journal,
            stores.samples,
            gateway.recorder,
            data,
            stores.checkpoints,
            gateway.files,
            gateway.checkpoint_sweep,
            announcers,
            gateway.discovery,
        )
    finally:
        app.drain()
        await rpc_server.drain(1)
        await http.drain()
        await app.futures.stop()
        await app.keys.stop()
        for announcer in announcers.values():
            await announcer.stop()
        await client.aclose()


async def new_session(client: httpx.AsyncClient) -> str:
    response = await client.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
    assert response.status_code == 200, response.text
    return response.json()["session_id"]


async def new_model(
    edges: Edges,
    client: httpx.AsyncClient,
    session_id: str | None = None,
    metadata: dict[str, str] | None = None,
    rank: int = 4,
) -> str:
    """A model that is ready."""
    session_id = session_id or await new_session(client)
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": BASE,
        "lora_config": {"rank": rank},
        "user_metadata": metadata or {"run": "one"},
    }
    response = await client.post("create_model", json=body)
    assert response.status_code == 200, response.text
    model_id = ids.model_id(session_id, 0)
    await edges.answer(model_id, 0, create_model=models_pb2.CreateModelResult(lora=LORA))
    return model_id
