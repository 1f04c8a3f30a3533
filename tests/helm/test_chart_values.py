"""Which values the chart takes and which it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.helm.rendered import CHART, container, refusal, render, workloads

MODEL = {"name": "a/b", "path": "a/b"}
# Values that exist only where a user writes them.
NOT_IN_VALUES_YAML = {"global", "models[].id", "models[].revision", "models[].trainer", "models[].sampler"}


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"replica": 3}},
        {"gateway": {"service": {"port": 80}}},
        {"gateway": {"ownerLimits": {"tokens": 5}}},
        {"trainer": {"gpus": 1}},
        {"sampler": {"resources": {"limit": {}}}},
        {"models": [MODEL | {"replicas": 2}]},
        {"models": [MODEL | {"sampler": {"replica": 2}}]},
        {"redis": {"password": "in plain sight"}},
    ],
    ids=json.dumps,
)
def test_an_unknown_value_is_refused_by_the_schema(values: dict[str, Any]) -> None:
    assert "Additional property" in refusal(values)


@pytest.mark.parametrize(
    "values",
    [
        {"models": []},
        {"models": [{"name": "a/b"}]},
        {"models": [MODEL | {"name": "a=b"}]},
        {"models": [MODEL | {"id": "Not_A_Label"}]},
        {"device": "gpu"},
        {"dtype": "float16"},
        {"gateway": {"replicas": 0}},
        {"gateway": {"sessions": {"endAfter": 60}}},
        {"gateway": {"sessions": {"forgetAfter": 0}}},
        {"gateway": {"memoryMiB": 100}},
        {"gateway": {"state": {"bytes": -1}}},
        {"gateway": {"ownerLimits": {"models": 0}}},
        {"gateway": {"ownerLimits": {"pendingOperations": "many"}}},
        {"networkPolicy": {"gatewayFrom": [{}]}},
        {"trainer": {"zeroStage": 4}},
        {"trainer": {"offloadOptimizer": "nvme"}},
        {"trainer": {"maxFullModels": 0}},
        {"trainer": {"ranks": "two"}},
        {"sampler": {"gpuMemoryUtilization": 1.5}},
        {"sampler": {"maxLoraRank": 24}},
        {"sampler": {"headDtype": "bfloat16"}},
        {"sampler": {"speculativeNgramTokens": 129}},
        {"sampler": {"modelRunner": "v3"}},
        {"sampler": {"routedExperts": "yes"}},
        {"sampler": {"pipelineParallelSize": 0}},
        {"sampler": {"quantization": "fp8"}},
        {"data": {"accessMode": "ReadOnlyMany"}},
        {"data": {"size": "lots"}},
        {"checkpoints": {"store": "/data/elsewhere"}},
        {"checkpoints": {"store": "s3://key:secret@bucket/x"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"redis": {"appendfsync": "no"}},
        {"redis": {"maxmemory": "0"}},
        {"redis": {"maxmemory": "4Gi"}},
        {"listen": "localhost"},
        {"gateway": {"image": {"digest": "latest"}}},
        {"gateway": {"publicUrl": "tinsmith.example.com"}},
        {"gateway": {"autoscaling": {"targetCPU": 0}}},
        {"trainer": {"activationCheckpointing": "sometimes"}},
        {"trainer": {"terminationGracePeriodSeconds": "long"}},
        {"sampler": {"kvCacheGiB": -1}},
        {"modelCache": {"hostPath": "relative"}},
        {"trainer": {"temporarySize": "much"}},
        {"sampler": {"autoscaling": {"prometheus": "prometheus:9090"}}},
        {"gateway": {"service": {"ipFamilies": ["ipv4"]}}},
    ],
    ids=json.dumps,
)
def test_a_value_that_cannot_work_is_refused_by_the_schema(values: dict[str, Any]) -> None:
    assert "don't meet the specifications of the schema" in refusal(values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"redis": {"maxmemory": "4gb"}},
            "redis.maxmemory 4gb is not below redis.resources.limits.memory 4Gi",
        ),
        ({"sampler": {"kvCacheDtype": "fp8"}}, "sampler.kvCacheDtype fp8 is for device cuda"),
        ({"sampler": {"kvCacheGiB": 2}, "device": "cuda"}, "sampler.kvCacheGiB 2 is for device cpu"),
        (
            {"sampler": {"quantization": "fp8_per_block"}},
            "sampler.quantization fp8_per_block is for device cuda",
        ),
        (
            {"sampler": {"quantization": "fp8_per_block"}, "device": "cuda", "dtype": "float32"},
            "fp8_per_block is for bfloat16, and dtype says float32",
        ),
        ({"device": "cuda", "dtype": "float32"}, "float32 on device cuda is for samplers without adapters"),
        ({"sampler": {"modelRunner": "v2"}}, "sampler.modelRunner v2 is for device cuda"),
        (
            {"sampler": {"speculativeNgramTokens": 2, "pipelineParallelSize": 2}},
            "sampler.speculativeNgramTokens does not go with sampler.pipelineParallelSize",
        ),
        (
            {"sampler": {"routedExperts": True, "pipelineParallelSize": 2}},
            "sampler.routedExperts does not go with sampler.pipelineParallelSize",
        ),
        (
            {"sampler": {"routedExperts": True, "modelRunner": "v1"}, "device": "cuda"},
            "sampler.routedExperts on device cuda needs sampler.modelRunner v2",
        ),
        (
            {"sampler": {"maxBatchedTokens": 100, "maxSequences": 101}},
            "a step computes a token of each of sampler.maxSequences 101",
        ),
        ({"gateway": {"memoryMiB": 3072}}, "gateway.memoryMiB 3072 is not below"),
        ({"sampler": {"fullSnapshotCacheGiB": 15}}, "take 17 GiB and its memory limit is 16384 MiB"),
        # Each worker has its own keys and values, and all of them share what adapters and full models take.
        (
            {"sampler": {"tensorParallelSize": 2, "kvCacheGiB": 14}},
            "take 34 GiB and its memory limit is 32768 MiB",
        ),
        (
            {"models": [MODEL | {"trainer": {"enabled": False}, "sampler": {"replicas": 0}}]},
            'model "a/b" is neither trained nor sampled',
        ),
        ({"metrics": {"port": 9000}}, "metrics.port 9000 is taken"),
        ({"gateway": {"service": {"httpPort": 80, "grpcPort": 80}}}, "httpPort and grpcPort must differ"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}},
            "minReplicas is above maxReplicas",
        ),
        (
            {"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
            "gateway.resources.requests.cpu: set it",
        ),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts: name at least one host"),
        ({"gateway": {"grpcRoute": {"enabled": True}}}, "gateway.grpcRoute.parentRefs: name the Gateway"),
    ],
    ids=json.dumps,
)
def test_values_that_do_not_fit_together_are_refused_with_what_to_change(
    values: dict[str, Any], says: str
) -> None:
    assert says in refusal(values)


@pytest.mark.parametrize("limit", [4 * 2**30, "4294967296", "4Gi", "0.001Pi"], ids=str)
def test_memory_is_read_in_every_form_that_kubernetes_has(limit: object) -> None:
    limits = {"limits": {"memory": limit}}
    for part in ("gateway", "redis"):
        assert render({part: {"resources": limits}})
    sampler = {"resources": limits, "snapshotCacheGiB": 2, "fullSnapshotCacheGiB": 1}
    assert render({"sampler": sampler})
    assert "its memory limit is" in refusal({"sampler": sampler | {"snapshotCacheGiB": 2000}})


def test_credentials_of_no_store_are_refused() -> None:
    assert "set checkpoints.store" in refusal({"checkpoints": {"existingSecret": "s3-keys"}})


def test_a_chart_that_contains_this_one_may_have_global_values() -> None:
    assert render({"global": {"anything": 1}})


def keys_of_schema(schema: dict[str, Any], root: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of all values the schema knows."""
    if "$ref" in schema:
        return keys_of_schema(root["definitions"][schema["$ref"].rsplit("/", 1)[1]], root, prefix)
    found: set[str] = set()
    if schema.get("type") == "array":
        return keys_of_schema(schema["items"], root, f"{prefix[:-1]}[].") if prefix == "models." else found
    for key, child in schema.get("properties", {}).items():
        found.add(prefix + key)
        if prefix + key not in NOT_IN_VALUES_YAML:
            found |= keys_of_schema(child, root, f"{prefix}{key}.")
    return found


