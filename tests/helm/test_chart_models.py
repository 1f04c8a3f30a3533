"""Pinned revisions of models, and samplers whose number follows the load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from transformers import AutoConfig

from services.sampler.config import parse
from services.sampler.engine.settings.arguments import engine_args
from tests.helm.rendered import ROOT, arguments, identities, pick, pod, refusal, render, workloads

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PINNED: dict[str, Any] = {"models": [{"name": "a/b", "path": "Org/Model.v1", "revision": COMMIT}]}
SCALED: dict[str, Any] = {"sampler": {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 6}}}


@pytest.mark.parametrize("component", ["trainer", "sampler"])
@pytest.mark.parametrize(
    ("more", "cache"), [({}, "/data"), ({"modelCache": {"hostPath": "/var/lib/tinsmith"}}, "/cache")]
)
def test_a_pinned_revision_is_downloaded_first_and_is_what_is_loaded(
    component: str, more: dict[str, Any], cache: str
) -> None:
    (one,) = workloads(render(PINNED | more), component)
    folder = f"{cache}/huggingface/hub/models--Org--Model.v1/snapshots/{COMMIT}"
    assert f"--model=a/b={folder}" in arguments(one)
    (download,) = pod(one)["initContainers"]
    assert download["args"][1:] == ["Org/Model.v1", COMMIT, folder]
    (main,) = pod(one)["containers"]
    assert download["image"] == main["image"]
    assert {"name": "HF_HOME", "value": f"{cache}/huggingface"} in download["env"]
    assert cache in [mount["mountPath"] for mount in download["volumeMounts"]]


@pytest.mark.parametrize("component", ["trainer", "sampler"])
def test_the_download_has_the_environment_of_what_it_is_for(component: str) -> None:
    more = {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}]}
    source = {"secretRef": {"name": "hub-mirror"}}
    (one,) = workloads(render(PINNED | {component: more | {"extraEnvFrom": [source]}}), component)
    (download,) = pod(one)["initContainers"]
    assert source in download["envFrom"]
    assert more["extraEnv"][0] in download["env"]


@pytest.mark.parametrize("component", ["trainer", "sampler"])
def test_a_quota_that_asks_each_container_for_limits_admits_the_download(component: str) -> None:
    """It runs before the pod's own container, and so takes nothing that the pod does not have anyway."""
    each = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "3", "memory": "8Gi"}}
    processes = {"trainer": {"ranks": 2}, "sampler": {"tensorParallelSize": 2}}[component]
    values = {component: {"resources": each} | processes, "device": "cuda"}
    (one,) = workloads(render(PINNED | values), component)
    (download,) = pod(one)["initContainers"]
    assert download["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"cpu": "6", "memory": "16Gi"},
    }


