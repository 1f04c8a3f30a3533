"""Rank 0: serves the trainer's parts, and takes them down in order.

Invariant: the trainer is announced only once it can execute operations, and no longer from the moment it
drains. When the world fails the process exits with an error, for its supervisor to start it anew.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from signal import Signals
from typing import Any

import redis.asyncio

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.process import process, rpc
from services.common.process.carrier.answering import Carrier
from services.common.process.tasks import cancel_all
from services.common.process.threads import WorkerThread
from services.common.state.claim import claimed
from services.common.state.registry import Announcer, ServiceRecord
from services.common.storage.data_dir import DataDir
from services.common.storage.hub import model_directory
from services.common.telemetry import logs, metrics
from services.common.telemetry.loaded import LOADED
from services.common.telemetry.loop_lag import watched_loop
from services.common.tls.wires import identity, mutual
from services.common.worlds.sharding import mistakes
from services.trainer.compute.base_model import init_distributed
from services.trainer.compute.engine import Engine
from services.trainer.compute.exchange import COLLECTIVE_TIMEOUT, least
from services.trainer.compute.lora.adapter import MAX_RANK
from services.trainer.compute.memory.capacity import GIB, Capacity
from services.trainer.compute.memory.dry_run import find_capacity
from services.trainer.compute.memory.machine import host_memory, keep_to_share
from services.trainer.config import Place, TrainerConfig
from services.trainer.wiring import Trainer
from services.trainer.world.channel import Channel
from services.trainer.world.commands import Shutdown
from services.trainer.world.settings import check_same
from services.trainer.world.shortage import Shortage
from services.trainer.world.world import World
from tinsmith.internal.v1 import trainer_pb2, trainer_pb2_grpc

log = logging.getLogger(__name__)

_COMMAND_TIMEOUT_S = 900.0
# Together less than the 30 s after which an agent kills a rank.
_WITHDRAWN_S = 3.0
_DRAIN_S = 10.0
_DURABLE_S = 8.0
_SHUTDOWN_S = 5.0
_FORGOTTEN_S = 1.0


async def serve(config: TrainerConfig, place: Place) -> int:
    """Serves until a signal comes or the world fails; the exit status.

    Raises:
        Conflict: another trainer has this id, or Redis has state of a release too far from this one.
        RedisError: Redis does not answer.
    """
    async with (
        claimed(config.redis_url, "trainer", config.id) as client,
        metrics.served(config.host, config.metrics_port) as served,
    ):
        return await _load_and_serve(config, place, client, served)


async def _load_and_serve(
    config: TrainerConfig, place: Place, client: redis.asyncio.Redis, served: metrics.Served
) -> int:
    stop = asyncio.create_task(process.wait_for_signal(), name="signals")
    thread = WorkerThread("engine")
    loading = asyncio.wrap_future(thread.submit(lambda: load(config, place)))
    starting: list[asyncio.Future[Any]] = [stop, loading]
    await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped while loading")
        return 0
    engine, channel, capacity = loading.result()
    LOADED.set(1)
    world = World(thread, engine, channel, _COMMAND_TIMEOUT_S)
    return await _Server(config, world, engine, capacity, client).run(stop, served)


def load(config: TrainerConfig, place: Place) -> tuple[Engine, Channel, Capacity]:
    """Loads this rank's part of the base model, joins the world, and finds out what that can hold. Blocking,
    minutes for large models.

    Raises:
        InvalidRequest: there is no such model, so many ranks cannot share its weights as was asked for, or
            ranks were started with different settings.
        Unavailable: its hub was away for too long.
    """
    if wrong := mistakes(config.sharding, config.zero_stage, place.world_size):
        raise InvalidRequest(wrong[0])
    directory = model_directory(config.model_path)
    log.info(
        "loading %s from %s (%s, %s, ZeRO stage %d, rank %d of %d)",
        config.base_model,
        config.model_path,
        config.device,
        config.dtype,
        config.zero_stage,
        place.rank,
        place.world_size,
    )
    init_distributed(config.device)
    if config.gpu_memory_share:
        keep_to_share(config.gpu_memory_share)
    check_same(config)
    # Before anything is loaded, and before the ranks wait for one another.
    own_host = host_memory(config.adapter_host_bytes, config.device)
    engine = Engine(
        model_path=directory,
        device=config.device,
        dtype=config.dtype,
        zero_stage=config.zero_stage,
        offload_optimizer=config.offload_optimizer == "cpu",
        activation_checkpointing=config.activation_checkpointing,
        max_context=config.max_context,
        sharding=config.sharding,
    )
    logs.take_over()
    (on_host,) = least([own_host], engine.device)
    found = find_capacity(
        engine, config.memory_bytes, config.micro_batch_tokens, keeps_blocks=config.keeps_blocks
    )
    found = replace(found, adapter_host_bytes=on_host)
    log.info(
        "it holds sequences of up to %d tokens (one rank alone: %d; forward only: %d), operations of %d, and "
        "%.2f GiB of adapters on each rank, %.2f more on its host",
        found.sequence_tokens,
        found.one_rank_tokens,
        found.forward_tokens,
        found.operation_tokens,
        found.adapter_bytes / GIB,
        found.adapter_host_bytes / GIB,
    )
    shortage = Shortage(DataDir(config.data_dir).run, config.id)
    return engine, Channel(place.world_size, COLLECTIVE_TIMEOUT, shortage.tell), found


class _Server:
    def __init__(
        self,
        config: TrainerConfig,
        world: World,
        engine: Engine,
        capacity: Capacity,
        client: redis.asyncio.Redis,
    ) -> None:
        self._config = config
        self._capacity = capacity
        self._world = world
        self._engine = engine
        self._client = client
        self._identity = identity(config.identity)
        self._parts = Trainer(config, world, client, engine, capacity, self._identity)

    async def run(self, stop: asyncio.Task[Signals], served: metrics.Served) -> int:
        """Serves until `stop` is done or the world fails."""
        async with watched_loop():
            with served.reading(self._readings()):
                beside = [
                    asyncio.create_task(c)
                    for c in (self._world.watch(), self._world.keep_alive(), self._parts.results.watch())
                ]
                try:
                    return await self._serve(stop, beside)
                finally:
                    await cancel_all(beside)

    async def _serve(self, stop: asyncio.Task[Signals], beside: list[asyncio.Task[None]]) -> int:
        # A disk may take longer than other ranks wait for a word, which they have from beside.
        await self._parts.states.clean()
        name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
        add, servicer = trainer_pb2_grpc.add_TrainerServiceServicer_to_server, self._parts.servicer
        carrier = Carrier(add, servicer, self._config.access_log)
        server = await rpc.serve(
            [(add, servicer, name), carrier.service],
            rpc.address(self._config.host, self._config.port),
            tells=self._config.access_log,
            tls=mutual(self._identity, "gateway", "trainer", "operator"),
        )
        announcer = Announcer(self._client, self._record(server.port), self._load)
        await announcer.start()
        log.info("serving %s on port %d", self._config.base_model, server.port)
        executing = asyncio.create_task(self._parts.executor.run(), name="executor")
        failures = [executing, *beside]
        waiting: list[asyncio.Task[Any]] = [stop, *failures]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        failed = next((task for task in failures if task.done()), None)
        if failed is not None:
            log.critical("the trainer world failed", exc_info=failed.exception())
        with suppress(Exception):
            # Where Redis hangs, what it has of this trainer grows old.
            await asyncio.wait_for(announcer.stop(in_order=failed is None), _WITHDRAWN_S)
        self._parts.executor.stop()
        if failed is None:
            await self._drain(executing)
            self._parts.crashes.close()
            with suppress(OSError):
                # A disk that hangs, or fails, does not keep the process from ending in order.
                await asyncio.wait_for(asyncio.to_thread(self._parts.shortage.forget), _FORGOTTEN_S)
        await cancel_all(failures)
        for task in failures:
            if not task.cancelled():
                # Where a rank has died, several find out; one of them was told of.
                task.exception()
        stopping = Unavailable("the trainer is stopping; the operation runs after its restart")
        self._parts.executor.abandon(stopping)
        carrier.close()
        await server.drain(1.0)
        await self._parts.broadcaster.close()
        return 0 if failed is None else 1

    async def _drain(self, executing: asyncio.Task[None]) -> None:
        log.info("draining")
        done, _ = await asyncio.wait([executing], timeout=_DRAIN_S)
        if not done:
            log.warning("an operation did not finish while draining; it runs again after the restart")
            await cancel_all([executing])
        with suppress(TimeoutError):
            await asyncio.wait_for(self._parts.residency.drain(), _DURABLE_S)
        with suppress(Exception):
            await asyncio.wait_for(self._world.call(Shutdown()), _SHUTDOWN_S)
        log.info("stopped")

    def _load(self) -> dict[str, int]:
        """What gateways place new models by."""
        models = self._parts.models
        queued = sum(len(model.sequence.unfinished) for model in models.values())
        return {"models": len(models), "queued": queued}

    def _readings(self) -> tuple[metrics.Reading, ...]:
        """What it holds at present, for its metrics."""
        parts = self._parts
        return (
            metrics.Reading("models", "Models in this trainer's memory", lambda: len(parts.models)),
            metrics.Reading(
                "queued_operations",
                "Operations that wait or run here",
                parts.executor.queued_by_class,
                "owner_class",
            ),
            metrics.Reading(
                "adapter_bytes",
                "Memory of each rank that its adapters take, gradients and moments included",
                parts.residency.adapters.used,
            ),
            metrics.Reading(
                "adapter_host_bytes",
                "Memory of each rank's host that adapters take which are idle",
                parts.residency.adapters.host.used,
            ),
            metrics.Reading(
                "copy_bytes",
                "Memory of the first rank's host for copies of models on their way to samplers or a storage",
                parts.copies.used,
                "to",
            ),
            metrics.Reading(
                "load_bytes",
                "Memory of the first rank's host for saved states of models on their way to the engine",
                parts.loads.used,
                "from",
            ),
            metrics.Reading(
                "kept_result_bytes",
                "Memory of the first rank's host for results that are kept for those who ask again",
                parts.results.used,
            ),
            metrics.Reading(
                "page_locked_bytes",
                "Page-locked memory of the first rank's host, used by copies or kept for the next ones",
                lambda: {name: getattr(self._engine.page_locked.use(), name) for name in ("used", "kept")},
                "state",
            ),
            metrics.Reading(
                "memory_bytes",
                "Memory of each rank by what it is for, as the trainer counts it",
                lambda: self._engine.memory(parts.residency.adapters.used()),
                "purpose",
            ),
            metrics.Reading(
                "micro_batch_limit_tokens",
                "Tokens up to which several sequences are computed at once",
                lambda: parts.micro_batch_tokens,
            ),
            metrics.Reading(
                "queued_operation_bytes", "Bytes of their requests", lambda: parts.executor.queued_bytes
            ),
        )

    def _record(self, port: int) -> ServiceRecord:
        return ServiceRecord(
            kind="trainer",
            id=self._config.id,
            address=rpc.address(self._config.advertise_host, port),
            base_model=self._config.base_model,
            model_path=self._config.model_path,
            arch=self._engine.arch,
            vocab_size=self._engine.vocab_size,
            context_length=self._engine.context_length,
            max_sequence_tokens=self._capacity.sequence_tokens,
            one_rank_tokens=self._capacity.split_beyond,
            micro_batch_tokens=self._parts.micro_batch_tokens,
            max_forward_tokens=self._capacity.forward_tokens,
            max_operation_tokens=self._capacity.operation_tokens,
            device=self._config.device,
            dtype=self._config.dtype,
            world_size=self._engine.world_size,
            max_lora_rank=MAX_RANK,
            routing=self._engine.routing,
        )
