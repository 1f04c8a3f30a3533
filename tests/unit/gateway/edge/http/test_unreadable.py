"""A request that cannot be read still uses up its seq_id, when its beginning tells whose it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import zstandard
from starlette.requests import Request
from starlette.types import Message

from services.common.contract.errors import TooLarge
from services.gateway.access.body_budget import Account
from services.gateway.access.limits import Limits
from services.gateway.access.shares import Shares
from services.gateway.edge.http.body import end_of, received, skimmed
from services.gateway.edge.http.codec import head
from services.gateway.edge.http.server import TABLE
from tests.unit.gateway.edge.http.batches import PROTO, batch, failure, raising
from tests.unit.gateway.edges import ALICE, BOB, Edges, new_model
from tinsmith.internal.v1 import tinker_pb2

LIMIT = 32_000


@pytest.fixture
def limits() -> Limits:
    return Limits(
        json_body_bytes=LIMIT,
        sample_body_bytes=LIMIT,
        training_body_bytes=LIMIT,
        inflated_body_bytes=2 * LIMIT,
    )


ZSTD = {**PROTO, "content-encoding": "zstd"}


def unreadable(model: str) -> dict[str, tuple[bytes, dict[str, str], str]]:
    """What is wrong: (body, headers, what the answer says)."""
    whole = batch(model, 1, [1, 2, 3])
    return {
        "too large": (whole + b"\x22\x7f" + bytes(LIMIT), PROTO, "takes at most"),
        "too large when decompressed": (
            zstandard.compress(whole + b"\x22\x7f" + bytes(3 * LIMIT)),
            ZSTD,
            "when decompressed",
        ),
        "followed by more": (zstandard.compress(whole) + b"more", ZSTD, "zstd"),
        "of another content type": (whole, {"content-type": "text/plain"}, "content-type"),
        "of another encoding": (whole, {**PROTO, "content-encoding": "gzip"}, "gzip"),
        "cut off": (whole[:-5], PROTO, "cannot be read"),
        "with a field nobody knows": (whole + b"\xf8\x07\x01", PROTO, "127"),
    }


@pytest.mark.parametrize("wrong", unreadable(""))
async def test_a_batch_that_cannot_be_read_fails_and_the_next_request_is_next(
    edges: Edges, wrong: str
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body, headers, says = unreadable(model)[wrong]
        for _ in range(2):
            response = await client.post("forward_backward", content=body, headers=headers)
            assert response.json() == {"request_id": f"{model}:1", "model_id": model}, response.text
        assert says in await failure(client, f"{model}:1")


@pytest.mark.parametrize(
    "tail",
    [
        '"adam_params": {"learning_rate": NaN}}',
        '"adam_params": {"learning_rate": Infinity}}',
        '"adam_params": {"learning_rate": 1e999}}',
        '"adam_params": {"learning_rate": ' + "9" * 5000 + "}}",
        '"adam_params": ' + '{"a":' * 5000 + "1" + "}" * 5001,
        '"optimizer_params": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '"type": "' + "x" * LIMIT + '"}',
        '"adam_params": {"learning_rate": 1',
    ],
    ids=["nan", "infinity", "huge float", "huge integer", "deep", "deep any", "too large", "cut off"],
)
async def test_json_that_cannot_be_read_uses_up_its_seq_id(edges: Edges, tail: str) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = f'{{"seq_id": 1, "model_id": "{model}", {tail}'
        response = await client.post("optim_step", content=body)
        assert response.status_code == 200, response.text
        assert await failure(client, f"{model}:1")


async def test_somebody_elses_seq_id_is_not_used_up(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        broken = f'{{"model_id": "{model}", "seq_id": 1, "x": NaN}}'
        assert (await other.post("optim_step", content=broken)).status_code == 404
        response = await other.post("forward_backward", content=batch(model, 1, [1])[:-1], headers=PROTO)
        assert response.status_code == 404
        sent = await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        assert sent.status_code == 200
        assert (await edges.operation(model, 1)) is not None


async def test_a_client_that_goes_away_within_its_body_is_no_fault_of_ours(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(edges.base_url)
    _, writer = await asyncio.open_connection(address.host, address.port)
    lines = ("POST /api/v1/retrieve_futures HTTP/1.1", "host: x", f"x-api-key: {ALICE}", "content-length: 90")
    writer.write("\r\n".join([*lines, "", '{"request']).encode())
    await writer.drain()
    await asyncio.sleep(0.3)
    writer.close()
    await asyncio.sleep(0.5)
    assert "Exception in ASGI application" not in caplog.text


async def test_of_a_body_whose_last_part_is_too_much_the_end_is_known() -> None:
    parts: list[Message] = [
        {"type": "http.request", "body": b"x" * 100, "more_body": True},
        {"type": "http.request", "body": b'"seq_id": 1}', "more_body": False},
    ]

    async def receive() -> Message:
        return parts.pop(0)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(TooLarge):
        await received(request, Account("alice", Shares(10**6), Shares(10**6)), 100)
    await skimmed(request, LIMIT)
    assert end_of(request).endswith(b'"seq_id": 1}')


POSTS = [path for method, path, _ in TABLE if method == "POST" and "{" not in path]


@pytest.mark.parametrize("path", POSTS)
async def test_no_json_makes_a_route_fail(edges: Edges, path: str) -> None:
    bodies = [
        '{"a":' * 5000 + "1" + "}" * 5000,
        '{"user_metadata": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"session_id": NaN}',
        '{"session_id": "\\ud800", "tags": [], "display_name": "\\udfff", "sdk_version": "\\ud800"}',
        '{"session_id": "\ufffe\\u0000", "model_id": "\\u0000"}',
        '{"request_id": ' + "9" * 6000 + "}",
        '{"' + "k" * 20_000 + '": 1}',
    ]
    async with edges.http() as client:
        for body in [*(body.encode() for body in bodies), b'{"session_id": "\xff"}', b"\xff\xfe", b""]:
            response = await client.post(path, content=body)
            assert response.status_code < 500, (path, body[:80], response.text[:300])
            assert len(response.content) < 4096


async def test_a_fault_of_ours_in_a_poll_is_429_which_the_sdk_waits_after(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        monkeypatch.setattr(edges.app.futures, "wait", raising(KeyError("a bug")))
        response = await client.post("retrieve_future", json={"request_id": f"{model}:0"})
    assert response.status_code == 429


def test_the_place_is_that_of_the_outermost_object() -> None:
    body = b'{"x": {"model_id": "no", "seq_id": 7}, "seq_id" : 3, "y": ["seq_id", 9], "model_id":"s:train:0",'
    assert head.in_json(body) == ("s:train:0", 3)
    assert head.in_json(json.dumps({"seq_id": 12, "model_id": "a"}).encode()) == ("a", 12)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model_id": "a"}',
        b'{"model_id": "a", "seq_id": 1',
        b'{"model_id": "a", "seq_id": 1.5}',
        b'{"model_id": 1, "seq_id": 1}',
        b'{"model_id": "a\\"b", "seq_id": 1}',
        b'{"pad": "' + b"x" * 1024 + b'", "model_id": "a", "seq_id": 1}',
    ],
)
def test_nothing_is_guessed_from_json_that_does_not_tell(body: bytes) -> None:
    assert head.in_json(body) is None


ENDS = [
    # What the SDK's versions 0.20 and 0.21 end with: httpx writes JSON without blanks since 0.28.
    '"model_id":"s:train:0","seq_id":7}',
    '"model_id": "s:train:0", "seq_id": 7}',
    '"seq_id" : 7 , "type":"forward","path":null,"model_id":"s:train:0" }\n',
]


@pytest.mark.parametrize("end", ENDS)
def test_the_place_is_also_found_at_the_end(end: str) -> None:
    body = ('{"forward_input":{"data":[{"a":[NaN,"' + "x" * 5000 + '\\"]"]}]},' + end).encode()
    assert head.in_json(body[:1024]) is None
    assert head.in_json(body[:1024], body[-1024:]) == ("s:train:0", 7)
    assert head.in_json(b'{"model_id":"s:train:0","x":{', b'x"}, "seq_id": 7}') == ("s:train:0", 7)


@pytest.mark.parametrize(
    "end",
    [
        '"model_id":"s:train:0","seq_id":7',
        '"model_id":"s:train:0","seq_id":7}}',
        '"model_id":"s:train:0","seq_id":7}]}',
        '"model_id":"s:train:0","seq_id":7},"x":[1]}',
        '"model_id":"s:train:0","seq_id":7.5}',
        '"x":",\\"model_id\\":\\"s:train:0\\",\\"seq_id\\":7}"}',
        '"model_id":"s:train:0","seq_id":7}' + " " * 1024,
        '"seq_id":7}',
    ],
)
def test_nothing_is_guessed_from_an_end_that_does_not_tell(end: str) -> None:
    body = ('{"pad":"' + "x" * 5000 + '",' + end).encode()
    assert head.in_json(body[:1024], body[-1024:]) is None


def forward_body(model: str, data: str, blank: str = "") -> bytes:
    """A forward as SDKs before 0.22 send it."""
    return (
        f'{{"forward_input":{blank}{{"data":{blank}[{data}],"loss_fn":{blank}"cross_entropy"}},{blank}'
        f'"model_id":{blank}"{model}",{blank}"seq_id":{blank}1}}'
    ).encode()


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    "data",
    ["NaN", "1e999,-Infinity", ",".join(["1.25"] * LIMIT)[: LIMIT + 5000], "[" * 5000 + "]" * 5000],
    ids=["nan", "infinite", "large", "deep"],
)
async def test_a_forward_of_an_old_sdk_uses_up_its_seq_id_whatever_is_in_it(
    edges: Edges, data: str, blank: str
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for _ in range(2):
            response = await client.post("forward", content=forward_body(model, data, blank))
            assert response.json() == {"request_id": f"{model}:1", "model_id": model}, response.text
        assert await failure(client, f"{model}:1")
        assert edges.app.budget.used == 0


async def test_a_forward_that_is_larger_than_any_batch_is_refused(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = forward_body(model, ",".join(["1.25"] * 8 * LIMIT))
        assert (await client.post("forward", content=body)).status_code == 413

        async def pieces() -> AsyncIterator[bytes]:
            yield body[:LIMIT]
            # What has come when it is refused ends like a request.
            yield b'"seq_id":1}'
            yield body[LIMIT:]

        assert (await client.post("forward", content=pieces())).status_code == 413
        assert await edges.operation(model, 1) is None
        assert (await client.post("forward", content=b"no JSON at all")).status_code == 400


async def test_a_save_whose_name_is_too_long_to_see_over_uses_up_its_seq_id(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = f'{{"path": "{"x" * 2000}", "overwrite": NaN, "model_id": "{model}", "seq_id": 1}}'
        response = await client.post("save_weights", content=body)
        assert response.json() == {"request_id": f"{model}:1", "model_id": model}, response.text


def test_the_place_of_a_message_is_read_from_its_first_fields() -> None:
    kind = tinker_pb2.TinkerForwardBackwardRequest
    whole = kind(model_id="s:train:0", seq_id=300, loss_fn="x").SerializeToString()
    assert head.in_message(whole) == ("s:train:0", 300)
    for end in range(len(kind(model_id="s:train:0", seq_id=300).SerializeToString())):
        assert head.in_message(whole[:end]) is None
    for other in (b"\xff" * 50, b"", b"{}", kind(seq_id=1).SerializeToString(), b"\x0a\x02\xff\xff\x10\x01"):
        assert head.in_message(other) is None
