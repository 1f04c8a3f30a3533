"""Puts one replica together and sees it through its life: start, announce, serve, drain, stop.

Invariant: it is announced only after a request went through the engine, and when the engine ends
or is stuck the process ends too, with a non-zero exit code, so that its supervisor starts a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from redis.exceptions import RedisError

from services.common.process import process, rpc
from services.common.process.tasks import cancel_all
from services.common.state import redis_client, registry
from services.common.storage.data_dir import DataDir
from services.sampler import watchdog
from services.sampler.config import GIB, SamplerConfig
from services.sampler.engine.engine import Engine
from services.sampler.engine.sampling import Weights
from services.sampler.service import SamplerService
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import Snapshots
from services.sampler.snapshots.staging import Staging
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

log = logging.getLogger(__name__)

_LIVENESS_S = 0.5
_ENGINE_SHUTDOWN_S = 10.0
_STACKS_S = 0.5


async def run(config: SamplerConfig) -> int:
    """Serves until a signal or the engine's end; returns the process's exit code.

    Must be called on the main thread (see Engine).
    """
    started = time.monotonic()
    engine = Engine(config)
    try:
        await engine.prepare()
        log.info("engine ready after %.1f s", time.monotonic() - started)
        return await _serve(config, engine)
    finally:
        engine.shutdown(_ENGINE_SHUTDOWN_S)


async def _serve(config: SamplerConfig, engine: Engine) -> int:
    data_dir = DataDir(config.data_dir)
    full = FullSnapshots(engine, data_dir, Staging(int(config.full_snapshot_cache_gib * GIB), engine.workers))
    residency = Residency(int(config.snapshot_cache_gib * GIB), engine.first_adapter_id)
    service = SamplerService(engine, Snapshots(engine, data_dir, residency, full))
    name = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name
    add = sampler_pb2_grpc.add_SamplerServiceServicer_to_server
    server = await rpc.serve([(add, service, name)], f"{config.host}:{config.port}")
    client = redis_client.connect(config.redis_url)
    announcer = registry.Announcer(client, _record(config, engine, server.port))
    full.listen(lambda weights: _announce_weights(announcer, weights))
    await announcer.start()
    log.info("serving %s at %s", config.base_model, announcer.record.address)

    signalled = asyncio.create_task(process.wait_for_signal(), name="signal")
    died = asyncio.create_task(_until_dead(engine), name="liveness")
    stuck = asyncio.create_task(watchdog.until_stuck(engine, config.stall_seconds), name="watchdog")
    try:
        await asyncio.wait({signalled, died, stuck}, return_when=asyncio.FIRST_COMPLETED)
        if stuck.done():
            log.error(
                "the engine is stuck: no progress in %.0f s (--stall-seconds) with %d sequences; it is at:",
                config.stall_seconds,
                engine.running,
                exc_info=stuck.exception(),
            )
            engine.dump_stacks()
            await asyncio.sleep(_STACKS_S)
            # Its requests fail now, as when it dies by itself.
            engine.kill()
            await asyncio.wait({died}, timeout=_ENGINE_SHUTDOWN_S)
        if died.done() or stuck.done():
            log.error("the engine ended; this process ends too, to be started again")
            await announcer.stop()
            return 1
        log.info("draining for up to %.0f s", config.drain_seconds)
        service.draining = True
        await announcer.update(msgspec.structs.replace(announcer.record, state="draining"))
        await server.drain(config.drain_seconds)
        await announcer.stop()
        return 0
    finally:
        await cancel_all([signalled, died, stuck])
        await full.close()
        await client.aclose()


def _record(config: SamplerConfig, engine: Engine, port: int) -> registry.ServiceRecord:
    return registry.ServiceRecord(
        kind="sampler",
        id=config.id,
        address=f"{config.advertise_host}:{port}",
        base_model=config.base_model,
        model_path=config.model_path,
        arch=engine.arch,
        vocab_size=engine.limits.vocab_size,
        context_length=engine.limits.context_length,
        device=engine.device,
        dtype=engine.dtype,
        world_size=engine.workers,
        max_lora_rank=config.max_lora_rank,
        max_sequences=config.max_sequences,
        gpus=engine.gpus,
    )


async def _announce_weights(announcer: registry.Announcer, weights: Weights) -> None:
    name = "" if weights is None else str(weights)
    try:
        await announcer.update(msgspec.structs.replace(announcer.record, weights=name))
    except RedisError as error:
        # The next refresh of the record says it.
        log.warning("could not announce %s: %s", name or "the base weights", error)


async def _until_dead(engine: Engine) -> None:
    # vLLM has no event to wait for.
    while not engine.dead:  # noqa: ASYNC110
        await asyncio.sleep(_LIVENESS_S)
