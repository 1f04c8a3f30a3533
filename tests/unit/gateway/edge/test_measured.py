"""HTTP requests are counted under their routes."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client import REGISTRY

from tests.unit.gateway.edge.talking import Talking
from tests.unit.gateway.edges import ALICE, Edges
from tests.unit.gateway.scripted_services import BASE


def seen(route: str, status: str) -> float:
    labels = {"route": route, "status": status}
    return REGISTRY.get_sample_value("tinsmith_http_seconds_count", labels) or 0.0


async def test_requests_are_counted_by_route_and_status_and_never_by_what_a_client_wrote(
    edges: Edges,
) -> None:
    rows = [
        ("/api/v1/get_server_capabilities", "200", "get_server_capabilities"),
        ("/api/v1/sessions/{session_id}", "404", "sessions/no-such-session"),
        ("none", "404", "made/up"),
    ]
    before = [seen(route, status) for route, status, _ in rows]
    async with edges.http() as client:
        for _, status, path in rows:
            assert (await client.get(path)).status_code == int(status)
    assert [seen(route, status) - was for (route, status, _), was in zip(rows, before, strict=True)] == [
        1,
        1,
        1,
    ]
    (family,) = [family for family in REGISTRY.collect() if family.name == "tinsmith_http_seconds"]
    assert not any(
        "made" in one.labels["route"] or "no-such" in one.labels["route"] for one in family.samples
    )


async def test_a_client_that_leaves_a_poll_is_not_counted_as_one_that_asked_wrongly(talks: Talking) -> None:
    route = "/api/v1/retrieve_futures"
    before = {status: seen(route, status) for status in ("400", "429", "499")}
    async with httpx.AsyncClient(base_url=f"{talks.url}/api/v1", headers={"x-api-key": ALICE}) as client:
        session = (await client.post("create_session", json={"tags": [], "sdk_version": "0"})).json()
        opening = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": BASE}
        opened = (await client.post("create_sampling_session", json=opening)).json()
        target = {"sampling_session_id": opened["sampling_session_id"], "cloned_sampler_id": 0}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("retrieve_futures", json={"target": target, "prev_cursor": 0}, timeout=0.5)
    async with asyncio.timeout(60):
        while all(seen(route, status) == was for status, was in before.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert {status: seen(route, status) - was for status, was in before.items()} == {
        "400": 0,
        "429": 0,
        "499": 1,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("cancel_future", {"request_id": "s:sample:0:0"}),
        ("sessions/of-nobody/finish", {"reason": {"type": "success"}}),
    ],
)
async def test_an_error_that_nobody_foresaw_is_answered_and_counted_whether_or_not_a_path_has_parameters(
    talks: Talking, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    async def broken(*given: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(talks.gateway.application.sampling, "cancel", broken)
    monkeypatch.setattr(talks.gateway.application.sessions, "finish", broken)
    route = "/api/v1/" + path.replace("of-nobody", "{session_id}")
    before = seen(route, "500")
    async with httpx.AsyncClient(base_url=f"{talks.url}/api/v1", headers={"x-api-key": ALICE}) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (500, "internal"), answer.text
    assert "ZeroDivisionError" in answer.json()["detail"]
    assert seen(route, "500") - before == 1
