"""Every method of both protocols, for every kind of caller.

The table goes to docs/security.md: `make test-security` compares it, WRITE=1 writes it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from services.common.contract import ids
from services.common.state.poison import Poison
from services.gateway.audit.pages import Window
from services.gateway.audit.record import REFUSED, of_type
from services.gateway.edge.anthropic import routes as anthropic
from services.gateway.edge.http.server import TABLE
from services.gateway.edge.openai import routes as openai
from services.gateway.identity import door
from services.gateway.identity.key import Rights
from services.gateway.identity.rights import NEEDS
from tests.security import grpc_rows, http_rows
from tests.security.matrix import CALLERS, SCOPED, SCOPES, Row, World, table, told
from tests.unit.gateway.edges import ALICE, BASE, BOB, ROOT, Edges, new_model, new_session, running
from tests.unit.gateway.saved import export, save, save_sampler, url
from tinsmith.v1 import admin_pb2, admin_pb2_grpc, service_pb2, service_pb2_grpc

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN = "<!-- From here to the next heading written by `make test-security WRITE=1`. -->\n"
ROWS = [*grpc_rows.ROWS, *http_rows.ROWS]
_KEYS = {"another owner": BOB, "another owner, published": BOB, "admin": ROOT, "its owner": ALICE}


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edges]:
    # Refusals are slowed; here are hundreds.
    monkeypatch.setattr(door, "_PAUSE_S", 0.0)
    async with running(redis_url, tmp_path) as found:
        yield found


def served() -> set[str]:
    """The methods of both protocols, but for the few that take no key."""
    routes = [*TABLE, *openai.TABLE, *anthropic.TABLE]
    services = [service_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR]
    return {f"{verb} {path}" for verb, path, _ in routes} | {
        method.name
        for file in services
        for service in file.services_by_name.values()
        for method in service.methods
    }


def test_every_method_that_is_served_has_its_needs_and_its_row() -> None:
    rows = [row.method for row in ROWS]
    assert len(rows) == len(set(rows))
    assert set(rows) == served()
    # Reflection is gRPC's own, and takes any key.
    assert set(NEEDS) == served() | {"ServerReflectionInfo"}


async def caller_keys(edges: Edges) -> dict[str, str]:
    """An API key for each kind of caller, from where such keys come from."""
    store = edges.app.key_store
    revoked, revoked_key = await store.create(Rights("alice"))
    await store.revoke(revoked.id)
    expired, expired_key = await store.create(Rights("alice"))
    await store.rotate(expired.id, 1e-6)
    _, reading = await store.create(Rights("alice", "read"))
    limited = {scope: (await store.create(Rights("alice", scopes=(scope,))))[1] for scope in SCOPES}
    await edges.app.keys.look()
    return {
        "no key": "",
        "wrong key": "tml-wrong",
        "revoked key": revoked_key,
        "expired key": expired_key,
        "read-only key": reading,
        **limited,
        **_KEYS,
    }


async def world(edges: Edges, published: bool) -> World:
    """What alice has."""
    async with edges.http() as client:
        model = await new_model(edges, client)
        weights = await save(edges, client, model, 1, "a")
        await save_sampler(edges, client, model, 2, "s")
        exported = await export(edges, client, model, 3, "e")
        session, sampler = ids.session_of(model), ids.tinker_path(model, "sampler_weights/s")
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        reply = await client.post("create_sampling_session", json=opened)
        made = World(session, model, weights, sampler, exported, reply.json()["sampling_session_id"], "")
        reply = await client.post("asample", json=http_rows.sample(made))
        for path in (weights, sampler, exported) if published else ():
            assert (await client.post(f"{url(path)}/publish")).status_code == 200
    keys = {name: (await edges.app.key_store.create(Rights("x")))[0].id for name in ("revoke", "rotate")}
    noted = Poison(edges.redis)
    noted.note(f"tinsmith:{session}", "a test says so")
    await noted.write()
    about = {**keys, "unreadable": f"tinsmith:{session}"}
    return dataclasses.replace(made, request=reply.json()["request_id"], admin=about)


async def over_http(client: httpx.AsyncClient, row: Row, asked: World) -> str:
    path, body, headers = row.ask(asked)
    sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    verb = row.method.partition(" ")[0]
    at = client.base_url.copy_with(raw_path=b"/").join(f"{row.before}{path}")
    reply = await client.request(verb, at, headers=headers, **({} if body is None else sent))
    return str(reply.status_code)


async def over_grpc(channel: grpc.aio.Channel, row: Row, asked: World, key: str, waits: bool) -> str:
    stubs = (service_pb2_grpc.TinsmithServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel))
    method = next(getattr(stub, row.method) for stub in stubs if hasattr(stub, row.method))
    metadata = (("x-api-key", key),) if key else ()
    slow = waits and (row.lasts or row.through == "DEADLINE_EXCEEDED")
    call = method(row.ask(asked), timeout=4 if slow else 120, metadata=metadata)
    known = {"UNAUTHENTICATED": "401", "PERMISSION_DENIED": "403", "NOT_FOUND": "404"}
    try:
        if not isinstance(call, grpc.aio.UnaryStreamCall):
            await call
            return "200"
        async for part in call:
            # A stream of results tells of each what became of it.
            if row.method == "ReadResults" and part.HasField("error"):
                return {"not_found": "404"}.get(part.error.code, part.error.code)
        return "200"
    except grpc.aio.AioRpcError as error:
        return known.get(error.code().name, error.code().name)


async def outcomes(edges: Edges, rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """What every caller is answered."""
    keys = await caller_keys(edges)
    private, public = await world(edges, published=False), await world(edges, published=True)
    found = {}
    async with grpc.aio.insecure_channel(edges.grpc_address) as channel, AsyncExitStack() as open_clients:
        clients = {
            caller: await open_clients.enter_async_context(edges.http(key)) for caller, key in keys.items()
        }

        async def ask(row: Row, asked: World, caller: str, waits: bool) -> str:
            if row.protocol == "HTTP":
                return await over_http(clients[caller], row, asked)
            return await over_grpc(channel, row, asked, keys[caller], waits)

        sessions = {caller: await new_session(clients[caller]) for caller in _KEYS}
        for row in rows:
            mine = await world(edges, published=False) if row.fresh else private
            for caller in CALLERS:
                asked = public if caller == "another owner, published" else mine
                if row.in_own_session:
                    asked = dataclasses.replace(asked, session=sessions.get(caller, asked.session))
                found[row.method, caller] = await ask(row, asked, caller, caller == "its owner")
            for scope in SCOPES:
                # After its owner, for whom what is fresh was kept: all that counts is whether it is let in.
                outcome = await ask(row, mine, scope, row.lets_in(scope))
                found[row.method, scope] = "403" if outcome == "403" else "yes"
    return found


async def test_every_caller_is_answered_as_the_table_says(edges: Edges) -> None:
    found = await outcomes(edges, ROWS)
    expected = {(row.method, caller): row.expected(caller) for row in ROWS for caller in CALLERS}
    expected |= {
        (row.method, scope): "yes" if row.lets_in(scope) else "403" for row in ROWS for scope in SCOPES
    }
    wrong = {at: (found[at], expected[at]) for at in expected if found[at] != expected[at]}
    assert not wrong, "is, should be:\n" + "\n".join(f"{at}: {both}" for at, both in sorted(wrong.items()))
    assert await refused(edges) == Counter(found.values())["401"] + Counter(found.values())["403"]
    counts = Counter(told(outcome) for outcome in found.values())
    sys.stdout.write(f"\n{len(ROWS)} methods, {len(found)} calls: {dict(sorted(counts.items()))}\n")
    _compare_with_page(table(ROWS, found))


async def refused(edges: Edges) -> int:
    """How many calls that were refused for who made them are written down."""
    await edges.app.audit.tell_refusals()
    await edges.app.audit.flush()
    page = await edges.app.audit_store.page(None, Window(), 10_000, None, of_type("all"), False)
    refusals = [one for one in page.records if one.event == REFUSED or one.outcome == "permission_denied"]
    # However many they are, the records of them are few.
    assert len(refusals) < 100
    return sum(one.count for one in refusals)


def _compare_with_page(text: str) -> None:
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    assert begin, f"{PAGE} has no place for the table"
    after = rest.partition("\n## ")
    whole = f"{before}{begin}{text}{''.join(after[1:])}"
    if os.environ.get("TINSMITH_WRITE_MATRIX"):
        PAGE.write_text(whole)
    assert whole == PAGE.read_text(), "run: make test-security WRITE=1"


def test_role_read_is_expected_to_be_refused_where_something_is_written() -> None:
    for row in ROWS:
        assert (row.expected("read-only key") == "403") == NEEDS[row.method].writes or row.through == "403"


def test_what_is_scoped_is_served() -> None:
    scoped = [method.strip() for names in SCOPED.values() for method in names.split("|")]
    assert len(scoped) == len(set(scoped))
    assert set(scoped) <= served()
