"""What a process that loads a model tells of it, asked for all the while."""

from __future__ import annotations

import threading
import urllib.request
from http.client import HTTPException

from services.launcher.machine import free_port

_BETWEEN_S = 0.05


class Scraped:
    """Asks for the metrics on a port until it is left.

    Attributes:
        port: that a process is to serve them on.
        loaded: every value that it told of whether its model is loaded.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.loaded: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="scrapes")

    def __enter__(self) -> Scraped:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        over = False
        while not over:
            # Once more after it is left: what was told last may have been on its way.
            over = self._over.wait(_BETWEEN_S)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
                    lines = reply.read().decode().splitlines()
            except (OSError, HTTPException):
                continue
            named = [line for line in lines if line.startswith("tinsmith_model_loaded ")]
            self.loaded += [float(line.split()[1]) for line in named]
