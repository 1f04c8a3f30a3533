"""The SDK says who one is, and takes credentials from a command: it exchanges them for tokens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.identity.key import Rights
from tests.unit.gateway.edges import ALICE, BASE, Edges, running

PROGRAM = f"""\
import tinker
rest = tinker.RestClient()
print(rest.whoami().result().model_dump_json())
service = tinker.ServiceClient()
client = service.create_sampling_client(base_model={BASE!r})
print(service.get_server_capabilities().supported_models[0].model_name)
"""


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path) as found:
        yield found


async def test_the_sdk_knows_who_it_is_with_a_key_from_a_command(edges: Edges) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TINKER_API_KEY"}
    environment |= {"TINKER_BASE_URL": edges.base_url, "TINKER_CREDENTIAL_CMD": f"echo {ALICE}"}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    who, model = done.stdout.splitlines()
    assert '"user_urn":"tinsmith:user:alice"' in who
    assert '"org_urn":"tml:organization:tinsmith","email":"alice"' in who
    assert model == BASE


async def test_a_token_that_ended_is_marked_for_the_sdk_to_replace_it(edges: Edges) -> None:
    record, key = await edges.app.key_store.create(Rights("carol"))
    await edges.app.keys.look()
    async with edges.http(key) as carol:
        token = (await carol.post("auth/token", json={})).json()["jwt"]
    async with edges.http(token) as carol:
        assert (await carol.get("get_server_capabilities")).status_code == 200
        await edges.app.key_store.revoke(record.id)
        await edges.app.keys.look()
        refused = await carol.get("get_server_capabilities")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    async with edges.http("tml-wrong") as nobody:
        refused = await nobody.get("get_server_capabilities")
    assert (refused.status_code, "www-authenticate" in refused.headers) == (401, False)
