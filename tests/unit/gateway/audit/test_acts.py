"""What is written down of each method of both protocols."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from services.gateway.audit.acts import ACTS, Recorded, object_of
from services.gateway.edge.grpc.receive import fields_of
from services.gateway.edge.http.codec import messages
from services.gateway.identity.rights import NEEDS
from tinsmith.v1 import admin_pb2, service_pb2

RPCS = {
    method.name: method
    for descriptor in (service_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in descriptor.services_by_name.values()
    for method in service.methods
}
NOTED = {"model_id", "request_id", "id"}
"""What the trail itself knows."""
BODIES: dict[str, Any] = {
    "POST create_session": messages.CreateSession,
    "PUT sessions/{session_id}/project": messages.AssignProject,
    "POST create_model": messages.CreateModel,
    "POST load_weights": messages.LoadWeights,
    "POST unload_model": messages.UnloadModel,
    "POST save_weights": messages.SaveWeights,
    "POST save_weights_external": messages.SaveWeightsExternal,
    "POST save_weights_for_sampler": messages.SaveWeightsForSampler,
    "POST create_sampling_session": messages.CreateSamplingSession,
    "PUT training_runs/{training_run_id}/checkpoints/{kind}/{name}/ttl": messages.SetTtl,
    "POST copy_weights": messages.CopyWeights,
}
ANSWERS = {"POST create_session": {"session_id"}, "POST create_sampling_session": {"sampling_session_id"}}


def test_somebody_decided_what_is_written_down_of_each_method() -> None:
    assert set(ACTS) == set(NEEDS)


def test_whatever_only_an_administrator_may_is_written_down() -> None:
    assert [name for name, need in NEEDS.items() if need.admin and ACTS[name] is None] == []


def test_what_writes_is_written_down_or_is_work_that_is_counted_otherwise() -> None:
    unwritten = {name for name, need in NEEDS.items() if need.writes and ACTS[name] is None}
    assert unwritten == {
        *("Heartbeat", "POST session_heartbeat"),
        *("ForwardBackward", "POST forward_backward", "POST forward", "OptimStep", "POST optim_step"),
        *("Sample", "StreamSample", "CancelSample", "POST asample", "POST cancel_future"),
        *("POST completions", "POST chat/completions", "POST messages"),
        *("GetResult", "ReadResults", "WatchSamples", "AcknowledgeResults"),
        *("POST retrieve_future", "POST retrieve_futures"),
    }


def _with_all(recorded: Recorded, known: set[str]) -> list[str]:
    """The objects that can be told of a method with these values."""
    return [one for one in recorded.objects if Recorded("", (one,)).values <= known]


@pytest.mark.parametrize("name", [name for name, row in ACTS.items() if row and name in RPCS])
def test_the_object_of_a_grpc_method_is_made_of_its_fields(name: str) -> None:
    recorded, method = ACTS[name], RPCS[name]
    assert recorded is not None
    known = NOTED | _fields(method.input_type) | _fields(method.output_type)
    assert _with_all(recorded, known)
    # Details may be of one of the methods that share the row.
    sharing = [other for other, row in ACTS.items() if row is recorded and other in RPCS]
    for wanted in {*recorded.details, recorded.unless_without} - {""}:
        assert any(
            wanted in _fields(RPCS[other].input_type) | _fields(RPCS[other].output_type) for other in sharing
        ), wanted


def _fields(descriptor: Any, prefix: str = "") -> set[str]:
    found = set()
    for field in descriptor.fields:
        if not field.is_repeated:
            found.add(prefix + field.name)
            if field.message_type is not None and not prefix:
                found |= _fields(field.message_type, f"{field.name}.")
    return found


@pytest.mark.parametrize("name", [name for name, row in ACTS.items() if row and name not in RPCS])
def test_the_object_of_a_route_is_made_of_its_path_its_body_and_its_answer(name: str) -> None:
    recorded = ACTS[name]
    assert recorded is not None
    path = Recorded("", (name.partition(" ")[2],)).values
    body = set(typing.get_type_hints(BODIES[name])) if name in BODIES else set()
    known = NOTED | path | body | ANSWERS.get(name, set())
    assert _with_all(recorded, known)
    assert recorded.unless_without in body | {""}


def test_the_first_name_that_a_call_has_all_values_of_is_told() -> None:
    recorded = Recorded("checkpoint_save", ("tinker://{model_id}/weights/{name}", "{request_id}"))
    values = {"model_id": "m", "name": None, "request_id": "m:3"}
    assert object_of(recorded, [values.get]) == "m:3"
    assert object_of(recorded, [values.get, {"name": "last"}.get]) == "tinker://m/weights/last"
    assert object_of(recorded, []) == ""


def test_a_name_never_carries_an_api_key_nor_grows() -> None:
    recorded = Recorded("key_revoke", ("{id}",))
    assert "s3cret" not in object_of(recorded, [{"id": "tml-s3cret-s3cret"}.get])
    assert len(object_of(recorded, [{"id": "x" * 10_000}.get])) == 256


def test_values_of_a_message_are_read_by_name() -> None:
    made = admin_pb2.CreateKeyResponse(
        api_key=admin_pb2.ApiKey(id="k", role=admin_pb2.KEY_ROLE_ADMIN, scopes=[admin_pb2.KEY_SCOPE_TRAIN])
    )
    value = fields_of(made)
    assert (value("api_key.id"), value("api_key.role")) == ("k", "KEY_ROLE_ADMIN")
    assert [value(name) for name in ("key", "api_key", "api_key.scopes", "nothing")] == [None] * 4
