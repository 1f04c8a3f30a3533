"""HTTP: waiting for results.

Invariant: a poll is never answered fast without a result: the SDK polls again at once after 408
and 5xx, so a pending future is held for up to LONG_POLL_SECONDS and trouble of ours is 429,
after which the SDK waits.
"""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError
from starlette.responses import Response

from services.common.errors import Overloaded, TinsmithError
from services.common.ids import parse_request_id
from services.gateway.futures import FutureView
from services.gateway.http import encode, messages
from services.gateway.http.routes import Call, reply
from services.gateway.limits import LONG_POLL_SECONDS, THREAD_ABOVE_BYTES


async def retrieve_future(call: Call) -> Response:
    body = await call.json(messages.RetrieveFuture)
    try:
        view = await call.app.wait_result(call.owner, body.request_id, LONG_POLL_SECONDS)
        if view.result is None:
            return pending(view)
        return await finished(body.request_id, view.result)
    except TinsmithError as error:
        if error.category == "user":
            raise
        raise Overloaded(error.message) from error
    except RedisError as error:
        raise Overloaded(f"the state store cannot be reached: {error}") from error


def pending(view: FutureView) -> Response:
    """408, which the SDK takes as "ask again"."""
    state: dict[str, str] = {"queue_state": view.queue_state}
    if view.queue_state_reason:
        state["queue_state_reason"] = view.queue_state_reason
    return reply(state, 408)


async def finished(request_id: str, result: bytes) -> Response:
    """The result in the SDK's form."""
    object_id, _ = parse_request_id(request_id)
    if len(result) > THREAD_ABOVE_BYTES:
        answer = await asyncio.to_thread(encode.result, object_id, result)
    else:
        answer = encode.result(object_id, result)
    return Response(answer.body, media_type=answer.content_type)
