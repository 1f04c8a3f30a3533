"""Full snapshots: every weight of a fine-tuned model, in host memory and, one at a time, in the engine.

Invariant: between the beginning and the end of `use` the engine has the weights that were asked for, and so
has every request for its whole life, unless it asks for newer ones (`change`). Putting other weights in waits
until nothing runs that is not to go on with them. Weights that do not fit are refused before one is replaced;
what breaks off later ends all that ran and is made good with the base model's weights. An engine that does
not take them is told of (`until_lost`), as is one whose workers were given up and may be at its weights yet:
who asked for those has failed, as another engine may be no faster at them, and who did not is sent there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from services.common.contract.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    TinsmithError,
    Unavailable,
)
from services.common.process.tasks import cancel_all
from services.common.storage.data_dir import DataDir
from services.common.telemetry.repeats import Repeats
from services.sampler.engine.calls.workers import Unfinished
from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.snapshots.staging import Staging
from services.sampler.snapshots.turns import Run, Swap, Turns, Update

if TYPE_CHECKING:
    from services.sampler.engine.shifts.full_front import ModelWeights

log = logging.getLogger(__name__)

SWAP_TIMEOUT_S = 1800.0
_REFUSALS = 1024
"""So many refused versions are remembered: who asks for one again then costs nobody a drained engine."""

H = TypeVar("H")

_LOST = "this sampler lost its weights and restarts; another sampler runs it"
_BROKE = "newer weights could not be put under what this sampler ran, which is lost; send it again"


class GivenUp(DeadlineExceeded):
    """The weights that a request asked for, and this engine with them."""

    def __init__(self, weights: Weights, error: Unfinished) -> None:
        super().__init__(
            f"{_named(weights)} could not be put into the engine, which is lost, and the sampler restarts: "
            f"{error.message}; send the request again"
        )


class FullSnapshots:
    """The full snapshots of one engine."""

    def __init__(self, engine: ModelWeights, data_dir: DataDir, staging: Staging) -> None:
        self._engine = engine
        self._data_dir = data_dir
        self._staging = staging
        self._listeners: list[Callable[[Weights], Awaitable[None]]] = []
        self._turns = Turns(time.monotonic())
        self._numbers = itertools.count()
        self._unwanted: list[int] = []
        self._entered: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Timeout] = {}
        """What ends a request whose weights break under it."""
        self._given_up: dict[int, GivenUp] = {}
        """What such a request fails with that was to go on with what was given up."""
        self._timer: asyncio.TimerHandle | None = None
        self._swap: asyncio.Task[None] | None = None
        self._coming: Weights = None
        """What is on its way into the engine."""
        self._refusals: OrderedDict[SnapshotKey, str] = OrderedDict()
        self._lost = asyncio.Event()
        self._not_kept = Repeats(log, "a full snapshot is not kept in memory")
        self._unfit = Repeats(log, "weights are refused")
        self._broke = Repeats(log, "weights could not be put into the engine")

    @property
    def weights(self) -> Weights:
        """Whose weights are in the engine."""
        return self._turns.resident

    @property
    def waiting(self) -> int:
        """Requests that wait for their weights."""
        return self._turns.waiting

    def staged(self) -> list[SnapshotKey]:
        """Snapshots in host memory."""
        return self._staging.keys()

    def knows(self, key: SnapshotKey) -> bool:
        """Whether this is a full snapshot that is in memory or in the engine."""
        return key == self.weights or self._staging.find(key) is not None

    def is_open(self, weights: Weights) -> bool:
        """Whether a request for these weights would not have to wait."""
        return self._turns.is_open(weights, time.monotonic())

    def listen(self, listener: Callable[[Weights], Awaitable[None]]) -> None:
        """Calls `listener` with the weights in the engine whenever they have changed."""
        self._listeners.append(listener)

    def use(self, weights: Weights, held: H) -> AbstractAsyncContextManager[H]:
        """Waits until these weights are in the engine, and keeps them there. Yields `held`.

        Raises:
            InvalidRequest: they do not fit this model.
            GivenUp: the engine is lost with them.
            Unavailable: the engine has no sound weights any more.
            TinsmithError: they could not be put there.
        """
        return _Use(self, weights, held)

    @asynccontextmanager
    async def use_of_model(self, weights: SnapshotKey) -> AsyncIterator[int]:
        """A `use` of a full snapshot, whose place newer ones may take. Yields a ticket, for `change`.

        Raises:
            GivenUp: the engine is lost with newer ones that `change` was to put there.
            Unavailable: newer ones broke off under what uses these, which is cancelled then.
            TinsmithError: as `use`.
        """
        ticket = await self.enter(weights)
        running = asyncio.timeout(None)
        try:
            async with running:
                self._running[ticket] = running
                yield ticket
        except TimeoutError as error:
            if not running.expired():
                raise
            raise self._given_up.get(ticket, Unavailable(_BROKE)) from error
        finally:
            self._running.pop(ticket, None)
            self._given_up.pop(ticket, None)
            self.leave(ticket)

    async def enter(self, weights: Weights) -> int:
        """Begins a `use`, which ends with a `leave` of the ticket that this returns. Raises as `use`."""
        self._refuse(weights)
        ticket = next(self._numbers)
        if self._turns.enter(ticket, weights, time.monotonic()):
            return ticket
        entered = self._entered[ticket] = asyncio.get_running_loop().create_future()
        self._turns.arrive(ticket, weights)
        self._go_on()
        try:
            await entered
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: int) -> None:
        """Ends a `use`."""
        self._entered.pop(ticket, None)
        self._turns.leave(ticket, time.monotonic())
        if self._turns.undecided:
            self._go_on()

    async def change(self, ticket: int, weights: SnapshotKey) -> None:
        """In a `use` of a full snapshot, waits until newer weights of its model have taken its place, these
        or newer ones still: once all that runs is to go on with newer ones. It runs until then, and stands
        still in the engine while they are replaced.

        Raises:
            InvalidRequest: they do not fit this model.
            TinsmithError: they could not be put there. Those that were there are there as before.
        """
        self._refuse(weights)
        entered = self._entered[ticket] = asyncio.get_running_loop().create_future()
        self._turns.change(ticket, weights)
        self._go_on()
        await entered

    def _refuse(self, weights: Weights) -> None:
        if self._lost.is_set():
            raise Unavailable(_LOST)
        if weights is not None and (refusal := self._refusals.get(weights)) is not None:
            raise InvalidRequest(refusal)

    async def receive(self, incoming: IncomingSnapshot) -> None:
        """Receives a snapshot over the weight group into host memory, or lets it pass when there is no room.

        Raises:
            DataLoss, DeadlineExceeded: as ModelWeights.stage.
        """
        nbytes = incoming.nbytes
        stage_id, dropped = self._staging.reserve(incoming.key, nbytes, self._coming)
        try:
            if dropped := [*self._unwanted, *dropped]:
                self._unwanted.clear()
                await self._engine.drop_staged(dropped)
            await self._engine.stage(
                stage_id, incoming.epoch, incoming.layout, incoming.checksum, incoming.timeout
            )
        except BaseException:
            if stage_id is not None:
                # A worker may have it all the same; nothing is ever kept under this id again.
                self._unwanted.append(self._staging.cancel(incoming.key))
            raise
        if stage_id is None:
            what = f"version {incoming.key.version} ({nbytes} bytes)"
            self._not_kept.failed(
                incoming.key.model_id, f"{what} does not fit, its requests read it from the store"
            )
        else:
            self._staging.complete(incoming.key)

    async def let_pass(self, incoming: IncomingSnapshot) -> None:
        """Takes part in the transfer of a snapshot, and keeps nothing. Raises as `receive`."""
        await self._engine.stage(None, incoming.epoch, incoming.layout, incoming.checksum, incoming.timeout)

    async def until_lost(self) -> None:
        """Returns when the engine's weights are unsound for good: those who ended up there were failed, and
        what is asked for later is refused."""
        await self._lost.wait()

    async def close(self) -> None:
        """Ends a swap that goes on."""
        if self._timer is not None:
            self._timer.cancel()
        await cancel_all([self._swap])

    def _go_on(self) -> None:
        """Does what there is to do now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while isinstance(decision := self._turns.decide(time.monotonic()), Run):
            for ticket in decision.tickets:
                _resolve(self._entered[ticket])
        if isinstance(decision, Swap | Update):
            name = f"{type(decision).__name__.lower()} to {decision.weights}"
            self._swap = loop.create_task(self._put(decision), name=name)
            self._swap.add_done_callback(_log_failure)
        elif decision.until is not None:
            self._timer = loop.call_later(decision.until - time.monotonic(), self._go_on)

    async def _put(self, decision: Swap | Update) -> None:
        started, weights = time.monotonic(), decision.weights
        source, self._coming = self._source(weights), weights
        try:
            if source is not None:
                await self._engine.check(source, SWAP_TIMEOUT_S)
        except Unfinished as error:
            self._give_up(weights, error)
        except Exception as error:
            self._unfit.failed(str(weights), error)
            self._remember(weights, error)
            now = time.monotonic()
            self._fail(self._turns.refused(now, now - started), error)
        else:
            await self._replace(decision, source, started)
        finally:
            self._coming = None
        self._go_on()
        for listener in self._listeners:
            await listener(self.weights)

    async def _replace(self, decision: Swap | Update, source: int | str | None, started: float) -> None:
        weights = decision.weights
        try:
            if isinstance(decision, Swap):
                await self._engine.swap(decision.weights, source, SWAP_TIMEOUT_S)
            else:
                await self._engine.update(decision.weights, source, SWAP_TIMEOUT_S)
        except Unfinished as error:
            self._give_up(weights, error)
        except Exception as error:
            self._broke.failed(_named(weights), error)
            self._end(self._turns.broke(), error)
        else:
            self._broke.over(_named(weights))
            seconds = time.monotonic() - started
            if isinstance(decision, Swap):
                self._turns.swapped(time.monotonic(), seconds)
            else:
                self._turns.updated(time.monotonic(), seconds)
            log.info("%s in the engine after %.2f s", weights or "the base weights are", seconds)

    def _give_up(self, weights: Weights, error: Unfinished) -> None:
        self._broke.failed(_named(weights), error)
        waited, ran, others = self._turns.gave_up()
        # Others try again what fails less often than what is lost with an engine that ends.
        given_up = GivenUp(weights, error)
        self._given_up.update(dict.fromkeys(ran, given_up))
        self._fail(waited, given_up)
        self._end(others, error)

    def _end(self, waited: tuple[int, ...], error: Exception) -> None:
        """Ends all that runs, and these who waited."""
        for running in self._running.values():
            running.reschedule(asyncio.get_running_loop().time())
        if self._turns.lost:
            self._lost.set()
        self._fail(waited, Unavailable(_LOST) if self._turns.lost else error)

    def _remember(self, weights: Weights, error: Exception) -> None:
        # A version never changes; a file that is not there yet may come.
        if weights is not None and isinstance(error, InvalidRequest):
            self._refusals[weights] = error.message
            if len(self._refusals) > _REFUSALS:
                self._refusals.popitem(last=False)

    def _fail(self, tickets: tuple[int, ...], error: Exception) -> None:
        reported = error if isinstance(error, TinsmithError) else Internal(f"{error}")
        for ticket in tickets:
            _resolve(self._entered[ticket], reported)

    def _source(self, weights: Weights) -> int | str | None:
        if weights is None:
            return None
        staged = self._staging.find(weights)
        return str(self._data_dir.snapshot(weights.model_id, weights.version)) if staged is None else staged


class _Use(Generic[H]):
    """As a generator would be, but for what that costs every request."""

    def __init__(self, full: FullSnapshots, weights: Weights, held: H) -> None:
        self._full, self._weights, self._held = full, weights, held
        self._ticket = -1

    async def __aenter__(self) -> H:
        self._ticket = await self._full.enter(self._weights)
        return self._held

    async def __aexit__(self, *_: object) -> None:
        self._full.leave(self._ticket)


def _named(weights: Weights) -> str:
    return str(weights or "the base weights")


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_name(), exc_info=task.exception())


def _resolve(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
