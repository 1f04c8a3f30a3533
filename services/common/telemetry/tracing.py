"""Spans of what is done about a call, exported by OpenTelemetry.

Invariants: where the environment names no collector nothing of OpenTelemetry is loaded, and a span costs a
comparison. A span belongs to the subject of its task; what serves nobody in particular has none. Exporting
never holds up a loop: spans wait in a bounded queue on a thread of their own, and those that find it full are
lost.

The environment is OpenTelemetry's own: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) switches it on,
OTEL_EXPORTER_OTLP_PROTOCOL says grpc (the default) or http/protobuf, OTEL_TRACES_SAMPLER what is kept;
the SDK reads the others.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from services.common.contract.errors import InvalidRequest
from services.common.telemetry import subject
from services.common.telemetry.subject import Subject

log = logging.getLogger(__name__)

_FLUSH_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}

_tracer: Any = None
_NONE = nullcontext()
"""Where nothing is exported; it can be entered again and again."""

Value = str | int | float | bool


def protocol(environment: Mapping[str, str]) -> str:
    """By what the environment wants spans exported: "grpc" or "http/protobuf"; empty: not at all.

    Raises:
        InvalidRequest: it wants what is not to be had.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter == "none" or not any(environment.get(name) for name in _ENDPOINTS):
        return ""
    if exporter != "otlp":
        raise InvalidRequest(f"OTEL_TRACES_EXPORTER must be otlp or none, not {exporter!r}")
    found = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if found not in _EXPORTERS:
        raise InvalidRequest(f"{_PROTOCOLS[1]} must be grpc or http/protobuf, not {found!r}")
    try:
        importlib.import_module(_EXPORTERS[found])
    except ImportError as error:
        why = f"{_ENDPOINTS[1]} is set, and traces need: pip install 'tinsmith[tracing]'"
        raise InvalidRequest(why) from error
    return found


@contextmanager
def exported(service: str, instance: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Within it spans of this process are exported, if the environment says whereto. At its end those that
    wait are sent, for at most five seconds.

    Args:
        service: of the process, for example "tinsmith-gateway"; OTEL_SERVICE_NAME goes before it.
        instance: name of the process.

    Raises:
        InvalidRequest: as `protocol`.
    """
    global _tracer
    by = protocol(environment)
    if not by:
        yield
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"service.name": environment.get("OTEL_SERVICE_NAME") or service}
    about |= {"service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    exporter = importlib.import_module(_EXPORTERS[by]).OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("tinsmith")
    log.info("exporting traces by %s", by)
    try:
        yield
    finally:
        _tracer = None
        # It sends what waits. A collector that is away must not keep the process from its end.
        ending = threading.Thread(target=provider.shutdown, name="end of traces", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


def call(name: str) -> AbstractContextManager[Any]:
    """The span of a call that this process answers: a child of its caller's span, else the root of a trace,
    whose id the subject of this task has from now on.

    Yields the span, to give it a better name; None: there is none.
    """
    about = subject.current()
    return _NONE if _tracer is None or about is None else _answered(name, about)


@contextmanager
def _answered(name: str, about: Subject) -> Iterator[Any]:
    made = _begun(name, about, "SERVER")
    context = made.get_span_context()
    about.trace_id, about.span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    about.sampled, about.joined = context.trace_flags.sampled, True
    try:
        yield made
    except BaseException as error:
        _failed(made, error)
        raise
    finally:
        made.set_attributes(_attributes(about))
        made.end()


def span(name: str, kind: str = "INTERNAL", **attributes: Value) -> AbstractContextManager[None]:
    """The span of a part of what the task does for its subject.

    Args:
        kind: INTERNAL, or CLIENT of a call to another process.
    """
    about = subject.current()
    if _tracer is None or about is None or not about.joined:
        return _NONE
    return _part(name, about, kind, attributes)


@contextmanager
def _part(name: str, about: Subject, kind: str, attributes: Mapping[str, Value]) -> Iterator[None]:
    made = _begun(name, about, kind)
    made.set_attributes(attributes)
    inner = replace(about, span_id=f"{made.get_span_context().span_id:016x}")
    try:
        with subject.about(inner):
            yield
    except BaseException as error:
        _failed(made, error)
        raise
    finally:
        made.end()


def record(name: str, about: Subject | None, began: float, **attributes: Value) -> None:
    """A span of what has just ended.

    Args:
        about: whom it was for.
        began: when, in seconds of the monotonic clock.
    """
    if _tracer is None or about is None or not about.joined:
        return
    now = time.time_ns()
    since = now - round((time.monotonic() - began) * 1e9)
    made = _begun(name, about, "INTERNAL", since)
    made.set_attributes({**_attributes(about), **attributes})
    made.end(now)


def _begun(name: str, about: Subject, kind: str, since: int | None = None) -> Any:
    from opentelemetry import trace
    from opentelemetry.context import Context

    parent = Context()
    if about.joined:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if about.sampled else trace.TraceFlags.DEFAULT)
        seen = trace.SpanContext(int(about.trace_id, 16), int(about.span_id, 16), True, flags)
        parent = trace.set_span_in_context(trace.NonRecordingSpan(seen), parent)
    return _tracer.start_span(name, parent, trace.SpanKind[kind], start_time=since)


def _attributes(about: Subject) -> dict[str, str]:
    found = {
        "tinsmith.owner": about.owner,
        "tinsmith.model_id": about.model_id,
        "tinsmith.request_id": about.request_id,
    }
    return {name: value for name, value in found.items() if value}


def _failed(made: Any, error: BaseException) -> None:
    from opentelemetry import trace

    # The words of an error may quote a client.
    made.set_status(trace.Status(trace.StatusCode.ERROR, getattr(error, "code", type(error).__name__)))
