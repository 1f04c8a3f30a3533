"""`python -m services.sampler`: one sampler replica as a process.

Invariant: no process of it outlives it. The engine's processes are spawned and start by importing
`child.py`, which ties them to their parent; so even SIGKILL leaves none behind.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import tempfile

from redis.exceptions import RedisError

from services.common.contract.errors import TinsmithError
from services.common.process import process
from services.common.storage.data_dir import DataDir
from services.common.telemetry import logs, tracing
from services.sampler import config
from services.sampler.engine.child import PARENT

log = logging.getLogger("services.sampler")


def main() -> int:
    """Runs until a signal (exit code 0) or until the engine ends (exit code 1), unless it refuses its
    settings: exit code 2, or `process.REFUSED` when that takes looking at the model."""
    try:
        settings = config.parse(sys.argv[1:])
    except TinsmithError as error:
        print(f"sampler: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.id, settings.log_format)
    process.setup_process(settings.id, DataDir(settings.data_dir).run)
    os.environ.update(config.engine_environment(settings) | {PARENT: str(os.getpid())})
    # vLLM leaves its sockets where they are.
    sockets = tempfile.TemporaryDirectory(prefix="tinsmith-", ignore_cleanup_errors=True)
    os.environ["VLLM_RPC_BASE_PATH"] = sockets.name
    # A spawned process begins with the main module of the one that started it, but multiprocessing
    # passes over a package's __main__: name it the module to begin with.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("services.sampler.engine.child")
    # While the model loads there is nothing to drain: end at once, through the exit handlers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    # Imports vLLM, which reads its environment at import.
    from services.sampler import replica

    try:
        with sockets, tracing.exported("tinsmith-sampler", settings.id, os.environ):
            return process.run(replica.run(settings))
    except (TinsmithError, RedisError) as error:
        log.critical("%s", error)
        return process.status_of(error)


if __name__ == "__main__":
    process.exit_after(main)