def test_what_is_downloaded_lies_where_it_is_loaded_from(tmp_path: Path) -> None:
    """The container's own program, on a cache that has the revision."""
    (one,) = workloads(render(PINNED), "trainer")
    (download,) = pod(one)["initContainers"]
    program, repository, revision, folder = download["args"]
    there = tmp_path / Path(folder).relative_to("/data")
    there.mkdir(parents=True)
    (there / "config.json").write_text("{}")
    environment = os.environ | {"HF_HOME": str(tmp_path / "huggingface"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, repository, revision]
    for expected, status in ((there, 0), (tmp_path, 1)):
        done = subprocess.run([*command, str(expected)], env=environment, capture_output=True, timeout=60)
        assert done.returncode == status, done.stderr


def test_a_model_without_a_revision_has_nothing_to_wait_for() -> None:
    for one in workloads(render()):
        assert "initContainers" not in pod(one)


def test_a_revision_that_is_none_is_refused() -> None:
    refusal({"models": [{"name": "a/b", "path": "a/b", "revision": "main"}]})
    told = refusal({"models": [{"name": "a/b", "path": "/data/models/b", "revision": COMMIT}]})
    assert "revision is of a Hugging Face repository" in told


def test_the_number_of_samplers_may_follow_their_load() -> None:
    objects = render(SCALED)
    (sampler,) = workloads(objects, "sampler")
    scaler = pick(objects, "HorizontalPodAutoscaler", sampler["metadata"]["name"])
    assert scaler["spec"]["scaleTargetRef"]["name"] == sampler["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "tinsmith_engine_sequences"
    assert metric["pods"]["target"]["averageValue"] == "64"
    assert "replicas" not in sampler["spec"]
    assert sampler["spec"]["strategy"]["type"] == "RollingUpdate"
    assert f"PodDisruptionBudget {sampler['metadata']['name']}" in identities(objects)


def test_keda_scales_samplers_by_what_a_prometheus_says() -> None:
    auto = {
        "enabled": True,
        "minReplicas": 2,
        "maxReplicas": 6,
        "sequences": 50,
        "prometheus": "http://prometheus:9090",
    }
    objects = render({"sampler": {"autoscaling": auto}})
    (sampler,) = workloads(objects, "sampler")
    name = sampler["metadata"]["name"]
    spec = pick(objects, "ScaledObject", name)["spec"]
    assert spec["scaleTargetRef"] == {"name": name}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
    (trigger,) = spec["triggers"]
    asked = trigger["metadata"]
    assert (trigger["type"], asked["serverAddress"], asked["threshold"]) == (
        "prometheus",
        "http://prometheus:9090",
        "50",
    )
    assert f"HorizontalPodAutoscaler {name}" not in identities(objects), "KEDA makes it"
    assert "replicas" not in sampler["spec"]


def test_keda_counts_the_pods_of_the_model_alone() -> None:
    auto = {"enabled": True, "prometheus": "http://prometheus:9090"}
    models = [{"name": f"org/{name}", "path": name} for name in ("a", "a-b")]
    objects = render({"models": models, "sampler": {"autoscaling": auto}})
    asked = [
        pick(objects, "ScaledObject", f"tinsmith-sampler-{name}")["spec"]["triggers"][0]["metadata"]["query"]
        for name in ("a", "a-b")
    ]
    pods = ["tinsmith-sampler-a-6b5d9c7f8d-x2x4z", "tinsmith-sampler-a-b-6b5d9c7f8d-x2x4z"]
    for at, query in enumerate(asked):
        found = re.fullmatch(r'sum\(tinsmith_engine_sequences\{namespace="default",pod=~"(.*)"\}\)', query)
        assert found
        assert [bool(re.fullmatch(found[1], name)) for name in pods] == [at == 0, at == 1]
    # The name of a Deployment's pod is cut where it is long, and has one part more.
    found = re.search(r'pod=~"(.*)"', asked[0])
    assert found
    of_a_long_one = found[1].replace("sampler-a", "sampler-qwen3-30b-a3b")
    assert re.fullmatch(of_a_long_one, "tinsmith-sampler-qwen3-30b-a3b-7d9c8b6f5x7k2p")
    assert not re.fullmatch(of_a_long_one, "tinsmith-sampler-qwen3-30b-a3b-instruct-7d9c8b6f5x7k2p")


def test_the_example_of_the_prometheus_adapter_gives_what_the_autoscaler_asks_for() -> None:
    objects = render(SCALED)
    scaler = next(one for one in objects if one["kind"] == "HorizontalPodAutoscaler")
    (asked,) = scaler["spec"]["metrics"]
    example = ROOT / "examples" / "values" / "prometheus-adapter" / "values.yaml"
    (rule,) = yaml.safe_load(example.read_text())["rules"]["custom"]
    assert rule["seriesQuery"].startswith(asked["pods"]["metric"]["name"] + "{")
    # The name stays that of the series, of pods in namespaces.
    assert "name" not in rule
    resources = {one["resource"] for one in rule["resources"]["overrides"].values()}
    assert resources == {"namespace", "pod"}
    for label in rule["resources"]["overrides"]:
        assert f'{label}!=""' in rule["seriesQuery"]


def test_samplers_that_cannot_be_scaled_are_refused() -> None:
    wrong = {"sampler": {"autoscaling": {"enabled": True, "minReplicas": 5}}}
    assert "minReplicas is above maxReplicas" in refusal(wrong)
    assert "set metrics.enabled" in refusal(SCALED | {"metrics": {"enabled": False}})


@pytest.mark.parametrize(
    ("sampler", "device"),
    [
        ({"maxSequences": 64}, "cpu"),
        ({"maxSequences": 256}, "cuda"),
        ({}, "cpu"),
        ({"maxBatchedTokens": 100}, "cpu"),
        ({"maxBatchedTokens": 1000}, "cpu"),
        ({"tensorParallelSize": 2}, "cpu"),
        ({"pipelineParallelSize": 2}, "cpu"),
    ],
    ids=str,
)
def test_a_load_that_an_engine_never_has_scales_nothing_and_is_refused(
    sampler: dict[str, Any], device: Literal["cpu", "cuda"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(sequences: int) -> dict[str, Any]:
        scaled = sampler | {"autoscaling": {"enabled": True, "sequences": sequences}}
        return {"device": device, "sampler": scaled}

    (deployment,) = workloads(render(at(1)), "sampler")
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path)
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://127.0.0.1/0")
    config = parse(arguments(deployment))
    at_once = engine_args(replace(config, model_path=str(tmp_path)), device).max_num_seqs
    most = (10 * at_once - 1) // 11
    assert render(at(most))
    refused = refusal(at(most + 1))
    assert f"generate {at_once} sequences at once, so that no load adds one at " in refused
    assert f"sampler.autoscaling.sequences {most + 1}" in refused
