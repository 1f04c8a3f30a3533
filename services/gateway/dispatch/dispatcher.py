"""Dispatch of training operations: who sends what, over all models.

Invariant: every model with unfinished operations has, within a lease's lifetime and one sweep, exactly
one gateway that sends them, whichever gateways live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract import ids
from services.common.process import failpoints
from services.common.process.periodic import Periodic
from services.common.process.tasks import cancel_all, detached
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.poison import Unreadable
from services.common.telemetry.repeats import Repeats
from services.gateway.access.memory import Memory
from services.gateway.cluster.discovery import Services
from services.gateway.dispatch.leases import TTL_S, Lease, Leases
from services.gateway.dispatch.model_runner import ModelRunner
from services.gateway.dispatch.placement import Loads
from services.gateway.dispatch.plan import DispatchSettings
from services.gateway.dispatch.publish_results import OnResult, ResultPublisher
from services.gateway.dispatch.send_room import SendRoom
from services.gateway.records.stores import Stores
from services.gateway.results.futures import Futures
from services.gateway.results.subscription import Subscription
from services.gateway.timelines.timelines import Timelines
from tinsmith.internal.v1 import operation_pb2

log = logging.getLogger(__name__)

_REDIS, _WRITES = "Redis", "writes to Redis"
_UNRENEWED_S = 3 * TTL_S
_SWEEP_S = 2.0
_SWEEP_DEADLINE_S = 60.0
_SWEEP_CONCURRENCY = 32
_ACQUIRING = 32


class Dispatcher:
    """Leads models: takes leases, runs a `ModelRunner` under each, gives them back.

    Before it is started, and after it is stopped, operations stay in the journal.

    Args:
        trainers: the live trainers.
        futures: has those who wait for results on this gateway.
        gateway_id: stable over restarts of the gateway.
        on_result: called with every operation and its result before the future is resolved with what it
            returns; may be called again for the same operation.
        timelines: are told of every result.
        memory: bytes for operations that are under way.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        journal: Journal,
        stores: Stores,
        trainers: Services,
        futures: Futures,
        gateway_id: str,
        on_result: OnResult,
        timelines: Timelines,
        settings: DispatchSettings | None = None,
        lease_ttl: float = TTL_S,
        memory: int = Memory.of().dispatch,
    ) -> None:
        self._futures = futures
        self._journal = journal
        self._on_result = on_result
        self._timelines = timelines
        self._settings = settings or DispatchSettings()
        self._room = SendRoom(memory)
        self._sessions = stores.sessions
        self._poison = stores.poison
        self._leases = Leases(client, gateway_id, lease_ttl)
        self._trainers = trainers
        self._loads = Loads()
        trainers.listen(self._wake_all)
        self._subscription = Subscription(client, keys.WORK_CHANNEL, self._wake_led, self._wake_all)
        self._runners: dict[str, ModelRunner] = {}
        self._leading: dict[str, asyncio.Task[None]] = {}
        self._held_elsewhere: dict[str, float] = {}
        self._sweeps = Periodic("dispatch sweep", _SWEEP_S, self._sweep, _SWEEP_DEADLINE_S)
        self._acquiring = asyncio.Semaphore(_ACQUIRING)
        self._paused = Repeats(log, "dispatch of models pauses, and a sweep goes on")
        self._not_back = Repeats(log, "a model is not back yet")
        self._unwritten = Repeats(log, "a result is not written down yet")
        self._running = False

    @property
    def led(self) -> int:
        """Models whose operations this gateway sends to trainers."""
        return len(self._leases)

    async def start(self) -> None:
        """Starts listening for work. Models left over by other gateways are found by the first sweep."""
        self._running = True
        self._leases.start()
        self._subscription.start()
        self._sweeps.start()

    async def stop(self) -> None:
        """Stops dispatching and gives all leases back; pending operations stay in the journal."""
        self._running = False
        await self._sweeps.stop()
        await cancel_all(self._leading.values())
        await self._subscription.stop()
        await self._leases.stop()

    def wake(self, model_id: str, accepted: operation_pb2.Operation | None = None) -> None:
        """An operation of this model was accepted: run it, if no other gateway leads the model.

        Args:
            accepted: the operation, if it was journaled just now and is to be run.
        """
        if not self._running:
            return
        runner = self._runners.get(model_id)
        if runner is not None:
            if accepted is None or not runner.offer(accepted):
                runner.wake()
        elif model_id not in self._leading and self._may_try(model_id):
            self._lead(model_id, only_with_work=False)

    @property
    def trouble(self) -> str:
        """Why this gateway cannot lead models at present; empty: it can."""
        seconds = self._leases.unrenewed
        return f"leases were not renewed for {seconds:.0f} s" if seconds > _UNRENEWED_S else ""

    async def lead_idle(self, model_id: str, work: Callable[[Lease], Awaitable[bool]]) -> bool:
        """Does something to a model that nobody leads, under its lease; what `work` says, or False when some
        gateway leads the model. Operations accepted meanwhile are found by the next sweep."""
        if not self._running or model_id in self._leading:
            return False
        done = False

        async def run() -> None:
            nonlocal done
            lease = await self._leases.acquire(model_id)
            if isinstance(lease, Lease):
                try:
                    done = await work(lease)
                finally:
                    await self._leases.release(lease)

        task = self._leading[model_id] = detached(run(), f"idle {model_id}")
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return False
            task.result()
            return done
        finally:
            await cancel_all([task])
            if self._leading.get(model_id) is task:
                del self._leading[model_id]

    def _may_try(self, model_id: str) -> bool:
        """Whether another gateway's lease may have ended."""
        now = asyncio.get_running_loop().time()
        until = self._held_elsewhere.get(model_id)
        if until is not None and until <= now:
            del self._held_elsewhere[model_id]
            until = None
        return until is None

    def _wake_led(self, model_id: str) -> None:
        runner = self._runners.get(model_id)
        if runner is not None:
            runner.wake()

    def _wake_all(self) -> None:
        for runner in self._runners.values():
            runner.wake()

    def _lead(self, model_id: str, only_with_work: bool) -> None:
        task = detached(self._run(model_id, only_with_work), f"dispatch {model_id}")
        self._leading[model_id] = task
        task.add_done_callback(lambda done: self._ended(model_id, done))

    def _ended(self, model_id: str, task: asyncio.Task[None]) -> None:
        if self._leading.get(model_id) is task:
            del self._leading[model_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("dispatch of %s broke off, the next sweep goes on", model_id, exc_info=error)

    async def _run(self, model_id: str, only_with_work: bool) -> None:
        woken = True
        while woken:
            try:
                # A gateway that dies leaves work of many models to all others at once.
                async with self._acquiring:
                    lease = await self._leases.acquire(model_id, only_with_work)
            except (RedisError, OSError) as error:
                self._pause(model_id, error)
                return
            self._paused.over(_WRITES)
            if not isinstance(lease, Lease):
                if lease is not None:
                    self._held_elsewhere[model_id] = asyncio.get_running_loop().time() + lease
                return
            woken = await self._run_under(lease)
            # Somebody may have woken the runner just when it had decided to stop.
            only_with_work = True

    async def _run_under(self, lease: Lease) -> bool:
        """Runs one model until its runner stops; whether there may be more to do."""
        runner = ModelRunner(
            lease,
            self._leases.fence,
            self._journal,
            self._trainers,
            self._loads,
            ResultPublisher(
                *(lease, self._journal, self._on_result, self._futures),
                *(self._poison, self._timelines, self._unwritten),
            ),
            self._session_finished,
            self._settings,
            self._room,
            self._not_back,
        )
        self._runners[lease.model_id] = runner
        try:
            await failpoints.reach("gateway.lease_taken")
            await runner.run()
            self._paused.over(lease.model_id)
        except (RedisError, OSError) as error:
            self._pause(lease.model_id, error)
            return False
        finally:
            lost = lease.lost
            del self._runners[lease.model_id]
            await self._leases.release(lease)
        return runner.woken and not lost

    def _pause(self, model_id: str, error: RedisError | OSError) -> None:
        # An outage of Redis is one of all models, and so is one that takes no writes; what else it answers
        # with is one model's.
        name = model_id
        if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError):
            name = _REDIS
        elif isinstance(error, redis.exceptions.ReadOnlyError) or str(error).startswith("MISCONF"):
            name = _WRITES
        self._paused.failed(name, error)

    async def _session_finished(self, model_id: str) -> bool:
        try:
            session = await self._sessions.get(ids.session_of(model_id))
        except Unreadable:
            return False
        return session is not None and session.finished

    async def _sweep(self) -> None:
        """Takes over models with work that nobody leads, and forgets those without."""
        limit = asyncio.Semaphore(_SWEEP_CONCURRENCY)

        async def look(model_id: str, listed_at: float) -> None:
            async with limit:
                index = await self._journal.index(model_id, -1, entries=0)
                if not index.pending:
                    await self._journal.forget_idle(model_id, listed_at)
                elif model_id not in self._leading:
                    self._lead(model_id, only_with_work=True)

        now = asyncio.get_running_loop().time()
        self._held_elsewhere = {held: until for held, until in self._held_elsewhere.items() if until > now}
        models = await self._journal.models_with_work()
        looks = [look(model_id, at) for model_id, at in models if model_id not in self._leading]
        # One that fails keeps no other from being looked at.
        for failure in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
        self._paused.over(_REDIS)
