"""What can be done over HTTP can be done over gRPC."""

from __future__ import annotations

from services.gateway.edge.grpc.service import TinsmithService
from services.gateway.edge.http.server import TABLE
from tinsmith.v1 import service_pb2

# The gRPC methods that do what an HTTP route does.
METHODS = {
    "create_session": "CreateSession",
    "session_heartbeat": "Heartbeat",
    "finish_session": "FinishSession",
    "get_server_capabilities": "ListModels GetServerInfo",
    "create_model": "CreateModel",
    "get_info": "GetModelInfo",
    "forward_backward": "ForwardBackward",
    "forward": "ForwardBackward",
    "optim_step": "OptimStep",
    "save_weights": "SaveState",
    "load_weights": "LoadState CreateModelFromState",
    "save_weights_for_sampler": "SaveForSampler",
    "weights_info": "GetCheckpoint",
    "save_weights_external": "SaveExternal",
    "unload_model": "UnloadModel",
    "list_runs": "ListTrainingRuns",
    "get_run": "GetTrainingRun",
    "list_of_run": "ListCheckpoints",
    "external_weights_urls": "ReadExternalWeights",
    "delete": "DeleteCheckpoint",
    "publish": "PublishCheckpoint",
    "unpublish": "UnpublishCheckpoint",
    "set_ttl": "SetCheckpointTtl",
    "list_all": "ListCheckpoints",
    "list_sessions": "ListSessions",
    "search": "SearchSessions",
    "get_session": "GetSession",
    "assign_project": "SetSessionProject",
    "create_sampling_session": "CreateSamplingSession",
    "get_sampler": "GetSamplingSession",
    "asample": "Sample",
    "retrieve_future": "GetResult",
    "retrieve_futures": "WatchSamples ReadResults AcknowledgeResults",
    "cancel_future": "CancelSample",
    "get_tokenizer": "GetTokenizer",
    "audit": "ListAuditRecords",
}
# Over HTTP text streams, and not a sample's tokens.
OF_GRPC = {"StreamSample"}
# The SDK's own affairs, and what is refused over HTTP too.
OF_THE_SDK = {"client_config", "client_dynamic_config", "telemetry", "own_api_key", "exchange_key"}
HTTP_ONLY = {"copy_weights", "usage", "storage", "trace_export"}
REFUSED = {"delete_own_api_key"}


def methods() -> set[str]:
    return {method.name for method in service_pb2.DESCRIPTOR.services_by_name["TinsmithService"].methods}


def test_every_http_route_has_its_grpc_method() -> None:
    routes = {handler.__name__ for _, _, handler in TABLE}
    assert routes - OF_THE_SDK - REFUSED - HTTP_ONLY == set(METHODS)
    assert {name for names in METHODS.values() for name in names.split()} | OF_GRPC == methods()


def test_every_method_of_the_contract_is_served() -> None:
    for name in methods():
        defined_by = getattr(TinsmithService, name).__module__
        assert defined_by.startswith(("services.gateway.edge.grpc", "services.gateway.edge.books")), (
            f"{name} is not implemented"
        )
