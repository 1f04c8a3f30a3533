"""Models of the Python client, whose results a test publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from tests.unit.gateway.edges import BASE, LORA, Edges
from tinsmith.v1 import models_pb2
from tinsmith_client import Client, Model, Session

T = TypeVar("T")


async def waiting(function: Callable[..., T], *args: Any, **named: Any) -> T:
    """What a function of the client, which blocks, comes to while the gateway runs here."""
    return await asyncio.to_thread(function, *args, **named)


async def model_of(edges: Edges, client: Client) -> tuple[Session, Model]:
    session = await waiting(client.create_session)
    creating = asyncio.create_task(waiting(session.create_model, BASE, rank=4))
    model_id = f"{session.session_id}:train:0"
    async with asyncio.timeout(60):
        while await edges.app.models._models.get(model_id) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while await edges.operation(model_id, 0) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await edges.answer(model_id, 0, create_model=models_pb2.CreateModelResult(lora=LORA))
    return session, await creating
