"""What is announced, as one gateway sees it: the live services of each kind, and the base models.

Invariants: a process looks once a second, in one round trip, whoever asks; a channel is never used for
another incarnation than the one it was opened for; a service of a release too far from this one is as one
that is not there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import grpc
import grpc.aio
import msgspec
import redis.asyncio

from services.common.contract.errors import TinsmithError, TooLarge, Unavailable
from services.common.process import rpc
from services.common.process.carrier.asking import Link
from services.common.process.periodic import Periodic
from services.common.process.tasks import cancel_all
from services.common.state.known_models import KnownModel
from services.common.state.poison import Poison
from services.common.state.registry import Registry, ServiceRecord, View
from services.common.state.versions import Range, together
from services.common.tls.wires import Identity, Role

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_DEADLINE_S = 30.0
_CLOSING_S = 60.0


def call_error(error: grpc.aio.AioRpcError) -> TinsmithError:
    """The typed error of a failed call to a trainer or sampler.

    Services name the code of every error of theirs. What comes without one is the transport's: the
    service went away, or the message is larger than the transport takes.
    """
    metadata = dict(error.trailing_metadata() or ())
    if rpc.CODE_METADATA not in metadata:
        if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            return Unavailable(error.details() or error.code().name)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLarge(f"the request is too large to be passed on: {error.details()}")
    return rpc.from_rpc_error(error)


def _neighbours(records: Sequence[ServiceRecord]) -> list[ServiceRecord]:
    return [record for record in records if together(Range(), record.versions)]


def _tell_changes(before: View, now: View) -> None:
    """Says who came and who went: all that others know of a service which hangs."""
    for kind in now.services:
        earlier = {record.id: record for record in before.services.get(kind, ())}
        later = {record.id for record in now.services[kind]}
        for name in earlier.keys() - later:
            if (kind, name) in now.stopped:
                log.info("%s %s was stopped in order", kind, name)
            else:
                why = "it ended, hangs, or does not reach Redis"
                log.warning("%s %s is not announced any more: %s", kind, name, why)
        for name in later - earlier.keys():
            log.info("%s %s is announced", kind, name)


def _without_load(records: Sequence[ServiceRecord]) -> list[ServiceRecord]:
    none = {"models": 0, "queued": 0, "stalls": 0, "longest_stall_ms": 0}
    return [msgspec.structs.replace(record, **none) for record in records]


class Services:
    """The live services of one kind, as Discovery found them last."""

    def __init__(self, kind: Role = "gateway", who: Identity | None = None) -> None:
        """Args: who: this gateway, for services that are to be called; None: in the clear."""
        self._kind: Role = kind
        self._who = who
        self._records: Sequence[ServiceRecord] = ()
        self._base_models: Mapping[str, KnownModel] = {}
        # By incarnation and the number of this gateway's certificate.
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a function called whenever a record came, went or changed, or a base model was retired; not for
        a change of load."""
        self._listeners.append(on_change)

    def all(self) -> Sequence[ServiceRecord]:
        """Every live service, by id."""
        return self._records

    def serving(self, base_model: str) -> list[ServiceRecord]:
        """Live services of a base model, ready or not, by id."""
        return [record for record in self._records if record.base_model == base_model]

    def retired(self, base_model: str) -> bool:
        """Whether nothing here serves a base model, and an operator said that nothing will."""
        known = self._base_models.get(base_model)
        return known is not None and known.retired and not self.serving(base_model)

    def missing(self, base_model: str) -> bool:
        """Whether nothing here serves a base model now, though something is to: it may only not be announced
        at the moment."""
        known = self._base_models.get(base_model)
        return known is not None and not known.retired and not self.serving(base_model)

    def channel(self, record: ServiceRecord) -> grpc.aio.Channel:
        """The channel to one incarnation of a service, with the newest certificate of this gateway."""
        key = (record.incarnation, self._number)
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = rpc.channel(record.address, self._who, self._kind)
        return found

    def link(self, record: ServiceRecord) -> Link:
        """Small calls over that channel, carried by one stream."""
        key = (record.incarnation, self._number)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = Link(self.channel(record))
        return found

    @property
    def _number(self) -> int:
        return 0 if self._who is None else self._who.number

    def update(self, records: Sequence[ServiceRecord], base_models: Mapping[str, KnownModel]) -> None:
        """Takes over what is announced now."""
        changed = _without_load(records) != _without_load(self._records) or base_models != self._base_models
        self._records, self._base_models = records, base_models
        live, number = {record.incarnation for record in records}, self._number
        # What was called with the certificate before the present one may still run.
        gone = [key for key in self._channels if key[0] not in live or key[1] < number - 1]
        for listener in self._listeners if changed else ():
            listener()
        for name in gone:
            # A call under way on it ends by itself; closing at once would look like a cancelled task.
            if (link := self._links.pop(name, None)) is not None:
                link.finish()
            closing = asyncio.create_task(self._channels.pop(name).close(grace=_CLOSING_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all channels."""
        channels, self._channels = self._channels, {}
        links, self._links = self._links, {}
        await cancel_all(self._closing)
        await asyncio.gather(*(link.close() for link in links.values()))
        await asyncio.gather(*(channel.close() for channel in channels.values()))


class Discovery:
    """Keeps looking at the registry.

    Attributes:
        trainers, samplers, gateways: the live services.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        poison: Poison,
        refresh: float = _REFRESH_S,
        who: Identity | None = None,
    ) -> None:
        """Args: who: this gateway, for the services that it calls; None: in the clear."""
        self._registry = Registry(client)
        self._poison = poison
        self.trainers, self.samplers = Services("trainer", who), Services("sampler", who)
        self.gateways = Services("gateway", who)
        self._view = View({}, {})
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()
        self._strange: frozenset[str] = frozenset()
        self._looks = Periodic("discovery", refresh, self.refresh, _DEADLINE_S)

    async def start(self) -> None:
        """Looks once and keeps looking."""
        await self.refresh()
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()
        for services in (self.trainers, self.samplers, self.gateways):
            await services.close()

    async def fresh(self, seconds: float) -> View:
        """What is announced, seen at most so many seconds ago.

        Raises:
            RedisError: Redis does not answer, and the last look is longer ago.
        """
        if time.monotonic() - self._looked_at >= seconds:
            async with self._looking:
                if time.monotonic() - self._looked_at >= seconds:
                    await self._look()
        return self._view

    async def refresh(self) -> None:
        """Looks now. Raises RedisError."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        began = time.monotonic()
        view = await self._registry.look()
        if view.undecodable:
            self._poison.note(
                "records in the registry",
                f"{view.undecodable} are of another version",
            )
        _tell_changes(self._view, view)
        self._view, self._looked_at = view, began
        for kind, services in (
            ("trainer", self.trainers),
            ("sampler", self.samplers),
            ("gateway", self.gateways),
        ):
            services.update(_neighbours(view.services[kind]), view.base_models)
        self._tell_strangers(view)

    def _tell_strangers(self, view: View) -> None:
        """Says once of each process why nothing is sent to it."""
        found = {
            record.incarnation: record
            for records in view.services.values()
            for record in records
            if not together(Range(), record.versions)
        }
        for incarnation in found.keys() - self._strange:
            record = found[incarnation]
            log.warning(
                "%s %s speaks contract %s, this gateway %s: it gets no work; end the upgrade or take it back",
                *(record.kind, record.id, record.versions, Range()),
            )
        self._strange = frozenset(found)
