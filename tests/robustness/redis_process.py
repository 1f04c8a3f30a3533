"""A Redis of the suite's own: behind a proxy, killed and started again over the same append-only file."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import redis

from services.common.process.process import die_with_parent
from services.launcher import redis_server


class RedisProcess:
    """The embedded server of `tinsmith up`, under the suite's hands."""

    def __init__(self, directory: Path, port: int) -> None:
        self._process, urls = redis_server.prepare(directory, port, "everysec", 2 << 30)
        self.url = urls["operator"]
        self.port = port
        self._directory = directory
        self._log = (directory / "redis.log").open("ab")
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.client = redis.Redis.from_url(self.url, socket_timeout=5)
        self.start()

    def url_through(self, port: int) -> str:
        """The URL for clients that come through a proxy on this port."""
        return self.url.replace(f":{self.port}/", f":{port}/")

    def start(self) -> None:
        with self._lock:
            self._child = subprocess.Popen(
                self._process.argv, stdout=self._log, stderr=self._log, preexec_fn=die_with_parent
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "Redis did not start"
                time.sleep(0.02)

    def sync_always(self, always: bool) -> None:
        self.client.config_set("appendfsync", "always" if always else "everysec")

    def kill(self, down: float) -> None:
        """SIGKILL; started again after `down` seconds."""
        assert self._child is not None
        self._child.kill()
        self._child.wait()
        time.sleep(down)
        self.start()

    def cut_power(self, lost: float, down: float) -> None:
        """SIGKILL, and what was written to its file in the last `lost` seconds is gone: a machine without
        power, whose disk lacks what was not synced."""
        (file,) = self._directory.glob("appendonlydir/*.incr.aof")
        size = file.stat().st_size
        time.sleep(lost)
        assert self._child is not None
        self._child.kill()
        self._child.wait()
        os.truncate(file, size)
        time.sleep(down)
        self.start()

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._child.pid, signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        if self._child is not None:
            self._child.terminate()
            self._child.wait(60)
        self._log.close()
