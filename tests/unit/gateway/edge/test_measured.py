"""HTTP requests are counted under their routes."""

from __future__ import annotations

from prometheus_client import REGISTRY

from tests.unit.gateway.edges import Edges


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