def keys_of_values(values: Any, known: set[str], prefix: str = "") -> set[str]:
    """Dotted names of all values in values.yaml that are values of the chart's own."""
    found: set[str] = set()
    for key, child in values.items():
        if prefix + key in known:
            found.add(prefix + key)
        children = child if isinstance(child, list) else [child]
        for one in children:
            if isinstance(one, dict):
                found |= keys_of_values(one, known, f"{prefix}{key}{'[]' if child is children else ''}.")
    return found


def test_values_yaml_shows_every_value_that_the_schema_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = keys_of_schema(schema, schema)
    # Kubernetes' own words are not the chart's.
    known = {name for name in known if ".resources." not in name}
    shown = keys_of_values(yaml.safe_load((CHART / "values.yaml").read_text()), known)
    assert known - shown - NOT_IN_VALUES_YAML == set()
    text = (CHART / "values.yaml").read_text()
    for name in NOT_IN_VALUES_YAML - {"global"}:
        assert f"#   {name.removeprefix('models[].')} " in text


@pytest.mark.parametrize("when", ["always", "everysec"])
def test_the_bundled_redis_syncs_its_file_as_asked(when: str) -> None:
    (server,) = [container(one) for one in workloads(render({"redis": {"appendfsync": when}}), "redis")]
    assert f"\nappendfsync {when}\n" in server["command"][2]
