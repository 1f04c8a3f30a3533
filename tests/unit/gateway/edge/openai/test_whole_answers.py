"""What was generated reaches its client."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.edge.http.routes import Call, reply
from services.gateway.edge.inference.endpoint import endpoint
from services.gateway.edge.openai import answers
from tests.unit.gateway.edge.talking import ALICE, Talking


async def test_a_large_text_is_answered_also_while_other_answers_of_its_key_wait(talks: Talking) -> None:
    app = talks.gateway.application

    async def whole(call: Call) -> Response:
        return reply({"text": "x" * 300_000})

    answer = endpoint(app, "POST completions", whole, answers.error)
    headers = [(b"authorization", f"Bearer {ALICE}".encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    with app.answers.account("alice") as one, app.answers.account("alice") as another:
        await one.take(app.answers.largest - 1)
        waits = asyncio.create_task(another.take(app.answers.largest - 1))
        await asyncio.sleep(0)
        assert (await answer(Request(scope))).status_code == 200
        waits.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waits
