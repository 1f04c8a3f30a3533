"""What a process measures of itself, served for Prometheus.

Invariants: a measurement is made where the thing happens, by an instrument that stands beside it; names begin
with `tinsmith_` and end in their unit; a label has as many values as the code or the configuration names, and
never one that a client chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.contract.errors import Unavailable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Bounds in seconds of what should take milliseconds."""
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1800)
"""Bounds in seconds of what a device does, or a caller waits for."""


_READ_S = 5.0


@dataclass(frozen=True)
class Reading:
    """A number that is read when somebody asks for it, or one for each value of a label.

    Attributes:
        name: with its unit, without the prefix. One that ends in "_total" only grows.
        help: what it is.
        read: it, as it is now. Called in the loop that it was given in.
        label: of the numbers that `read` gives by its values; "" = it gives one number.
    """

    name: str
    help: str
    read: Callable[[], float] | Callable[[], Mapping[str, float]]
    label: str = ""


class _Readings(Collector):
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Called on the server's thread."""
        values = asyncio.run_coroutine_threadsafe(self._values(), self._loop).result(_READ_S)
        for one, value in zip(self._readings, values, strict=True):
            kind = CounterMetricFamily if one.name.endswith("_total") else GaugeMetricFamily
            family = kind(f"tinsmith_{one.name}", one.help, labels=[one.label] if one.label else [])
            if isinstance(value, Mapping):
                for key, number in value.items():
                    family.add_metric([key], number)
            else:
                family.add_metric([], value)
            yield family

    async def _values(self) -> list[float | Mapping[str, float]]:
        return [one.read() for one in self._readings]

    def describe(self) -> Iterable[Metric]:
        # Registering must not ask the loop, which is what registers.
        return ()


def _as_text(served: WSGIApplication) -> WSGIApplication:
    """The same, in the text format whatever a scraper would rather have: in OpenMetrics the client library
    writes the colon of vLLM's names as an underscore for some, so that their names would be the scraper's."""

    def text(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return served(environ, start_response)

    return text


class Served:
    """What a process serves of its measurements.

    Args:
        asked: whether anybody can ask for them.
    """

    def __init__(self, asked: bool) -> None:
        self._asked = asked

    @contextmanager
    def reading(self, readings: Iterable[Reading]) -> Iterator[None]:
        """Within it these are served, too. To be entered in the loop in which they are read."""
        if not self._asked:
            yield
            return
        collector = _Readings(readings)
        REGISTRY.register(collector)
        try:
            yield
        finally:
            REGISTRY.unregister(collector)


@asynccontextmanager
async def served(host: str, port: int, readings: Iterable[Reading] = ()) -> AsyncIterator[Served]:
    """Within it `GET /metrics` on this port answers with everything that was measured; 0 = nothing is served.

    Raises:
        Unavailable: the address cannot be bound.
    """
    if port == 0:
        yield Served(asked=False)
        return
    try:
        server, thread = start_http_server(port, host)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error}") from error
    server.set_app(_as_text(make_wsgi_app()))
    log.info("serving metrics on port %d", port)
    found = Served(asked=True)
    try:
        with found.reading(readings):
            yield found
    finally:
        # A request that is under way may want the loop.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
