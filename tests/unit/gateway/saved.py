"""Checkpoints as they come to be when a trainer executes what the edges accepted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from services.common.contract import ids
from services.common.state import keys
from services.common.storage.base import Key
from services.common.storage.directory import publish_directory
from tests.unit.gateway.edges import Edges
from tinsmith.v1 import checkpoints_pb2

SNAPSHOT_BYTES = 10
CONTENT = bytes(range(256)) * 10_000


def files(size: int = 1) -> dict[str, Any]:
    return {"adapter.safetensors": lambda path: path.write_bytes(CONTENT * size)}


async def save(
    edges: Edges, client: httpx.AsyncClient, model: str, seq_id: int, name: str | None, **fields: Any
) -> str:
    """Saves training state as a trainer would; its path."""
    body = {"model_id": model, "seq_id": seq_id, **({} if name is None else {"path": name}), **fields}
    response = await client.post("save_weights", json=body)
    assert response.status_code == 200, response.text
    operation = await edges.operation(model, seq_id)
    assert operation is not None
    checkpoint = operation.save_state.checkpoint_id
    size = edges.files.storage.publish(Key(model, checkpoint, seq_id), files())
    path = ids.tinker_path(model, checkpoint)
    result = checkpoints_pb2.SaveStateResult(path=path, size_bytes=size)
    await edges.answer(model, seq_id, save_state=result)
    return path


async def export(
    edges: Edges, client: httpx.AsyncClient, model: str, seq_id: int, name: str, **fields: Any
) -> str:
    """Exports as a trainer would; the path."""
    body = {"model_id": model, "seq_id": seq_id, "path": name, **fields}
    response = await client.post("save_weights_external", json=body)
    assert response.status_code == 200, response.text
    checkpoint = f"external_weights/{name}"
    size = edges.files.storage.publish(Key(model, checkpoint, seq_id), files())
    path = ids.tinker_path(model, checkpoint)
    result = checkpoints_pb2.SaveExternalResult(path=path, size_bytes=size)
    await edges.answer(model, seq_id, save_external=result)
    return path


async def save_sampler(edges: Edges, client: httpx.AsyncClient, model: str, seq_id: int, name: str) -> Path:
    """Saves a sampler checkpoint as a trainer would; the directory of its snapshot."""
    body = {"model_id": model, "seq_id": seq_id, "path": name}
    assert (await client.post("save_weights_for_sampler", json=body)).status_code == 200
    directory = edges.data.snapshot(model, seq_id)
    publish_directory(directory, files(), replace=False)
    result = checkpoints_pb2.SaveForSamplerResult(path="x", version=seq_id, size_bytes=SNAPSHOT_BYTES)
    await edges.answer(model, seq_id, save_for_sampler=result)
    return directory


def url(path: str) -> str:
    model, checkpoint = ids.parse_tinker_path(path)
    return f"training_runs/{model}/checkpoints/{checkpoint}"


async def failure(client: httpx.AsyncClient, model: str, seq_id: int) -> dict[str, Any]:
    body = {"request_id": ids.request_id(model, seq_id), "allow_metadata_only": False}
    return (await client.post("retrieve_future", json=body)).json()


async def names(client: httpx.AsyncClient, **params: int) -> list[str]:
    found = (await client.get("checkpoints", params=params)).json()["checkpoints"]
    return [checkpoint["checkpoint_id"] for checkpoint in found]


async def expire(edges: Edges, path: str) -> None:
    """Lets the ttl of a checkpoint, which is a second, pass."""
    found = await edges.redis.zscore(keys.CHECKPOINTS_DUE, f"{path}@1")
    assert found is not None
    await asyncio.sleep(max(0.0, found - time.time()) + 0.01)
