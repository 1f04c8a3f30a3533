"""HTTP: waiting for results.

Invariant: a poll is never answered fast without a result: the SDK polls again at once after 408
and 5xx, so a pending future is held for up to LONG_POLL_SECONDS and trouble of ours is 429,
after which the SDK waits.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TypeVar

from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from services.common.contract.errors import Overloaded, TinsmithError
from services.common.contract.ids import parse_request_id
from services.common.process import redis_errors
from services.common.process.pools import COMPUTE
from services.common.telemetry.repeats import Repeats
from services.gateway.access.limits import (
    ACKNOWLEDGING_POLL_SECONDS,
    COMPLETIONS_POLL_SECONDS,
    LONG_POLL_SECONDS,
    THREAD_ABOVE_BYTES,
)
from services.gateway.edge.http.codec import messages, results_out
from services.gateway.edge.http.routes import Call, Sent, reply
from services.gateway.records.sample_journal import Completion
from services.gateway.results.futures import FutureView
from services.gateway.sampling.completions import Target

log = logging.getLogger(__name__)

_UNFORESEEN = Repeats(log, "a poll failed")

T = TypeVar("T")


async def retrieve_future(call: Call) -> Response:
    body = await call.json(messages.RetrieveFuture)
    with _TroubleIs429(), ExitStack() as held:
        view = await call.app.found_result(call.owner, body.request_id, held)
        if view is None:
            waiting = call.app.wait_result(call.owner, body.request_id, LONG_POLL_SECONDS, held)
            view = await call.while_there(waiting)
        if view.result is None:
            return pending(view)
        return await finished(body.request_id, view.result, held)


async def retrieve_futures(call: Call) -> Response:
    """Which samples of a sampling client are resolved; their results are fetched with retrieve_future."""
    with _TroubleIs429():
        target, cursor, seconds = await _awaited(call)
        page = await call.while_there(call.app.wait_completions(call.owner, target, cursor, seconds))
    return reply({"completions": [_completion(found) for found in page.completions], "cursor": page.cursor})


async def _awaited(call: Call) -> tuple[Target, int, float]:
    """What a poll waits for, after which cursor and for how long. It names any number of results that its
    client has: they are let go first, so none of that is held while it waits."""
    async with call.read(messages.RetrieveFutures) as body:
        target = Target(body.target.sampling_session_id, body.target.cloned_sampler_id)
        await call.app.free_completions(call.owner, target, body.retrieved_request_ids)
        least, most = ACKNOWLEDGING_POLL_SECONDS, COMPLETIONS_POLL_SECONDS
        seconds = most if body.timeout is None else min(max(body.timeout, least), most)
        return target, body.prev_cursor, seconds


def _completion(found: Completion) -> dict[str, object]:
    told: dict[str, object] = {"state": found.state, "request_id": found.request_id}
    if found.state == "finished":
        told["response_payload_uncompressed_size"] = found.size
    return told


async def cancel_future(call: Call) -> Response:
    body = await call.json(messages.CancelFuture)
    await call.app.sampling.cancel(call.owner, body.request_id)
    return reply({})


class _TroubleIs429:
    """Not a generator: every result is fetched in one."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ClientDisconnect):
            return
        if isinstance(error, TinsmithError):
            if error.category == "user":
                return
            raise Overloaded(error.message) from error
        if isinstance(error, RedisError):
            raise Overloaded(redis_errors.typed(error).message) from error
        _UNFORESEEN.failed("retrieve_future", error, foreseen=False)
        raise Overloaded(f"{type(error).__name__} in this gateway; its log says more") from error


def pending(view: FutureView) -> Response:
    """408, which the SDK takes as "ask again"."""
    state: dict[str, str] = {"queue_state": view.queue_state}
    if view.queue_state_reason:
        state["queue_state_reason"] = view.queue_state_reason
    return reply(state, 408)


async def finished(request_id: str, result: bytes, held: ExitStack) -> Response:
    """The result in the SDK's form. With it goes what is held, until the client has it."""
    object_id, _ = parse_request_id(request_id)
    if len(result) > THREAD_ABOVE_BYTES:
        answer = await COMPUTE.run(results_out.result, object_id, result)
    else:
        answer = results_out.result(object_id, result)
    return Sent(answer.body, 200, answer.content_type, held.pop_all())
