"""HTTP: exports and their signed downloads."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import httpx
import pyrage
import pytest

from services.common.state import keys
from services.common.storage.base import Key
from services.gateway.access.limits import Limits
from services.gateway.identity.key import Rights
from tests.unit.gateway.edges import BOB, Edges, new_model
from tests.unit.gateway.saved import CONTENT, export, failure, files, save, url


@pytest.fixture
def limits() -> Limits:
    return Limits(min_ttl_seconds=1)


async def urls(client: httpx.AsyncClient, path: str) -> dict[str, str]:
    response = await client.get(f"{url(path)}/external_weights_urls")
    assert response.status_code == 200, response.text
    assert response.json()["expires"].endswith("+00:00")
    return response.json()["urls"]


@pytest.mark.parametrize("name", ["e", "_best,epoch=3+v1.0@a~b"])
async def test_an_export_is_downloaded_by_its_signed_url_without_a_key(edges: Edges, name: str) -> None:
    async with edges.http() as client, httpx.AsyncClient() as anyone:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, name)
        assert (await client.get(url(path))).status_code == 405
        signed = await urls(client, path)
        assert list(signed) == ["adapter.safetensors"]
        response = await anyone.get(signed["adapter.safetensors"])
        assert (response.status_code, response.content) == (200, CONTENT)
        assert response.headers["content-length"] == str(len(CONTENT))
        assert (await client.delete(url(path))).status_code == 200
        assert (await anyone.get(signed["adapter.safetensors"])).status_code == 404


async def test_only_what_a_signature_names_is_served_and_only_for_its_time(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other, httpx.AsyncClient() as anyone:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        await export(edges, client, model, 2, "f")
        good = urlsplit((await urls(client, path))["adapter.safetensors"])
        query = {name: values[0] for name, values in parse_qs(good.query).items()}

        async def status(path: str = good.path, **changes: str) -> int:
            changed = good._replace(path=path, query=urlencode({**query, **changes}))
            return (await anyone.get(urlunsplit(changed))).status_code

        assert await status() == 200
        assert await status(signature="0" * 64) == 403
        assert await status(signature="") == 403
        assert await status(expires=str(int(query["expires"]) + 1)) == 403
        assert await status(expires="x") == 403
        assert await status(good.path.replace("/e/1/", "/f/2/")) == 403
        assert await status(good.path.replace("adapter.safetensors", "other")) == 403
        assert await status(good.path.replace("adapter.safetensors", "..%2f..%2f..%2fkeys")) in (403, 404)
        assert await status(good.path.replace("/e/1/", "/e/x/")) == 404
        assert await status(good.path.replace("/e/1/", f"/e/{'1' * 5000}/")) == 404
        assert (await other.get(f"{url(path)}/external_weights_urls")).status_code == 404
        weights = url(await save(edges, client, model, 3, "a"))
        assert (await client.get(f"{weights}/external_weights_urls")).status_code == 400


async def test_a_signature_ends_with_its_time(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    async with edges.http() as client, httpx.AsyncClient() as anyone:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        monkeypatch.setattr("services.gateway.identity.signed_urls.URL_S", -1)
        response = await anyone.get((await urls(client, path))["adapter.safetensors"])
        assert (response.status_code, response.json()["code"]) == (403, "url_expired")


async def test_all_signatures_end_with_the_secret_that_made_them(edges: Edges) -> None:
    async with edges.http() as client, httpx.AsyncClient() as anyone:
        path = await export(edges, client, await new_model(edges, client), 1, "e")
        old = (await urls(client, path))["adapter.safetensors"]
        assert (await anyone.get(old)).status_code == 200
        await edges.redis.delete(keys.DOWNLOAD_SECRET)
        assert (await anyone.get(old)).status_code == 403
        assert (await anyone.get((await urls(client, path))["adapter.safetensors"])).status_code == 200


async def test_a_signature_for_a_deleted_export_does_not_name_the_next_one(edges: Edges) -> None:
    async with edges.http() as client, httpx.AsyncClient() as anyone:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        old = (await urls(client, path))["adapter.safetensors"]
        assert (await client.delete(url(path))).status_code == 200
        # As if the files could not be removed yet.
        edges.files.storage.publish(Key(model, "external_weights/e", 1), files())
        assert await export(edges, client, model, 2, "e") == path
        assert (await anyone.get(old)).status_code == 404
        assert (await anyone.get((await urls(client, path))["adapter.safetensors"])).status_code == 200


async def test_recipients_of_an_export_are_checked_before_it_runs(edges: Edges) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    async with edges.http() as client:
        model = await new_model(edges, client)
        wrong: list[dict[str, Any]] = [
            {"age_encryption_recipients": ["age1nonsense"]},
            {"age_encryption_recipients": [key] * 11},
            {"path": "../x"},
            {"path": "a/b"},
            {"ttl_seconds": 0},
        ]
        for seq_id, fields in enumerate(wrong, start=1):
            body = {"model_id": model, "seq_id": seq_id, "path": "e", **fields}
            assert (await client.post("save_weights_external", json=body)).status_code == 200
            assert (await failure(client, model, seq_id))["category"] == "user"
        await export(edges, client, model, 6, "e", age_encryption_recipients=[key])
        operation = await edges.operation(model, 6)
        assert operation is not None
        result = await failure(client, model, 6)
        assert result == {"path": f"tinker://{model}/external_weights/e", "size_bytes": len(CONTENT)}
        body = {"model_id": model, "seq_id": 7, "path": "e"}
        await client.post("save_weights_external", json=body)
        assert "exists" in (await failure(client, model, 7))["error"]


async def test_behind_a_proxy_links_begin_with_the_public_url(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        edges.app.signed_urls.public_url = "https://tinsmith.example.com/base"
        (link,) = (await urls(client, path)).values()
        assert link.startswith("https://tinsmith.example.com/base/api/v1/")


async def test_a_url_ends_with_the_key_that_asked_for_it(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
    record, key = await edges.app.key_store.create(Rights("alice", "read"))
    _, other = await edges.app.key_store.create(Rights("alice"))
    await edges.app.keys.look()
    async with edges.http(key) as client, edges.http(other) as second, httpx.AsyncClient() as anyone:
        link = (await urls(client, path))["adapter.safetensors"]
        staying = (await urls(second, path))["adapter.safetensors"]
        assert (await anyone.get(link)).status_code == 200
        await edges.app.key_store.revoke(record.id)
        await edges.app.keys.look()
        ended = await anyone.get(link)
        assert (ended.status_code, ended.json()["code"]) == (403, "url_expired")
        assert (await anyone.get(staying)).status_code == 200
        # The key is part of what is signed.
        assert (await anyone.get(link.replace(record.id, staying.split("key=")[1][:12]))).status_code == 403


async def test_another_owners_url_ends_with_the_publication(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other, httpx.AsyncClient() as anyone:
        model = await new_model(edges, client)
        path = await export(edges, client, model, 1, "e")
        assert (await client.post(f"{url(path)}/publish")).status_code == 200
        theirs = (await urls(other, path))["adapter.safetensors"]
        mine = (await urls(client, path))["adapter.safetensors"]
        assert (await anyone.get(theirs)).status_code == 200
        assert (await client.delete(f"{url(path)}/publish")).status_code == 200
        assert (await anyone.get(theirs)).status_code == 404
        assert (await anyone.get(mine)).status_code == 200
