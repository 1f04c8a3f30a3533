"""HTTP: runs and sessions."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.access.limits import Limits
from tests.unit.gateway.edges import BASE, BOB, Edges, new_model, new_session
from tests.unit.gateway.redis_calls import counted
from tests.unit.gateway.saved import CONTENT, failure, save
from tinsmith.v1 import models_pb2


@pytest.fixture
def limits() -> Limits:
    return Limits(min_ttl_seconds=1)


async def test_runs_are_listed_by_page_and_project(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        sessions = [await new_session(client) for _ in range(3)]
        models = [await new_model(edges, client, session) for session in sessions]
        page = (await client.get("training_runs", params={"limit": 2})).json()
        assert [run["training_run_id"] for run in page["training_runs"]] == models[:0:-1]
        assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
        assert page["training_runs"][0]["user_metadata"] == {"run": "one"}
        assert (await other.get("training_runs")).json()["training_runs"] == []
        for session in sessions[:2]:
            answer = await client.put(f"sessions/{session}/project", json={"project_id": "p"})
            assert answer.status_code == 200
        assert (
            await other.put(f"sessions/{sessions[0]}/project", json={"project_id": "p"})
        ).status_code == 404
        await client.put(f"sessions/{sessions[0]}/project", json={"project_id": "q"})
        for project, expected in (("p", models[1:2]), ("q", models[:1]), ("r", [])):
            page = (await client.get("training_runs", params={"project_id": project})).json()
            assert [run["training_run_id"] for run in page["training_runs"]] == expected
        assert (await client.get("training_runs?access_scope=all")).status_code == 400


async def test_a_parameter_that_changes_nothing_is_refused_by_its_name(edges: Edges) -> None:
    async with edges.http() as client:
        session = await new_session(client)
        model = await new_model(edges, client, session)
        for path in (
            *("training_runs", f"training_runs/{model}", "sessions", f"sessions/{session}"),
            *("checkpoints", f"training_runs/{model}/checkpoints"),
        ):
            response = await client.get(path, params={"sort": "name"})
            assert response.status_code == 400, path
            assert "'sort'" in response.json()["detail"]
            assert (await client.get(path)).status_code == 200
        assert (await client.get(f"training_runs/{model}/checkpoints?limit=1")).status_code == 400


async def test_sessions_are_listed_and_described(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        session = await new_session(client)
        model = await new_model(edges, client, session)
        for number in (0, 1):
            body = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
            assert (await client.post("create_sampling_session", json=body)).status_code == 200
        newest = await new_session(client)
        assert (await client.get("sessions")).json() == {"sessions": [newest, session]}
        assert (await client.get("sessions?limit=1&offset=1")).json() == {"sessions": [session]}
        details = (await client.get(f"sessions/{session}")).json()
        assert details["training_run_ids"] == [model]
        assert details["sampler_ids"] == [f"{session}:sample:0", f"{session}:sample:1"]
        assert (await other.get(f"sessions/{session}")).status_code == 404
        assert (await other.get("sessions")).json() == {"sessions": []}


async def test_sessions_are_searched_page_by_page(edges: Edges) -> None:
    async with edges.http() as client:
        made = []
        for number in range(5):
            body = {
                "tags": [],
                "sdk_version": "0.38.0",
                "display_name": f"Night run {number}",
                "user_metadata": {"kind": "odd" if number % 2 else "even"},
            }
            made.append((await client.post("create_session", json=body)).json()["session_id"])
        model = await new_model(edges, client, made[1])
        await save(edges, client, model, 1, "a")
        finish = {"reason": {"type": "errored"}, "detail": "out of luck"}
        await client.post(f"sessions/{made[1]}/finish", json=finish)

        async def search(**body: Any) -> list[str]:
            found, cursor = [], None
            for _ in range(10):
                page = await client.post(
                    "sessions/search", json={**body, **({"cursor": cursor} if cursor else {})}
                )
                assert page.status_code == 200, page.text
                found += page.json()["sessions"]
                cursor = page.json().get("next_cursor")
                if cursor is None:
                    return [session["session_id"] for session in found]
            raise AssertionError("the search does not end")

        assert await search(limit=2) == made[::-1]
        assert await search(user_metadata={"kind": "odd"}, limit=1) == [made[3], made[1]]
        assert await search(display_name="RUN night 4") == [made[4]]
        assert await search(display_name="4", session_id=made[0]) == [made[4], made[0]]
        assert await search(project_ids=["p"]) == []
        finished = [{"type": "client_finished", "reasons": ["errored"]}]
        assert await search(statuses=finished) == [made[1]]
        assert await search(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
        assert await search(statuses=[{"type": "active"}]) == [made[4], made[3], made[2], made[0]]
        assert await search(owner={"type": "user", "owner_urns": ["alice"]}, limit=200) == made[::-1]
        one = (await client.post("sessions/search", json={"session_id": made[1]})).json()["sessions"][0]
        assert (one["checkpoints_count"], one["checkpoint_storage_bytes"]) == (1, len(CONTENT))
        reason = {"type": "client_finished", "reason": {"type": "errored"}, "detail": "out of luck"}
        assert one["status"] == reason
        others = {"owner": {"type": "user", "owner_urns": ["bob"]}}
        assert (await client.post("sessions/search", json=others)).status_code == 403
        assert (await client.post("sessions/search", json={"limit": 0})).status_code == 400
        for more in (
            {"display_name": "a " * 200},
            {"project_ids": ["p"] * 65},
            {"user_metadata": {str(number): "x" * 100 for number in range(1000)}},
        ):
            assert (await client.post("sessions/search", json=more)).status_code == 400, list(more)


async def test_a_search_goes_to_redis_as_often_however_much_it_finds(edges: Edges) -> None:
    async with edges.http() as client:

        async def search() -> tuple[int, int]:
            """Sessions found, and how often Redis was asked for one of them or its models."""
            with counted("session:{") as of_sessions, counted(f"{session}:train:") as of_models:
                page = (await client.post("sessions/search", json={"limit": 200})).json()["sessions"]
            return len(page), of_sessions.total() + of_models.total()

        session = await new_session(client)
        found, asked = await search()
        assert found == 1
        model = await new_model(edges, client, session)
        await save(edges, client, model, 1, "a")
        for _ in range(9):
            await new_session(client)
        assert await search() == (10, asked)


async def test_a_model_is_unloaded_after_all_that_was_sent(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = {"model_id": model, "seq_id": 1, "adam_params": {}}
        assert (await client.post("optim_step", json=body)).status_code == 200
        answer = (await client.post("unload_model", json={"model_id": model})).json()
        assert answer == {"request_id": f"{model}:2", "model_id": model}
        operation = await edges.operation(model, 2)
        assert operation is not None and operation.HasField("unload_model")
        await edges.answer(model, 2, unload_model=models_pb2.UnloadModelResult())
        assert await failure(client, model, 2) == {"model_id": model}
