"""What a process measures of itself, served for Prometheus.

Invariants: a measurement is made where the thing happens, by an instrument that stands beside it; names begin
with `tinsmith_` and end in their unit; a label has as many values as the code or the configuration names, and
never one that a client chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.contract.errors import Unavailable

log = logging.getLogger(__name__)

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Bounds in seconds of what should take milliseconds."""
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1800)
"""Bounds in seconds of what a device does, or a caller waits for."""


_READ_S = 5.0


@dataclass(frozen=True)
class Reading:
    """A number that is read when somebody asks for it.

    Attributes:
        name: with its unit, without the prefix. One that ends in "_total" only grows.
        help: what it is.
        read: it, as it is now. Called in the loop that it was given in.
    """

    name: str
    help: str
    read: Callable[[], float]


class _Readings(Collector):
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Called on the server's thread."""
        values = asyncio.run_coroutine_threadsafe(self._values(), self._loop).result(_READ_S)
        for one, value in zip(self._readings, values, strict=True):
            family = CounterMetricFamily if one.name.endswith("_total") else GaugeMetricFamily
            yield family(f"tinsmith_{one.name}", one.help, value=value)

    async def _values(self) -> list[float]:
        return [one.read() for one in self._readings]

    def describe(self) -> Iterable[Metric]:
        # Registering must not ask the loop, which is what registers.
        return ()


@asynccontextmanager
async def served(host: str, port: int, readings: Iterable[Reading] = ()) -> AsyncIterator[None]:
    """Within it `GET /metrics` on this port answers with everything that was measured; 0 = nothing is served.

    Raises:
        Unavailable: the address cannot be bound.
    """
    if port == 0:
        yield
        return
    collector = _Readings(readings)
    try:
        server, thread = start_http_server(port, host)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error}") from error
    REGISTRY.register(collector)
    log.info("serving metrics on port %d", port)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
        # A request that is under way may want the loop.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
