"""HTTP: a session's timeline by a signed URL."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from services.gateway.identity.key import Rights
from services.gateway.timelines.event import Event
from tests.unit.gateway.edges import BOB, Edges, new_session
from tests.unit.gateway.timelines.test_perfetto import read


async def test_a_timeline_is_downloaded_by_its_signed_url_without_a_key(edges: Edges) -> None:
    async with edges.http() as client, httpx.AsyncClient() as anyone:
        session = await new_session(client)
        edges.app.timelines.note("alice", Event(f"{session}:train:0", 1, "optim_step", 1.0, 2.0, 3.0))
        await edges.app.timelines.flush()
        answer = (await client.get(f"sessions/{session}/trace_export")).json()
        assert answer["status"] == "ready"
        found = await anyone.get(answer["url"])
        assert found.status_code == 200
        assert f'filename="{session}.pftrace"' in found.headers["content-disposition"]
        _, slices = read(found.content)
        assert [one.name for one in slices] == ["runs", "optim_step"]


async def test_only_the_owner_has_a_url_and_it_names_one_session(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other, httpx.AsyncClient() as anyone:
        mine, next_one = await new_session(client), await new_session(client)
        assert (await other.get(f"sessions/{mine}/trace_export")).status_code == 404
        url = (await client.get(f"sessions/{mine}/trace_export")).json()["url"]
        assert (await anyone.get(url.replace(mine, next_one))).status_code == 403
        assert (await anyone.get(url.partition("?")[0])).status_code == 403
        unsigned = urlsplit(url)._replace(query="expires=9999999999&key=x&signature=y").geturl()
        assert (await anyone.get(unsigned)).status_code == 403


async def test_a_url_ends_with_the_key_that_asked_for_it(edges: Edges) -> None:
    record, key = await edges.app.key_store.create(Rights("alice"))
    async with edges.http(key) as client, httpx.AsyncClient() as anyone:
        await edges.app.keys.look()
        session = await new_session(client)
        url = (await client.get(f"sessions/{session}/trace_export")).json()["url"]
        assert (await anyone.get(url)).status_code == 200
        await edges.app.key_store.revoke(record.id)
        await edges.app.keys.look()
        ended = await anyone.get(url)
        assert (ended.status_code, ended.json()["code"]) == (403, "url_expired")
