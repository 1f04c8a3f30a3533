"""The application layer: everything a client can do, free of any transport.

HTTP and gRPC are two thin edges over one `Application`. Invariant: nothing here keeps state that
another gateway would need; what is kept is caches of records that no longer change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from services.common import ids
from services.common.errors import Gone, InvalidRequest, NotFound
from services.common.journal import Journal
from services.gateway.auth import KeyRing
from services.gateway.catalog import Catalog
from services.gateway.futures import Futures, FutureView
from services.gateway.limits import Limits
from services.gateway.models import Models
from services.gateway.sampling import Sampling
from services.gateway.sessions import Sessions
from services.gateway.stores import CheckpointStore, ModelStore, SamplingSessionStore, SessionStore
from tinsmith.v1 import sampler_pb2


@dataclass(frozen=True)
class Application:
    """What the edges call. Every method takes the owner that `keys` found for the caller."""

    keys: KeyRing
    catalog: Catalog
    sessions: Sessions
    models: Models
    sampling: Sampling
    futures: Futures
    limits: Limits
    draining: asyncio.Future[None]

    async def wait_result(self, owner: str, request_id: str, seconds: float) -> FutureView:
        """The state of a future: as soon as it is resolved, at the latest after `seconds`.

        Returns early, as pending, when this gateway drains: another one can be asked.

        Raises:
            NotFound: the model or request does not exist, or the result expired.
            Gone: the same of a sample, which may simply be sampled anew.
            PermissionDenied: somebody else's.
        """
        try:
            object_id, _ = ids.parse_request_id(request_id)
        except InvalidRequest as error:
            raise NotFound(error.message) from error
        sample = ids.is_sampling_session_id(object_id)
        if sample:
            try:
                await self.sampling.get(owner, object_id)
            except NotFound as error:
                raise Gone(error.message) from error
        else:
            await self.models.get(owner, object_id)
        view = await self._wait(request_id, seconds)
        if view.state == "unknown":
            message = f"request {request_id} does not exist, or its result expired"
            raise Gone(message) if sample else NotFound(message)
        return view

    async def _wait(self, request_id: str, seconds: float) -> FutureView:
        waiting = asyncio.ensure_future(self.futures.wait(request_id, seconds))
        ends: set[asyncio.Future[Any]] = {waiting, self.draining}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return await self.futures.wait(request_id, 0)
            return waiting.result()
        finally:
            waiting.cancel()

    def drain(self) -> None:
        """Ends all waiting, so that clients turn to another gateway."""
        if not self.draining.done():
            self.draining.set_result(None)


def build(
    gateway_id: str,
    client: redis.asyncio.Redis,
    keys: KeyRing,
    wake: Callable[[str], None],
    submit: Callable[[str, sampler_pb2.SampleRequest], Awaitable[None]],
    limits: Limits | None = None,
) -> Application:
    """The application over one Redis. Call within the event loop that will run it.

    Args:
        gateway_id: name under which accepted samples are dispatched.
        wake: called with the id of a model that has new operations.
        submit: called with every accepted sample.
    """
    limits = limits or Limits()
    journal, catalog = Journal(client), Catalog(client)
    checkpoints, sampling_sessions = CheckpointStore(client), SamplingSessionStore(client)
    sessions = Sessions(SessionStore(client), limits)
    models = Models(
        journal, sessions, ModelStore(client), checkpoints, sampling_sessions, catalog, wake, limits
    )
    return Application(
        keys=keys,
        catalog=catalog,
        sessions=sessions,
        models=models,
        sampling=Sampling(journal, sessions, models, sampling_sessions, catalog, submit, gateway_id, limits),
        futures=Futures(client),
        limits=limits,
        draining=asyncio.get_running_loop().create_future(),
    )
