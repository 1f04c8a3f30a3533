"""Runs one gateway: HTTP and gRPC in one event loop, until a signal asks it to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from signal import Signals

from redis.exceptions import RedisError

from services.common.contract.errors import Internal, TinsmithError
from services.common.process import process, rpc
from services.common.process.memory import collector
from services.common.process.tasks import cancel_all
from services.common.state import known_models
from services.common.state.claim import claimed
from services.common.state.registry import Announcer, ServiceRecord
from services.common.storage.data_dir import DataDir
from services.common.storage.location import connect
from services.common.telemetry import logs, metrics, tracing
from services.common.tls.wires import identity, key_files
from services.gateway.access.limits import MIB
from services.gateway.access.memory import Memory
from services.gateway.config import GatewayConfig, parse, stated
from services.gateway.edge.grpc import service
from services.gateway.edge.http.server import HttpServer
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.provider import provider
from services.gateway.identity.ring import KeyRing
from services.gateway.retention.snapshot_room import budget_on
from services.gateway.wiring import Gateway

log = logging.getLogger(__name__)

_GRPC_GRACE_S = 20.0


async def run(config: GatewayConfig) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then answers what it accepted and returns.

    Raises:
        Unavailable: a port cannot be bound.
        Conflict: another gateway has this id, or Redis has state of a release too far from this one.
        Internal: the HTTP server stopped by itself.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        client = await cleanup.enter_async_context(claimed(config.redis_url, "gateway", config.id))
        await known_models.configure(client, config.base_models)
        data = DataDir(config.data_dir)
        storage = connect(config.checkpoint_store, data)
        config = _with_shares(config, data)
        gateway = Gateway(
            config.id,
            client,
            KeyRing(config.api_keys_file, KeyStore(client), provider=provider(config.oidc)),
            storage,
            data,
            config.retention,
            config.journal,
            config.limits,
            config.room,
            budget_on(data, config.snapshot_bytes, config.snapshot_owner_bytes),
            Memory.of(config.memory_mib * MIB),
            config.dispatch,
            config.public_url,
            config.near_clients,
            identity(config.identity),
        )
        await cleanup.enter_async_context(
            metrics.served(config.host, config.metrics_port, gateway.readings())
        )
        tls = key_files(config.tls_cert, config.tls_key)
        http = HttpServer(
            gateway.application,
            config.host,
            config.port,
            config.connections,
            config.access_log,
            tls,
            config.trusted_proxies,
        )
        cleanup.push_async_callback(gateway.stop)
        await gateway.start()
        rpc_server = await service.serve(
            gateway.application,
            rpc.address(config.host, config.grpc_port),
            config.grpc_connections,
            config.access_log,
            tls,
        )
        cleanup.push_async_callback(rpc_server.drain, _GRPC_GRACE_S)
        collector.settle()
        # From here on a signal means to drain: clients may be answered before the last line of this.
        stopping = asyncio.create_task(process.wait_for_signal(), name="signals")
        cleanup.push_async_callback(cancel_all, [stopping])
        serving = http.start()
        cleanup.push_async_callback(http.drain)
        address = rpc.address(config.host, rpc_server.port)
        record = ServiceRecord(kind="gateway", id=config.id, address=address, limits=stated(config))
        announcer = Announcer(client, record, gateway.load)
        cleanup.push_async_exit(lambda kind, *_: announcer.stop(in_order=kind is None))
        await announcer.start()
        log.info("serving HTTP on %s:%d and gRPC on port %d", config.host, http.port, rpc_server.port)
        await _until_signal(stopping, serving)
        log.info("draining")
        # Long polls end at once; the SDK asks again, and another gateway answers.
        gateway.application.drain()


def _with_shares(config: GatewayConfig, data: DataDir) -> GatewayConfig:
    """With the bounds that are shares of the volume with the checkpoints."""
    if "://" in config.checkpoint_store:
        return config
    root = Path(config.checkpoint_store or data.root)
    root.mkdir(parents=True, exist_ok=True)
    owners = config.limits.owners.on_volume(shutil.disk_usage(root).total)
    return replace(config, limits=replace(config.limits, owners=owners))


async def _until_signal(stopping: asyncio.Task[Signals], serving: asyncio.Task[None]) -> None:
    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
        raise Internal("the HTTP server stopped by itself")


def main() -> int:
    """Runs until a signal; the exit status."""
    config = parse(sys.argv[1:])
    logs.configure(config.id, config.log_format)
    process.setup_process(config.id, DataDir(config.data_dir).run)
    process.allow_open_files()
    try:
        with tracing.exported("tinsmith-gateway", config.id, os.environ):
            process.run(run(config))
    except (TinsmithError, RedisError, OSError, ValueError) as error:
        print(f"{config.id}: {error}", file=sys.stderr)
        return process.status_of(error)
    return 0


if __name__ == "__main__":
    process.exit_after(main)
