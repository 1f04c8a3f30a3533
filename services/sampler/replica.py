"""Sees one replica through its life: start, announce, serve, drain, stop.

Invariant: it is announced only after a request went through the engine, and when the engine ends, is stuck,
or has no sound weights any more, the process ends too, with a non-zero exit code, so that its supervisor
starts a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import Draining
from services.common.process import process, rpc
from services.common.process.carrier.answering import Carrier
from services.common.process.memory import collector
from services.common.process.tasks import cancel_all
from services.common.process.threads import WorkerThread
from services.common.state import registry
from services.common.state.claim import claimed
from services.common.storage.hub import model_directory
from services.common.telemetry import logs, metrics
from services.common.telemetry.loaded import LOADED
from services.common.telemetry.loop_lag import watched_loop
from services.common.telemetry.repeats import Repeats
from services.common.tls.wires import identity, mutual
from services.sampler import wiring
from services.sampler.config import SamplerConfig
from services.sampler.engine import watchdog
from services.sampler.engine.engine import Engine
from services.sampler.engine.snapshot_key import Weights
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

log = logging.getLogger(__name__)

_UNTOLD = Repeats(log, "the weights of the engine could not be announced")

_YOUNG = 20_000
"""Some hundred objects of each of some hundred samples that are under way."""

_LIVENESS_S = 0.5
_ENGINE_SHUTDOWN_S = 10.0
_STACKS_S = 0.5
_REPLIES_S = 5.0


async def run(config: SamplerConfig) -> int:
    """Serves until a signal or the engine's end; returns the process's exit code.

    Must be called on the main thread (see Engine).

    Raises:
        Conflict: another sampler has this id, or Redis has state of a release too far from this one.
        RedisError: Redis does not answer.
    """
    async with (
        claimed(config.redis_url, "sampler", config.id) as client,
        metrics.served(config.host, config.metrics_port) as served,
    ):
        return await _load_and_serve(config, client, served)


async def _load_and_serve(config: SamplerConfig, client: redis.asyncio.Redis, served: metrics.Served) -> int:
    started = time.monotonic()
    # Not one of the loop's own threads, for which the process would wait when it is told to end.
    fetching = WorkerThread("files").submit(lambda: model_directory(config.model_path))
    engine = Engine(replace(config, model_path=await asyncio.wrap_future(fetching)))
    try:
        await engine.prepare()
        logs.take_over()
        log.info("engine ready after %.1f s", time.monotonic() - started)
        # As the servers of vLLM do: else every look at the oldest objects walks through all of vLLM.
        collector.settle(_YOUNG)
        LOADED.set(1)
        async with watched_loop():
            with served.reading(_readings(engine)):
                return await _serve(config, engine, client)
    finally:
        engine.shutdown(_ENGINE_SHUTDOWN_S)


def _readings(engine: Engine) -> tuple[metrics.Reading, ...]:
    """What the engine is at, for its metrics."""
    return (
        metrics.Reading(
            "engine_sequences", "Sequences that the engine has not finished", lambda: engine.running
        ),
        metrics.Reading(
            "generated_tokens_total",
            "Tokens generated since the engine started",
            lambda: engine.generated_tokens,
        ),
    )


async def _serve(config: SamplerConfig, engine: Engine, client: redis.asyncio.Redis) -> int:
    parts = wiring.build(config, engine)
    service, full = parts.service, parts.full
    name = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name
    add = sampler_pb2_grpc.add_SamplerServiceServicer_to_server
    address = rpc.address(config.host, config.port)
    tls = mutual(identity(config.identity), "gateway", "trainer", "sampler", "operator")
    carrier = Carrier(add, service, config.access_log)
    services = [(add, service, name), carrier.service]
    server = await rpc.serve(services, address, tells=config.access_log, tls=tls)
    announcer = registry.Announcer(client, wiring.record(config, engine, server.port))
    full.listen(lambda weights: _announce_weights(announcer, weights))
    await announcer.start()
    log.info("serving %s at %s", config.base_model, announcer.record.address)

    signalled = asyncio.create_task(process.wait_for_signal(), name="signal")
    died = asyncio.create_task(_until_dead(engine), name="liveness")
    stuck = asyncio.create_task(watchdog.until_stuck(engine, config.stall_seconds), name="watchdog")
    unsound = asyncio.create_task(full.until_lost(), name="weights")
    try:
        await asyncio.wait({signalled, died, stuck, unsound}, return_when=asyncio.FIRST_COMPLETED)
        if stuck.done():
            log.error(
                "the engine is stuck: no progress in %.0f s (--stall-seconds) with %d sequences; it is at:",
                config.stall_seconds,
                engine.running,
                exc_info=stuck.exception(),
            )
            await engine.dump_stacks()
            await asyncio.sleep(_STACKS_S)
            # Its requests fail now, as when it dies by itself.
            engine.kill()
            await asyncio.wait({died}, timeout=_ENGINE_SHUTDOWN_S)
        if died.done() or stuck.done() or unsound.done():
            why = "the engine's weights are not sound" if unsound.done() else "the engine ended"
            log.error("%s; this process ends too, to be started again", why)
            await announcer.stop(in_order=False)
            if unsound.done():
                # Who asked for what ended it is told so, and sends no other replica after it.
                await server.drain(_REPLIES_S)
            return 1
        log.info("draining for up to %.0f s", config.drain_seconds)
        service.draining = True
        await announcer.update(msgspec.structs.replace(announcer.record, state="draining"))
        # Until then repeats of what runs are answered; afterwards others do what is left.
        stopping = Draining("this sampler stops before the sample is done; another one runs it")
        await parts.generations.end(config.drain_seconds, stopping)
        parts.suspects.close()
        carrier.close()
        await server.drain(_REPLIES_S)
        await announcer.stop()
        return 0
    finally:
        await cancel_all([signalled, died, stuck, unsound])
        await full.close()
        await engine.close()


async def _announce_weights(announcer: registry.Announcer, weights: Weights) -> None:
    name = "" if weights is None else str(weights)
    try:
        await announcer.update(msgspec.structs.replace(announcer.record, weights=name))
    except RedisError as error:
        # The next refresh of the record says it.
        _UNTOLD.failed(announcer.record.id, error)


async def _until_dead(engine: Engine) -> None:
    # vLLM has no event to wait for.
    while not engine.dead:  # noqa: ASYNC110
        await asyncio.sleep(_LIVENESS_S)
