"""A call is one connected trace, from the edge to the atomic step on Redis and to who goes on with it."""

from __future__ import annotations

import time

import grpc.aio
import httpx
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.telemetry import subject, tracing
from services.common.telemetry.subject import Subject
from tests.collector import collector, connected
from tests.unit.gateway.edge.test_followed import TRACE, TRACEPARENT
from tests.unit.gateway.edges import ALICE, Edges, new_model
from tinsmith.v1 import models_pb2, service_pb2_grpc


def step(model: str, seq_id: int) -> dict[str, object]:
    return {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}


async def test_what_goes_on_with_an_operation_belongs_to_the_trace_of_its_call(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as traces:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.endpoint)
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint}
        async with edges.http() as client:
            model = await new_model(edges, client)
            with tracing.exported("tinsmith-gateway", "gateway-0", environment):
                await client.post("optim_step", json=step(model, 1), headers={"traceparent": TRACEPARENT})
                own = await client.post("optim_step", json=step(model, 2))
                assert own.status_code == 200
                operation = await edges.operation(model, 1)
                assert operation is not None
                # As the trainer does, which has the operation from the journal.
                about = Subject.of(operation.origin.traceparent, "alice", model, f"{model}:1")
                with subject.about(about), tracing.span("publish the snapshot"):
                    tracing.record("optimstep", subject.current(), time.monotonic() - 1.5, outcome="done")
            other = await edges.operation(model, 2)
    spans = traces.wait_for(TRACE, {"POST /api/v1/optim_step", "redis accept", "optimstep"})
    assert connected(spans)
    by_name = {span.name: span for span in spans}
    edge = by_name["POST /api/v1/optim_step"]
    assert edge.parent == TRACEPARENT.split("-")[2]
    assert by_name["redis accept"].parent == by_name["publish the snapshot"].parent == edge.id
    assert by_name["optimstep"].parent == by_name["publish the snapshot"].id
    assert by_name["optimstep"].ended - by_name["optimstep"].began == pytest.approx(1.5e9, rel=0.5)
    assert edge.service == "tinsmith-gateway"
    assert edge.attributes["tinsmith.request_id"] == f"{model}:1"
    assert edge.attributes["tinsmith.owner"] == "alice"
    # A call without a trace of its client's begins one, which its journaled operation names.
    assert other is not None
    begun = traces.of(other.origin.traceparent.split("-")[1])
    assert connected(begun) and "" in {span.parent for span in begun}


async def test_a_trace_that_its_client_does_not_sample_is_not_exported(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as traces:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.endpoint)
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint}
        with tracing.exported("tinsmith-gateway", "gateway-0", environment):
            async with edges.http() as client:
                headers = {"traceparent": TRACEPARENT.removesuffix("01") + "00"}
                assert (await client.get("get_server_capabilities", headers=headers)).status_code == 200
                assert (await client.get("get_server_capabilities")).status_code == 200
                # Nobody follows probes.
                assert (await client.get("healthz")).status_code == 200
    assert traces.of(TRACE) == []
    assert [span.name for span in traces.spans] == ["GET /api/v1/get_server_capabilities"]


async def test_who_has_no_key_cannot_have_a_trace_exported(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as traces:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint}
        for name, value in (*environment.items(), ("OTEL_TRACES_SAMPLER", "parentbased_always_off")):
            monkeypatch.setenv(name, value)
        asked, sent = models_pb2.ListModelsRequest(), (("traceparent", TRACEPARENT),)
        with tracing.exported("tinsmith-gateway", "gateway-0", environment):
            async with edges.http("tml-wrong") as stranger, edges.http("") as nobody:
                for client in (stranger, nobody):
                    found = await client.get("models", headers=dict(sent))
                    assert found.status_code == 404
                    found = await client.get("get_server_capabilities", headers=dict(sent))
                    assert found.status_code == 401
            async with grpc.aio.insecure_channel(edges.grpc_address) as channel:
                stub = service_pb2_grpc.TinsmithServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.ListModels(asked, metadata=(*sent, ("x-api-key", "tml-wrong")), timeout=20)
                await stub.ListModels(asked, metadata=(*sent, ("x-api-key", ALICE)), timeout=20)
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {ALICE}"}) as client:
                found = await client.get(f"{edges.base_url}/oai/api/v1/models", headers=dict(sent))
                assert found.status_code == 200
    # With a key one's traces go on, also where no other is kept.
    found = traces.of(TRACE)
    calls = {span.name for span in found if not span.name.startswith("redis")}
    assert calls == {"/tinsmith.v1.TinsmithService/ListModels", "GET /oai/api/v1/models"}
    assert len(traces.spans) == len(found)


def test_the_environment_says_whether_and_how_traces_are_exported() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    assert tracing.protocol({}) == ""
    assert tracing.protocol(endpoint) == "grpc"
    assert tracing.protocol({**endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) == "http/protobuf"
    assert tracing.protocol({**endpoint, "OTEL_SDK_DISABLED": "true"}) == ""
    assert tracing.protocol({**endpoint, "OTEL_TRACES_EXPORTER": "none"}) == ""
    for wrong in ({"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}):
        with pytest.raises(InvalidRequest):
            tracing.protocol({**endpoint, **wrong})


def test_without_a_collector_nothing_of_opentelemetry_is_loaded() -> None:
    import subprocess
    import sys

    program = (
        "import sys; from services.common.telemetry import tracing, subject\n"
        "with tracing.exported('s', 'i', {}), subject.about(subject.Subject()), tracing.call('c'):\n"
        "    with tracing.span('x'): tracing.record('y', subject.current(), 0.0)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
