"""What becomes of a forward whose client has its result when its gateway is killed before it is written."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from services.common.contract import ids
from services.common.process import failpoints
from services.common.state import keys
from services.common.state.journal import Journal
from tests.component.gateway.process import launch
from tests.unit.gateway.edge.http.batches import PROTO, batch
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer, serving
from tinsmith.internal.v1 import tinker_pb2

_LIMITS = {"vocab_size": 100, "context_length": 64, "model_path": "org/tiny"}


async def test_the_next_gateway_writes_what_one_told_that_was_killed_before_it_wrote(
    redis_url: str, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    trainer = ScriptedTrainer(Journal(redis_client), {})
    dying = launch(redis_url, tmp_path, "gateway-0", **{failpoints.VARIABLE: "gateway.after_tell=kill:1"})
    processes = [dying.process]
    try:
        async with serving(redis_client, trainer, "trainer-0", **_LIMITS):
            await asyncio.to_thread(dying.wait_ready)
            async with dying.client() as client:
                model = await _new_model(client)
                message = tinker_pb2.TinkerForwardBackwardRequest.FromString(batch(model, 1, [1, 2, 3]))
                message.forward_only = True
                await _post(client, "forward_backward", content=message.SerializeToString(), headers=PROTO)
                told = await _post(client, "retrieve_future", json={"request_id": ids.request_id(model, 1)})
                assert await redis_client.hget(keys.future(model, 1), "state") == b"pending"
            assert await asyncio.to_thread(dying.process.wait, 60) == -signal.SIGKILL
            other = launch(redis_url, tmp_path, "gateway-1")
            processes.append(other.process)
            await asyncio.to_thread(other.wait_ready)
            async with other.client() as client:
                again = await _post(client, "retrieve_future", json={"request_id": ids.request_id(model, 1)})
            async with asyncio.timeout(60):
                while await redis_client.hget(keys.future(model, 1), "state") != b"done":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert again.content == told.content
            assert trainer.order(model) == [0, 1]
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.communicate)


async def _new_model(client: httpx.AsyncClient) -> str:
    session = (await _post(client, "create_session", json={"tags": [], "sdk_version": "0.38.0"})).json()
    asked = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": BASE}
    await _post(client, "create_model", json={**asked, "lora_config": {"rank": 4}})
    model_id = ids.model_id(session["session_id"], 0)
    await _post(client, "retrieve_future", json={"request_id": ids.request_id(model_id, 0)})
    return model_id


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    answer = await client.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer
