"""What was used, as the SDK's billing clients read it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from tinker import types

from services.gateway.sessions import use
from tests.unit.gateway.edge.http.batches import PROTO, batch
from tests.unit.gateway.edges import ALICE, BOB, ROOT, Edges, new_model, new_session
from tests.unit.gateway.saved import CONTENT, save
from tinsmith.v1 import training_pb2


def window() -> dict[str, str]:
    """The last two days and this one, as it may be midnight."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    begin, end = today - timedelta(days=2), today + timedelta(days=1)
    return {"starting_on": f"{begin:%Y-%m-%dT%H:%M:%SZ}", "ending_before": f"{end:%Y-%m-%dT%H:%M:%SZ}"}


async def asked(edges: Edges, key: str) -> types.BillingUsageResponse:
    async with edges.http(key) as client:
        answer = await client.get("billing/usage/events", params=window())
        assert answer.status_code == 200, answer.text
        return types.BillingUsageResponse.model_validate(answer.json())


async def worked(edges: Edges, client: httpx.AsyncClient) -> tuple[str, str]:
    """A session in a project and its model, which trained 3 tokens and saved a checkpoint."""
    session = await new_session(client)
    await client.put(f"sessions/{session}/project", json={"project_id": "p"})
    model = await new_model(edges, client, session)
    body = batch(model, 1, [1, 2, 3])
    assert (await client.post("forward_backward", content=body, headers=PROTO)).status_code == 200
    await edges.answer(model, 1, forward_backward=training_pb2.ForwardBackwardResult())
    await save(edges, client, model, 2, "a")
    return session, model


async def test_usage_is_told_by_run_to_its_owner_and_to_admins(edges: Edges) -> None:
    async with edges.http() as client:
        session, model = await worked(edges, client)
    now = time.time()
    await edges.app.use._usage.note_stored(now)
    found = await asked(edges, ALICE)
    trained, saved, stored = sorted(
        found.data, key=lambda one: ("training", "checkpoint", "storage").index(one.event_info.type)
    )
    assert (trained.event_info.token_count, saved.event_info.count) == (3, 1)
    assert stored.event_info.gigabyte_hours == len(CONTENT) / 1e9
    for one in (trained, saved):
        assert (one.base_model, one.user_id, one.session_id, one.project_id) == (
            "org/tiny",
            "alice",
            session,
            "p",
        )
        assert one.bucket_end - one.bucket_start == timedelta(days=1)
    assert list(found.sessions) == [session]
    # Beyond what the SDK has words for.
    async with edges.http() as client:
        rows = (await client.get("billing/usage/events", params=window())).json()["data"]
    assert {row["training_run_id"] for row in rows} == {model, None}
    assert [row["event_info"].get("size_bytes") for row in rows].count(len(CONTENT)) == 1
    assert (await asked(edges, BOB)).data == []
    assert sorted((await asked(edges, ROOT)).data, key=repr) == sorted(found.data, key=repr)


async def test_what_is_stored_is_told_by_project(edges: Edges) -> None:
    async with edges.http() as client:
        _, model = await worked(edges, client)
        await save(edges, client, model, 3, "b")

    async def stored(key: str, **query: str) -> list[Any]:
        async with edges.http(key) as client:
            answer = await client.get("billing/usage/checkpoints/current", params=query)
            found = types.CurrentCheckpointStorageUsageResponse.model_validate(answer.json())
            return [
                (one.org_user_urn, one.project_id, one.checkpoint_count, one.size_bytes) for one in found.data
            ]

    expected = [("alice", "p", 2, 2 * len(CONTENT))]
    assert await stored(ALICE) == await stored(ROOT) == await stored(ALICE, project_id="p") == expected
    assert await stored(BOB) == await stored(ALICE, project_id="q") == []


async def test_an_admin_asks_for_one_owners_and_is_told_which_names_are_none(edges: Edges) -> None:
    async with edges.http() as client:
        await worked(edges, client)
    for path, query in (("events", window()), ("checkpoints/current", {})):

        async def told(key: str, owner: str, path: str = path, query: Any = query) -> httpx.Response:
            async with edges.http(key) as client:
                return await client.get(f"billing/usage/{path}", params={**query, "owner": owner})

        everybody = (await told(ROOT, "")).json()["data"]
        assert (
            everybody
            == (await told(ROOT, "alice")).json()["data"]
            == (await told(ALICE, "alice")).json()["data"]
        )
        assert everybody and (await told(ROOT, "bob")).json()["data"] == []
        refused = await told(ROOT, "alice and bob")
        assert refused.status_code == 400 and "is no owner's name" in refused.json()["detail"]
        assert (await told(BOB, "alice")).status_code == 403


async def test_a_window_that_is_not_of_days_or_too_much_is_refused(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        for begin, end in (
            ("2026-01-01T01:00:00Z", "2026-01-02T00:00:00Z"),
            ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"),
            ("2026-01-01T00:00:00Z", "2026-01-31T00:00:00Z"),
            ("2999-01-01T00:00:00Z", "2999-01-02T00:00:00Z"),
            ("yesterday", "2026-01-31T00:00:00Z"),
        ):
            query = {"starting_on": begin, "ending_before": end}
            answer = await client.get("billing/usage/events", params=query)
            assert answer.status_code == 400, (begin, end)
        await worked(edges, client)
        monkeypatch.setattr(use, "MOST_ROWS", 1)
        answer = await client.get("billing/usage/events", params=window())
        assert (answer.status_code, answer.json()["code"]) == (400, "too_many_entries")
