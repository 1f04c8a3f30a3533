"""The methods of gRPC."""

from __future__ import annotations

from tests.security.matrix import Row
from tests.unit.gateway.edges import BASE, LORA
from tests.unit.gateway.tensors import tensor
from tinsmith.v1 import (
    admin_pb2,
    audit_pb2,
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    runs_pb2,
    sampling_pb2,
    server_pb2,
    sessions_pb2,
    training_pb2,
)


def sample(session: str, number: int) -> sampling_pb2.SampleRequest:
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    return sampling_pb2.SampleRequest(
        sampling_session_id=session, seq_id=number, prompt=tensor([1], "<i4"), num_samples=1, params=params
    )


def batch() -> training_pb2.ForwardBackward:
    datum = training_pb2.Datum(tokens=tensor([1, 2], "<i4"))
    datum.loss_inputs["target_tokens"].CopyFrom(tensor([2, 3], "<i8"))
    return training_pb2.ForwardBackward(data=[datum], loss_fn="cross_entropy")


ROWS = [
    Row("GetServerInfo", "none", lambda w: server_pb2.GetServerInfoRequest(), reads=True),
    Row("ListModels", "none", lambda w: models_pb2.ListModelsRequest(), reads=True),
    # No sampler runs here that could be asked for the files.
    Row(
        "GetTokenizer",
        "none",
        lambda w: models_pb2.GetTokenizerRequest(base_model=BASE),
        reads=True,
        through="UNAVAILABLE",
    ),
    Row("CreateSession", "none", lambda w: sessions_pb2.CreateSessionRequest()),
    Row("Heartbeat", "owned", lambda w: sessions_pb2.HeartbeatRequest(session_id=w.session)),
    Row(
        "FinishSession",
        "owned",
        lambda w: sessions_pb2.FinishSessionRequest(session_id=w.session),
        fresh=True,
    ),
    Row(
        "CreateModel",
        "owned",
        lambda w: models_pb2.CreateModelRequest(
            session_id=w.session, model_seq_id=w.number, base_model=BASE, lora=LORA
        ),
    ),
    Row(
        "CreateModelFromState",
        "readable",
        lambda w: models_pb2.CreateModelFromStateRequest(
            session_id=w.session, model_seq_id=w.number, path=w.weights
        ),
        in_own_session=True,
    ),
    Row("GetModelInfo", "owned", lambda w: models_pb2.GetModelInfoRequest(model_id=w.model), reads=True),
    Row(
        "UnloadModel",
        "owned",
        lambda w: models_pb2.UnloadModelRequest(model_id=w.model, seq_id=w.number),
        fresh=True,
    ),
    Row(
        "ForwardBackward",
        "owned",
        lambda w: training_pb2.ForwardBackwardRequest(
            model_id=w.model, seq_id=w.number, forward_backward=batch()
        ),
    ),
    Row(
        "OptimStep",
        "owned",
        lambda w: training_pb2.OptimStepRequest(
            model_id=w.model, seq_id=w.number, adam=training_pb2.AdamParams(learning_rate=1e-4)
        ),
    ),
    Row(
        "SaveState",
        "owned",
        lambda w: checkpoints_pb2.SaveStateRequest(model_id=w.model, seq_id=w.number, name="new"),
    ),
    Row(
        "LoadState",
        "owned",
        lambda w: checkpoints_pb2.LoadStateRequest(model_id=w.model, seq_id=w.number, path=w.weights),
    ),
    Row(
        "SaveExternal",
        "owned",
        lambda w: checkpoints_pb2.SaveExternalRequest(model_id=w.model, seq_id=w.number, name="new"),
    ),
    Row(
        "SaveForSampler",
        "owned",
        lambda w: checkpoints_pb2.SaveForSamplerRequest(model_id=w.model, seq_id=w.number, name="new"),
    ),
    Row(
        "CreateSamplingSession",
        "readable",
        lambda w: sampling_pb2.CreateSamplingSessionRequest(
            session_id=w.session, sampling_session_seq_id=w.number, model_path=w.sampler
        ),
        in_own_session=True,
    ),
    Row(
        "GetSamplingSession",
        "owned",
        lambda w: sampling_pb2.GetSamplingSessionRequest(sampling_session_id=w.sampling),
        reads=True,
    ),
    Row("Sample", "owned", lambda w: sample(w.sampling, w.number)),
    # No sampler runs here that could answer.
    Row(
        "StreamSample",
        "owned",
        lambda w: sampling_pb2.StreamSampleRequest(sample=sample(w.sampling, w.number)),
        through="DEADLINE_EXCEEDED",
    ),
    Row(
        "CancelSample",
        "owned",
        lambda w: sampling_pb2.CancelSampleRequest(request_id=w.request),
        fresh=True,
    ),
    Row("GetSession", "owned", lambda w: sessions_pb2.GetSessionRequest(session_id=w.session), reads=True),
    Row("ListSessions", "none", lambda w: sessions_pb2.ListSessionsRequest(), reads=True),
    Row("SearchSessions", "none", lambda w: sessions_pb2.SearchSessionsRequest(), reads=True),
    Row(
        "SetSessionProject",
        "owned",
        lambda w: sessions_pb2.SetSessionProjectRequest(session_id=w.session, project_id="p"),
    ),
    Row(
        "GetTrainingRun",
        "readable",
        lambda w: runs_pb2.GetTrainingRunRequest(training_run_id=w.model, accessible=True),
        reads=True,
    ),
    Row("ListTrainingRuns", "none", lambda w: runs_pb2.ListTrainingRunsRequest(), reads=True),
    Row(
        "ListCheckpoints",
        "readable",
        lambda w: checkpoints_pb2.ListCheckpointsRequest(model_id=w.model),
        reads=True,
    ),
    Row(
        "GetCheckpoint",
        "readable",
        lambda w: checkpoints_pb2.GetCheckpointRequest(path=w.weights),
        reads=True,
    ),
    Row(
        "DeleteCheckpoint",
        "changed",
        lambda w: checkpoints_pb2.DeleteCheckpointRequest(path=w.weights),
        fresh=True,
    ),
    Row(
        "SetCheckpointTtl",
        "changed",
        lambda w: checkpoints_pb2.SetCheckpointTtlRequest(path=w.weights, ttl_seconds=7200),
        fresh=True,
    ),
    Row(
        "PublishCheckpoint",
        "changed",
        lambda w: checkpoints_pb2.PublishCheckpointRequest(path=w.weights),
        fresh=True,
    ),
    Row(
        "UnpublishCheckpoint",
        "changed",
        lambda w: checkpoints_pb2.UnpublishCheckpointRequest(path=w.weights),
    ),
    Row(
        "ReadExternalWeights",
        "readable",
        lambda w: checkpoints_pb2.ReadExternalWeightsRequest(path=w.export),
        reads=True,
    ),
    Row(
        "GetResult",
        "owned",
        lambda w: results_pb2.GetResultRequest(request_id=f"{w.model}:0", timeout_seconds=0),
    ),
    # Each request of a stream is answered by itself.
    Row(
        "ReadResults",
        "owned",
        lambda w: results_pb2.ReadResultsRequest(request_ids=[f"{w.model}:0"], timeout_seconds=0),
    ),
    Row(
        "WatchSamples",
        "owned",
        lambda w: results_pb2.WatchSamplesRequest(sampling_session_id=w.sampling),
        lasts=True,
    ),
    Row(
        "AcknowledgeResults",
        "owned",
        lambda w: results_pb2.AcknowledgeResultsRequest(request_ids=[f"{w.model}:0"]),
        fresh=True,
    ),
    Row("ListAuditRecords", "none", lambda w: audit_pb2.ListAuditRecordsRequest(), reads=True),
    Row("CreateKey", "admin", lambda w: admin_pb2.CreateKeyRequest(owner="new")),
    Row("ListKeys", "admin", lambda w: admin_pb2.ListKeysRequest()),
    Row("RevokeKey", "admin", lambda w: admin_pb2.RevokeKeyRequest(id=w.admin["revoke"]), fresh=True),
    Row("RotateKey", "admin", lambda w: admin_pb2.RotateKeyRequest(id=w.admin["rotate"]), fresh=True),
    Row("ListClusterSessions", "admin", lambda w: admin_pb2.ListClusterSessionsRequest()),
    Row("EndSession", "admin", lambda w: admin_pb2.EndSessionRequest(session_id=w.session), fresh=True),
    Row("ListServices", "admin", lambda w: admin_pb2.ListServicesRequest()),
    Row("DrainService", "admin", lambda w: admin_pb2.DrainServiceRequest(id="trainer-0")),
    Row("UndrainService", "admin", lambda w: admin_pb2.UndrainServiceRequest(id="trainer-0")),
    # Its trainer is alive.
    Row(
        "RetireBaseModel",
        "admin",
        lambda w: admin_pb2.RetireBaseModelRequest(base_model=BASE),
        through="ALREADY_EXISTS",
    ),
    Row("ListUnreadable", "admin", lambda w: admin_pb2.ListUnreadableRequest()),
    Row(
        "DropUnreadable",
        "admin",
        lambda w: admin_pb2.DropUnreadableRequest(name=w.admin["unreadable"]),
        fresh=True,
    ),
    Row("ListOwners", "admin", lambda w: admin_pb2.ListOwnersRequest()),
]
