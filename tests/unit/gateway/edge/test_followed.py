"""What a client asks for can be followed: what is journaled of it and logged about it names the call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from services.common.telemetry import logs, subject
from tests.unit.gateway.edges import ALICE, BASE, Edges, new_model, new_session
from tinsmith.v1 import service_pb2_grpc, training_pb2

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER = f"00-{'1' * 32}-{'2' * 16}-00"


class Told(logging.Handler):
    """The lines of the access log, as a process writes them, by what they are about."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.JsonFormatter("gateway-0"))
        self.lines: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.subjects: list[subject.Subject | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.fields.append(record.__dict__["tinsmith_fields"])
        self.subjects.append(subject.current())


@contextmanager
def access_log() -> Iterator[Told]:
    log, told = logging.getLogger("tinsmith.access"), Told()
    before = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield told
    finally:
        log.removeHandler(told)
        log.setLevel(before)


async def sampling_session(client: Any) -> str:
    body = {"session_id": await new_session(client), "sampling_session_seq_id": 0, "base_model": BASE}
    return (await client.post("create_sampling_session", json=body)).json()["sampling_session_id"]


async def test_an_operation_is_journaled_with_the_trace_and_the_owner_of_its_call(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        accepted = await client.post("optim_step", json=body, headers={"traceparent": TRACEPARENT})
        assert accepted.status_code == 200
        operation = await edges.operation(model, 1)
        assert operation is not None
        assert operation.origin.traceparent.split("-")[1] == TRACE
        assert operation.origin.owner == "alice"
        # Sent again, it is the same request, and stays what the first call made it.
        again = await client.post("optim_step", json=body, headers={"traceparent": OTHER})
        assert again.json() == accepted.json()
        assert await edges.operation(model, 1) == operation


async def test_a_sample_is_the_same_request_under_another_trace(edges: Edges) -> None:
    async with edges.http() as client:
        body = {
            "sampling_session_id": await sampling_session(client),
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "num_samples": 1,
            "sampling_params": {"max_tokens": 4},
        }
        first = await client.post("asample", json=body, headers={"traceparent": TRACEPARENT})
        assert first.status_code == 200, first.text
        again = await client.post("asample", json=body, headers={"traceparent": OTHER})
        assert again.json()["request_id"] == first.json()["request_id"]
        request = await edges.sample(first.json()["request_id"])
    assert request.origin.traceparent.split("-")[1] == TRACE
    assert request.origin.owner == "alice"


async def test_a_request_is_one_line_with_its_route_owner_and_bytes_and_without_what_its_client_wrote(
    edges: Edges,
) -> None:
    with access_log() as told:
        async with edges.http() as client:
            model = await new_model(edges, client)
            body = b'{"model_id": "%s", "seq_id": 1, "adam_params": {}}' % model.encode()
            await client.post("optim_step", content=body, headers={"traceparent": TRACEPARENT})
            await client.get("sessions/%0d%0aforged", params={"x": ALICE})
            await client.get(f"no/{ALICE}")
    *_, step, session, nothing = zip(told.fields, told.subjects, strict=True)
    assert step[0]["route"] == "/api/v1/optim_step"
    assert (step[0]["method"], step[0]["outcome"], step[0]["received_bytes"]) == ("POST", "200", len(body))
    assert step[0]["sent_bytes"] > 10
    assert step[1] is not None
    assert (step[1].trace_id, step[1].owner, step[1].request_id) == (TRACE, "alice", f"{model}:1")
    assert session[0]["route"] == "/api/v1/sessions/{session_id}"
    assert nothing[0]["route"] == "none"
    assert all("\n" not in line and ALICE not in line and "forged" not in line for line in told.lines)


async def test_a_grpc_call_is_one_line_under_the_trace_of_its_client(edges: Edges) -> None:
    with access_log() as told:
        async with edges.http() as client, grpc.aio.insecure_channel(edges.grpc_address) as channel:
            model = await new_model(edges, client)
            stub = service_pb2_grpc.TinsmithServiceStub(channel)
            request = training_pb2.OptimStepRequest(model_id=model, seq_id=1)
            request.adam.CopyFrom(training_pb2.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.9, eps=1e-8))
            metadata = (("x-api-key", ALICE), ("traceparent", TRACEPARENT))
            await stub.OptimStep(request, timeout=20, metadata=metadata)
        operation = await edges.operation(model, 1)
    assert operation is not None and operation.origin.traceparent.split("-")[1] == TRACE
    (line,) = [fields for fields in told.fields if fields["method"] == "gRPC"]
    assert line["route"] == "/tinsmith.v1.TinsmithService/OptimStep"
    assert line["outcome"] == "OK"
    assert line["received_bytes"] == request.ByteSize()
    about = told.subjects[told.fields.index(line)]
    assert about is not None and (about.trace_id, about.owner) == (TRACE, "alice")
