"""A collector of traces, as OpenTelemetry's processes know it, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """One that arrived. `parent`: id of its parent; empty: it has none. Times in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                about = {one.key: one.value.string_value for one in resource.resource.attributes}
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                self._spans += [_span(about["service.name"], span) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def of(self, trace: str) -> list[Span]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace == trace]

    def first(self, name: str, seconds: float = 60.0) -> Span:
        """The first span of this name, once it is here: a process exports what it did a moment later."""
        deadline = time.monotonic() + seconds
        while (found := next((span for span in self.spans if span.name == name), None)) is None:
            assert time.monotonic() < deadline, f"{name} did not come: {sorted({s.name for s in self.spans})}"
            time.sleep(0.1)
        return found

    def wait_for(self, trace: str, names: set[str], seconds: float = 60.0) -> list[Span]:
        """The spans of a trace when these are among them, and the parents of all. A parent ends after its
        children, and so may come later."""
        deadline = time.monotonic() + seconds
        while (missing := names - {span.name for span in self.of(trace)}) or not connected(self.of(trace)):
            assert time.monotonic() < deadline, f"{missing or 'parents'} did not come: {self.of(trace)}"
            time.sleep(0.1)
        return self.of(trace)


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
        span.status.code == 2,
    )


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs one."""
    server, made = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(0)


def connected(spans: list[Span]) -> bool:
    """Whether every span but one has its parent among them."""
    ids = {span.id for span in spans}
    return sum(span.parent not in ids for span in spans) == 1
