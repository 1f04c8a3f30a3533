"""One rank of a trainer world. Rank 0 serves gRPC; the others follow its commands."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from redis.exceptions import RedisError

from services.common.contract.errors import InvalidRequest, TinsmithError
from services.common.process import process
from services.common.process.threads import WorkerThread
from services.common.storage.data_dir import DataDir
from services.common.telemetry import logs, tracing
from services.trainer import config
from services.trainer.config import Place, TrainerConfig
from services.trainer.server import load, serve
from services.trainer.world import refusals
from services.trainer.world.channel import follow

log = logging.getLogger("services.trainer")

_ORPHAN_S = 45
"""More than an agent leaves its ranks before it kills them (world/node.py)."""


def main() -> int:
    """Runs this rank; the exit status."""
    settings = config.parse(sys.argv[1:])
    place = Place.from_environment()
    name = f"trainer-{settings.first_process_index + place.rank}"
    logs.configure(name, settings.log_format)
    # A follower shares the directory of the head's machine.
    process.setup_process(name, DataDir(settings.data_dir).run if place.with_head else None)
    if place.rank != 0:
        return _follow(settings, place)
    try:
        with tracing.exported("tinsmith-trainer", name, os.environ):
            return process.run(serve(settings, place))
    except (TinsmithError, RedisError) as error:
        log.critical("%s", error)
        return refusals.ends_with(error, f"rank {place.rank}")


def _follow(settings: TrainerConfig, place: Place) -> int:
    """Ranks other than 0. Signals go to all ranks; rank 0 answers them, and dismisses the others when it has
    drained. One that it does not dismiss is killed by its agent, and ends by itself where that has died."""
    loaded = threading.Event()

    def ask(*_: object) -> None:
        if not loaded.is_set():
            # There is nothing to drain, and rank 0 dismisses nobody.
            raise SystemExit(0)
        signal.alarm(_ORPHAN_S)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)

    def work() -> None:
        engine, channel, _ = load(settings, place)
        loaded.set()
        log.info("following rank 0")
        follow(engine, channel)

    done = WorkerThread("engine").submit(work)
    try:
        done.result()
    except SystemExit:
        log.info("stopped while loading")
        return 0
    except InvalidRequest as error:
        log.critical("%s", error)
        return refusals.ends_with(error, f"rank {place.rank}")
    except BaseException:
        log.critical("rank %d cannot go on", place.rank, exc_info=True)
        return 1
    log.info("dismissed")
    return 0


if __name__ == "__main__":
    process.exit_after(main)
