"""The administration of a cluster, put together over its Redis.

Invariants: what is listed is bounded by a page, however much there is; what is done holds for every gateway
within a few seconds, and may be done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, NotFound
from services.common.process.tasks import a_few_at_once
from services.common.state.poison import Met, Unreadable
from services.common.state.registry import KINDS, Registry, ServiceRecord
from services.gateway.administration import base_models, owners
from services.gateway.administration.owners import Use
from services.gateway.records.listed import Cursor
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores

DRAINED_KINDS = ("trainer", "sampler")
"""What can be taken out of service. Gateways are chosen by clients and load balancers, not by others."""


@dataclass(frozen=True)
class SessionsPage:
    """Sessions with how many models each has, as far as they can be read. `total` counts all; `next` None =
    there are no more."""

    sessions: Sequence[tuple[SessionRecord, int]]
    total: int
    next: Cursor | None


@dataclass(frozen=True)
class Service:
    """A gateway, trainer or sampler. `record` None: it is drained and not there. `drained`: an operator took
    it out of service."""

    kind: str
    id: str
    record: ServiceRecord | None
    drained: bool


class Administration:
    """What an admin may look at and do beside the API keys."""

    def __init__(self, client: redis.asyncio.Redis, stores: Stores) -> None:
        self._redis = client
        self._stores = stores
        self._registry = Registry(client)

    async def sessions(self, owner: str, entries: int, after: Cursor | None) -> SessionsPage:
        """Sessions of an owner, newest first; of all owners, those that are not over, last heard of first."""
        store = self._stores.sessions
        listed = await (store.after(owner, entries, after) if owner else store.running(entries, after))
        records = [record for record in await a_few_at_once(self._readable, listed.names) if record]
        models = await store.model_counts([record.session_id for record in records])
        return SessionsPage(list(zip(records, models, strict=True)), listed.total, listed.next)

    async def session(self, session_id: str) -> SessionRecord:
        """Anybody's session.

        Raises:
            NotFound: there is none.
            Unreadable: its record is damaged.
        """
        found = await self._stores.sessions.get(session_id) if ids.is_session_id(session_id) else None
        if found is None:
            raise NotFound(f"session {session_id[:100]!r} does not exist")
        return found

    async def services(self) -> list[Service]:
        """All that are alive, and what is drained and not there, by kind and id."""
        view = await self._registry.look()
        found = [
            Service(kind, record.id, record, (kind, record.id) in view.drained)
            for kind in KINDS
            for record in view.services[kind]
        ]
        there = {(one.kind, one.id) for one in found}
        gone = [Service(kind, name, None, True) for kind, name in view.drained if (kind, name) not in there]
        return sorted(found + gone, key=lambda one: (KINDS.index(one.kind), one.id))

    async def drain(self, service_id: str) -> ServiceRecord:
        """Takes a trainer or sampler out of service until `undrain`, also when it starts anew: it is given
        nothing new, and ends what it has. Models leave a trainer when another one of theirs is ready.

        Raises:
            NotFound: none of this id is alive.
            InvalidRequest: it is a gateway.
            LimitReached: too many are drained.
        """
        for one in await self.services():
            if one.id == service_id and one.record is not None:
                if one.kind not in DRAINED_KINDS:
                    raise InvalidRequest(
                        f"{service_id} is a {one.kind}: stop its process, and its clients go to another one",
                        field="id",
                    )
                await self._registry.drain(one.kind, service_id)
                return one.record
        raise NotFound(f"no trainer or sampler {service_id[:100]!r} is alive")

    async def undrain(self, service_id: str) -> None:
        """Takes a trainer or sampler into service again. Raises NotFound: it is not drained."""
        gone = [await self._registry.undrain(kind, service_id) for kind in DRAINED_KINDS]
        if not any(gone):
            raise NotFound(f"{service_id[:100]!r} is not drained")

    async def retire(self, base_model: str) -> None:
        """Ends the serving of a base model. Raises as `base_models.retire`."""
        await base_models.retire(self._redis, base_model)

    async def set_aside(self, entries: int, after: str) -> tuple[list[Met], bool]:
        """What cannot be read, by name, from a name on; whether there is more."""
        later = [met for met in await self._stores.poison.listed() if met.name > after]
        return later[:entries], len(later) > entries

    async def drop_set_aside(self, name: str) -> bool:
        """Forgets something that cannot be read, with its place in the list where it was met; whether it had
        such a place. Raises NotFound."""
        return await self._stores.poison.drop(name)

    async def owners(self, entries: int, after: str) -> tuple[list[Use], bool]:
        """What owners have, by name, from a name on; whether there are more."""
        return await owners.page(self._redis, entries, after)

    async def _readable(self, session_id: str) -> SessionRecord | None:
        try:
            return await self._stores.sessions.get(session_id)
        except Unreadable:
            return None
