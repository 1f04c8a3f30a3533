"""HTTP: start-up, keys, sessions, and answers to what is not served."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import tinker

from services.gateway.access.body_budget import COPIES, JSON_TIMES
from services.gateway.access.limits import Limits
from services.gateway.access.memory import Memory
from services.gateway.edge.http import body as body_module
from tests.unit.gateway.edges import ALICE, BASE, BOB, CONTEXT, Edges, new_model, new_session, running


async def test_a_gateway_is_ready_while_redis_takes_writes(edges: Edges) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{edges.base_url}/api/v1/readyz")).status_code == 200
        await edges.redis.replicaof("127.0.0.1", "1")
        try:
            await asyncio.sleep(1.1)
            answer = await client.get(f"{edges.base_url}/api/v1/readyz", timeout=10)
            assert answer.status_code == 503
            assert "takes no writes" in answer.json()["detail"]
            assert (await client.get(f"{edges.base_url}/api/v1/healthz")).status_code == 200
        finally:
            await edges.redis.replicaof("NO", "ONE")
        await asyncio.sleep(1.1)
        assert (await client.get(f"{edges.base_url}/api/v1/readyz", timeout=10)).status_code == 200


async def test_healthz_needs_no_key(edges: Edges) -> None:
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{edges.base_url}/api/v1/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("key", ["", "tml-wrong"])
async def test_a_request_without_a_known_key_is_401_with_a_sentence(edges: Edges, key: str) -> None:
    async with edges.http(key) as client:
        response = await client.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
    assert response.status_code == 401
    assert "API key" in response.json()["detail"]


async def test_a_path_that_is_not_served_is_404_with_its_name(edges: Edges) -> None:
    async with edges.http() as client:
        for path in ("create_custom_loss", "no/such/thing"):
            response = await client.post(path, json={})
            assert response.status_code == 404
            assert path in response.json()["detail"]
        assert (await client.get("create_session")).status_code == 405


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"tags": 1}', b'{"tags": [], "sdk_version": "1", "colour": "red"}']
)
async def test_a_malformed_body_is_400_with_a_sentence(edges: Edges, body: bytes) -> None:
    async with edges.http() as client:
        response = await client.post("create_session", content=body)
    assert response.status_code == 400
    assert len(response.json()["detail"]) > 20


async def test_an_unknown_field_is_refused_by_its_name(edges: Edges) -> None:
    async with edges.http() as client:
        response = await client.post("create_session", json={"tags": [], "colour": "red"})
    assert "colour" in response.json()["detail"]


async def test_a_body_beyond_the_limit_is_413(redis_url: str, tmp_path: Path) -> None:
    async with running(redis_url, tmp_path, Limits(json_body_bytes=1000)) as edges, edges.http() as client:
        response = await client.post("telemetry", content=b"x" * 1001)
        assert response.status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 500

        assert (await client.post("telemetry", content=chunks())).status_code == 413
        assert (await client.post("telemetry", content=b"x" * 1000)).status_code == 200


async def test_a_body_that_trickles_is_given_up_and_its_budget_comes_back(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_PATIENCE_S", 0.3)
    large = b"x" * 100_000

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 700
            await asyncio.sleep(0.05)

    memory = replace(Memory.of(), requests=2 * COPIES * JSON_TIMES * len(large))
    async with running(redis_url, tmp_path, memory=memory) as edges, edges.http() as client:
        assert (await client.post("telemetry", content=trickle())).status_code == 504
        assert (await client.post("telemetry", content=large)).status_code == 200


async def test_a_body_beyond_the_share_of_its_key_is_429_and_the_share_comes_back(
    redis_url: str, tmp_path: Path
) -> None:
    large = b"x" * 100_000
    memory = replace(Memory.of(), requests=2 * COPIES * JSON_TIMES * len(large))
    async with (
        running(redis_url, tmp_path, memory=memory) as edges,
        edges.http() as client,
        edges.http(BOB) as other,
    ):
        with edges.app.budget.account("alice") as held:
            held.hold(70_000)
            refused = await client.post("telemetry", content=large)
            assert refused.status_code == 429
            assert "--memory-mib" in refused.json()["detail"]
            # What is small has a room of its own, and others have their share.
            assert (await client.post("telemetry", content=b"x" * 1000)).status_code == 200
        for _ in range(3):
            assert (await client.post("telemetry", content=large)).status_code == 200
            assert (await other.post("telemetry", content=large)).status_code == 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tags": ["a"] * 65}, "at most 64"),
        ({"tags": ["a" * 257]}, "tag has 257"),
        ({"display_name": "a" * 257}, "display_name"),
        ({"user_metadata": {"a": "b" * 70_000}}, "user_metadata"),
    ],
)
async def test_a_session_with_more_labels_than_are_kept_is_refused(
    edges: Edges, change: dict, says: str
) -> None:
    async with edges.http() as client:
        response = await client.post("create_session", json={"tags": [], **change})
    assert response.status_code == 400
    assert says in response.json()["detail"]


async def test_one_idempotency_key_makes_one_session(edges: Edges) -> None:
    headers = {"x-idempotency-key": "again"}
    async with edges.http() as client, edges.http(BOB) as other:
        body = {"tags": ["a"], "sdk_version": "0.38.0", "user_metadata": {"recipe": "x"}}
        first = await client.post("create_session", json=body, headers=headers)
        again = await client.post("create_session", json=body, headers=headers)
        another = await client.post("create_session", json=body)
        theirs = await other.post("create_session", json=body, headers=headers)
    found = [response.json()["session_id"] for response in (first, again, another, theirs)]
    assert found[0] == found[1]
    assert len(set(found)) == 3


async def test_heartbeats_end_with_410_when_the_session_is_finished(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        session = await new_session(client)
        beat = {"session_id": session, "type": "session_heartbeat"}
        assert (await client.post("session_heartbeat", json=beat)).status_code == 200
        assert (await other.post("session_heartbeat", json=beat)).status_code == 404
        missing = await client.post("session_heartbeat", json={"session_id": "nobody"})
        assert missing.status_code == 404
        finish = {"reason": {"type": "success"}, "detail": None}
        for _ in range(2):
            assert (await client.post(f"sessions/{session}/finish", json=finish)).status_code == 200
        assert (await client.post("session_heartbeat", json=beat)).status_code == 410
        model = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        assert (await client.post("create_model", json=model)).status_code == 410


async def test_the_sdk_starts_heartbeats_and_finishes_a_session(edges: Edges) -> None:
    def use() -> str:
        with tinker.ServiceClient(
            base_url=edges.base_url, api_key=ALICE, user_metadata={"a": "b"}, display_name="run"
        ) as client:
            return client.holder.get_session_id()

    session = await asyncio.to_thread(use)
    async with edges.http() as client:
        gone = await client.post("session_heartbeat", json={"session_id": session})
    assert gone.status_code == 410


async def test_the_sdk_lists_what_is_served(edges: Edges) -> None:
    def use() -> list:
        client = tinker.RestClient(base_url=edges.base_url, api_key=ALICE)
        return client.get_server_capabilities().result().supported_models

    models = await asyncio.to_thread(use)
    assert [(m.model_name, m.max_context_length, m.trainable, m.sampleable) for m in models] == [
        (BASE, CONTEXT, True, True)
    ]


async def test_a_wrong_key_is_an_authentication_error_in_the_sdk(edges: Edges) -> None:
    def use() -> None:
        tinker.ServiceClient(base_url=edges.base_url, api_key="tml-wrong").holder.get_session_id()

    with pytest.raises(tinker.AuthenticationError):
        await asyncio.to_thread(use)


async def test_draining_ends_long_polls_and_healthz(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        poll = asyncio.create_task(client.post("retrieve_future", json={"request_id": f"{model}:1"}))
        await asyncio.sleep(0.2)
        assert not poll.done()
        edges.app.drain()
        response = await asyncio.wait_for(poll, 30)
        assert (response.status_code, response.json()["queue_state"]) == (408, "active")
        assert (await client.get("healthz")).status_code == 503


async def test_what_is_pending_is_told_so_although_the_key_has_its_share_of_room(edges: Edges) -> None:
    room = edges.app.answers
    async with edges.http() as client:
        model = await new_model(edges, client)
        await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        with room.account("alice") as alice, room.account("bob") as bob:
            assert alice.take_now(room.largest * 9 // 10) and bob.take_now(room.largest // 2)
            poll = asyncio.create_task(client.post("retrieve_future", json={"request_id": f"{model}:1"}))
            await asyncio.sleep(0.2)
            edges.app.drain()
            response = await asyncio.wait_for(poll, 30)
    assert response.status_code == 408, response.text


@pytest.mark.parametrize("said", [{}, {"sdk_version": None}, {"sdk_version": "my-client/1.0"}])
async def test_a_client_that_is_not_the_sdk_opens_a_session_like_any_other(
    edges: Edges, said: dict[str, str | None]
) -> None:
    async with edges.http() as client:
        assert (await client.post("client/config", json=said)).status_code == 200
        opened = await client.post("create_session", json=said)
        assert opened.status_code == 200, opened.text
        assert "warning_message" not in opened.json()
        listed = await client.get(f"sessions/{opened.json()['session_id']}")
        assert listed.status_code == 200


@pytest.mark.parametrize(
    ("python", "pyqwest"), [("3.11.7", False), ("3.13.9", False), ("3.14.0", True), ("", False)]
)
async def test_programs_that_pyqwest_could_abort_at_their_end_are_told_to_do_without(
    edges: Edges, python: str, pyqwest: bool
) -> None:
    async with edges.http() as client:
        headers = {"x-stainless-runtime-version": python} if python else {}
        config = await client.post("client/config", json={"sdk_version": "0.38.0"}, headers=headers)
    assert config.json()["use_pyqwest_transport"] is pyqwest


@pytest.mark.parametrize(("version", "says"), [(28, "sdk_version"), ("0.1.0", "leaves sdk_version out")])
async def test_a_version_that_is_not_taken_is_answered_with_a_sentence(
    edges: Edges, version: object, says: str
) -> None:
    async with edges.http() as client:
        refused = await client.post("create_session", json={"sdk_version": version})
    assert refused.status_code == 400
    assert says in refused.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/unauthed/auth-config"), ("POST", "/api/v1/auth/apikey")]
)
async def test_who_wants_to_log_in_by_browser_is_told_what_to_do_instead(
    edges: Edges, method: str, path: str
) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.request(method, f"{edges.base_url}{path}", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "no_login")
    assert "TINKER_API_KEY" in answer.json()["detail"]


async def test_pages_that_are_not_read_take_the_share_of_their_key_and_nothing_of_others(
    edges: Edges,
) -> None:
    body = {"tags": [], "sdk_version": "0.38.0", "user_metadata": {"x": "y" * 64_000}}
    # What the kernel takes is not the gateway's any more.
    slow = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)])
    url, room = f"{edges.base_url}/api/v1/sessions/search", Memory.of().answers
    async with (
        edges.http() as alice,
        edges.http(BOB) as bob,
        httpx.AsyncClient(transport=slow, timeout=20, headers={"x-api-key": ALICE}) as slowly,
    ):
        await asyncio.gather(*(alice.post("create_session", json=body) for _ in range(100)))
        async with AsyncExitStack() as open_ones:
            statuses = []
            while len(statuses) < 20 and 429 not in statuses:
                asked = slowly.stream("POST", url, json={"limit": 100})
                statuses.append((await open_ones.enter_async_context(asked)).status_code)
            # None counts for more than an eighth of the room, of which half is for others.
            assert statuses == [200] * 4 + [429]
            assert 0 < edges.app.answers.held <= room // 2
            assert (await bob.post("sessions/search", json={"limit": 50})).status_code == 200
        page = await alice.post("sessions/search", json={"limit": 100})
        assert page.status_code == 200 and len(page.json()["sessions"]) == 100
        assert edges.app.answers.held == 0
