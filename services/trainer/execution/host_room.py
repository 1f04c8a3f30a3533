"""Adapters that are on the host instead of the device, and where one goes that makes room there.

From the host an adapter comes back by a copy, and nobody but this trainer knows that it was away; from the
disk the gateway has it restored, and its journal replayed.

Invariants: what is on the host never takes more than there is, and what was used least lately goes from
there to the disk. An adapter on the host is idle, and its durable snapshot is up to date.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto

from prometheus_client import Counter

from services.trainer.compute.data import LoraSpec
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S

log = logging.getLogger(__name__)

MOVED = Counter(
    "tinsmith_adapters_moved_total", "Adapters that left the device for the host, or came back", ["to"]
)


# There from the start, so that a rate of theirs is, too.
_TO_HOST, _TO_DEVICE = MOVED.labels("host"), MOVED.labels("device")


class Way(Enum):
    """Where an adapter may go from the device."""

    HOST = auto()
    DISK = auto()
    STAY = auto()


def way_out(model: Model, nbytes: int, most: int, models: Iterable[Model], now: float) -> Way | Model:
    """Where an idle adapter goes; or another one that first goes from the host to the disk, and the question
    is asked again. Pure.

    Args:
        nbytes: that it takes there; `most`: that there are.
        models: the trainer's.
        now: `time.monotonic()`.
    """
    there = [other for other in models if other.host_bytes and other is not model]
    found: Way | Model = Way.DISK
    if nbytes <= most:
        if sum(other.host_bytes for other in there) + nbytes <= most:
            return Way.HOST
        idle = [other for other in there if not other.is_busy]
        oldest = min([model, *idle], key=lambda each: each.last_used)
        found = Way.DISK if oldest is model else oldest
    goes = model if found is Way.DISK else found
    assert isinstance(goes, Model)
    return found if now - goes.last_used >= IDLE_S else Way.STAY


class HostRoom:
    """What adapters have of the host.

    Args:
        models: the trainer's models by id.
        most: bytes that they may take of each rank's.
        bytes_of: what an adapter takes there at most.
        move: has all ranks move a model, to the host or back; whether they did.
        drop: takes a model out of `models` and off the engine.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        bytes_of: Callable[[LoraSpec], int],
        move: Callable[[Model, bool], Awaitable[bool]],
        drop: Callable[[Model], Awaitable[None]],
    ) -> None:
        self._models = models
        self.most = most
        self._bytes_of = bytes_of
        self._move = move
        self._drop = drop

    def used(self) -> int:
        """Bytes of each rank's host that adapters take at present."""
        return sum(model.host_bytes for model in self._models.values())

    async def take_in(self, model: Model, now: float) -> Way:
        """Where an idle adapter is to go, whose durable snapshot is up to date: it is on the host already, or
        `DISK` or `STAY`.

        Args:
            now: `time.monotonic()`.
        """
        assert model.lora is not None
        nbytes = self._bytes_of(model.lora)
        while isinstance(way := way_out(model, nbytes, self.most, self._models.values(), now), Model):
            log.info("%s goes from the host to the disk", way.model_id)
            await self._drop(way)
            if model.host_bytes:
                # It made room for somebody else meanwhile.
                return Way.HOST
            if self._is_wanted(model):
                return Way.STAY
        if way is not Way.HOST:
            return way
        # From now on it is there: commands reach the ranks in order, also one that has it come back at once.
        # Its room on the device is free only once they have done it.
        model.host_bytes, model.leaving = nbytes, True
        try:
            moved = await self._move(model, True)
        finally:
            model.leaving = False
        if moved:
            _TO_HOST.inc()
            return way
        model.host_bytes = 0
        return Way.STAY if self._is_wanted(model) or now - model.last_used < IDLE_S else Way.DISK

    async def bring_back(self, model: Model) -> bool:
        """Has an adapter come back that has room on the device; whether that had the memory."""
        if not await self._move(model, False):
            return False
        model.host_bytes = 0
        _TO_DEVICE.inc()
        return True

    def _is_wanted(self, model: Model) -> bool:
        """Whether a model has work by now, or is gone."""
        return model.is_busy or self._models.get(model.model_id) is not model
