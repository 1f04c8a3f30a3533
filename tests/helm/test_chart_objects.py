"""What the chart installs, as `helm template` shows it."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate.utils
import pytest

from tests.helm.rendered import (
    CHART,
    arguments,
    container,
    helm,
    identities,
    pick,
    pod,
    refusal,
    render,
    workloads,
)

TWO_MODELS: dict[str, Any] = {
    "models": [
        {
            "name": "Qwen/Qwen3-8B",
            "path": "Qwen/Qwen3-8B",
            "trainer": {"ranks": 4, "zeroStage": 0, "microBatchTokens": 2_000_000},
            "sampler": {"replicas": 3, "tensorParallelSize": 2},
        },
        {"name": "org/Other_Model.v2", "path": "/data/models/other", "id": "other"},
    ],
    "trainer": {"zeroStage": 3},
}
EVERYTHING_SET: dict[str, Any] = TWO_MODELS | {
    "device": "cuda",
    "image": {"registry": "registry.example.com/ml/", "tag": "1.2.3", "pullSecrets": ["pull"]},
    "apiKeys": {"existingSecret": "my-keys"},
    "huggingFace": {"existingSecret": "hub"},
    "networkPolicy": {"gatewayFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "egress": {"enabled": True}},
    "sampler": {"podSpec": {"schedulerName": "volcano"}, "temporarySize": "4Gi"},
    "gateway": {
        "sessions": {"parkAfter": 600, "endAfter": 1_000_000},
        "service": {
            "type": "LoadBalancer",
            "annotations": {"a/b": "c"},
            "ipFamilyPolicy": "PreferDualStack",
            "ipFamilies": ["IPv4", "IPv6"],
        },
        "extraEnv": [{"name": "TINSMITH_LOG_LEVEL", "value": "DEBUG"}],
        "nodeSelector": {"pool": "web"},
        "tolerations": [{"key": "web", "operator": "Exists"}],
    },
    "data": {"storageClass": "nfs", "size": "1Ti", "accessMode": "ReadWriteMany"},
    "redis": {"existingSecret": "redis-password", "storage": {"storageClass": "ssd"}},
}
MINIMAL: dict[str, Any] = {
    "data": {"existingClaim": "weights"},
    "redis": {"externalSecret": "my-redis"},
}
PINNED_AND_SCALED: dict[str, Any] = {
    "models": [{"name": "a/b", "path": "a/b", "revision": "0123456789abcdef0123456789abcdef01234567"}],
    "sampler": {"autoscaling": {"enabled": True}},
    "podSecurityContext": None,
    "gateway": {"resources": None},
}
VARIANTS = {
    "defaults": {},
    "everything set": EVERYTHING_SET,
    "minimal": MINIMAL,
    "pinned and scaled": PINNED_AND_SCALED,
}


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Any:
    patch = pytest.MonkeyPatch()
    cached = functools.cache(kubernetes_validate.utils.schema_contents)
    patch.setattr(kubernetes_validate.utils, "schema_contents", cached)
    yield
    patch.undo()


def test_the_chart_lints_without_a_warning() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(25, 38)])
def test_every_object_is_valid_for_kubernetes(version: str) -> None:
    for values in VARIANTS.values():
        for one in render(values, kubernetes=f"{version}.0"):
            assert kubernetes_validate.utils.validate(one, version, strict=True) == version


def test_clusters_without_native_grpc_probes_get_valid_objects_too() -> None:
    for one in render(EVERYTHING_SET, kubernetes="1.20.2"):
        if one["kind"] == "PodDisruptionBudget":
            # The last schemas that have it are older than those at hand; nothing else of it changed.
            assert one["apiVersion"] == "policy/v1beta1"
            one["apiVersion"] = "policy/v1"
        kubernetes_validate.utils.validate(one, "1.25", strict=True)


def test_the_defaults_install_one_of_everything() -> None:
    assert identities(render()) == {
        "Deployment tinsmith-gateway",
        "Deployment tinsmith-sampler-smollm2-135m-instruct",
        "Deployment tinsmith-trainer-smollm2-135m-instruct",
        "NetworkPolicy tinsmith-gateway",
        "NetworkPolicy tinsmith-metrics",
        "NetworkPolicy tinsmith-redis",
        "NetworkPolicy tinsmith-sampler",
        "NetworkPolicy tinsmith-trainer",
        "PersistentVolumeClaim tinsmith-data",
        "Pod tinsmith-test",
        "PodDisruptionBudget tinsmith-gateway",
        "Secret tinsmith-api-keys",
        "Secret tinsmith-redis",
        "Service tinsmith-gateway",
        "Service tinsmith-gateway-headless",
        "Service tinsmith-redis",
        "ServiceAccount tinsmith-gateway",
        "ServiceAccount tinsmith-redis",
        "ServiceAccount tinsmith-sampler",
        "ServiceAccount tinsmith-trainer",
        "StatefulSet tinsmith-redis",
    }


def test_each_base_model_gets_its_own_trainer_and_samplers() -> None:
    objects = render(TWO_MODELS)
    trainers = {one["metadata"]["name"]: arguments(one) for one in workloads(objects, "trainer")}
    assert set(trainers) == {"tinsmith-trainer-qwen3-8b", "tinsmith-trainer-other"}
    assert "--model=Qwen/Qwen3-8B=Qwen/Qwen3-8B" in trainers["tinsmith-trainer-qwen3-8b"]
    assert "--model=org/Other_Model.v2=/data/models/other" in trainers["tinsmith-trainer-other"]
    samplers = {one["metadata"]["name"]: one["spec"]["replicas"] for one in workloads(objects, "sampler")}
    assert samplers == {"tinsmith-sampler-qwen3-8b": 3, "tinsmith-sampler-other": 1}


def test_a_model_differs_from_the_defaults_where_it_says_so_even_by_zero() -> None:
    objects = render(TWO_MODELS)
    assert "--zero-stage=0" in arguments(pick(objects, "Deployment", "tinsmith-trainer-qwen3-8b"))
    assert "--zero-stage=3" in arguments(pick(objects, "Deployment", "tinsmith-trainer-other"))


def test_large_numbers_are_written_in_full() -> None:
    trainer = pick(render(TWO_MODELS), "Deployment", "tinsmith-trainer-qwen3-8b")
    assert "--micro-batch-tokens=2000000" in arguments(trainer)


def test_a_world_of_a_base_model_never_serves_twice_at_once_and_leaves_a_lost_node_by_itself() -> None:
    for trainer in workloads(render(TWO_MODELS), "trainer"):
        assert trainer["kind"] == "Deployment"
        assert (trainer["spec"]["replicas"], trainer["spec"]["strategy"]) == (1, {"type": "Recreate"})
        # An id that every next pod has too, which claims it.
        assert f"--id={trainer['metadata']['name']}" in container(trainer)["args"]


def test_no_workload_or_service_selects_the_pods_of_another() -> None:
    objects = render(TWO_MODELS)
    labels = {
        f"{one['kind']} {one['metadata']['name']}": one["spec"]["template"]["metadata"]["labels"]
        for one in workloads(objects)
    }
    for one in objects:
        if one["kind"] not in ("Deployment", "StatefulSet", "Service"):
            continue
        selector = one["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        selected = [name for name, found in labels.items() if selector.items() <= found.items()]
        assert [name.split()[1] for name in selected] == [one["metadata"]["name"].removesuffix("-headless")]


def test_services_point_at_ports_that_their_pods_open() -> None:
    objects = render(TWO_MODELS)
    for service in (one for one in objects if one["kind"] == "Service"):
        workload = next(
            one
            for one in workloads(objects)
            if one["metadata"]["name"] == service["metadata"]["name"].removesuffix("-headless")
        )
        opened = {port["name"] for port in container(workload)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= opened


def test_two_models_with_one_short_name_are_refused_with_what_to_set() -> None:
    models = [{"name": "a/Same", "path": "a/Same"}, {"name": "b/same", "path": "b/same"}]
    assert 'models "a/Same" and "b/same" have the same id "same": set `id`' in refusal({"models": models})


def test_one_model_listed_twice_is_refused() -> None:
    models = [{"name": "a/b", "path": "a/b"}, {"name": "a/b", "path": "/data/b", "id": "c"}]
    assert 'model "a/b" is listed twice' in refusal({"models": models})


def test_a_long_release_name_is_refused_with_what_to_set() -> None:
    assert "set fullnameOverride" in refusal(release="a-release-with-a-long-name")
    objects = render({"fullnameOverride": "short"}, release="a-release-with-a-long-name")
    assert "Deployment short-gateway" in identities(objects)


def test_names_leave_room_for_the_labels_that_kubernetes_adds() -> None:
    model = {"name": "org/A-Very-Long-Name-Of-Some-Model-70B-Instruct", "path": "x"}
    objects = render({"models": [model]}, release="a-name-of-20-letters")
    # A name and a hash of ten must fit a label of 63 characters.
    assert max(len(one["metadata"]["name"]) for one in workloads(objects)) <= 52


def test_each_rank_and_each_worker_of_a_sampler_gets_a_gpu() -> None:
    objects = render(EVERYTHING_SET)
    trainer = container(pick(objects, "Deployment", "tinsmith-trainer-qwen3-8b"))
    sampler = container(pick(objects, "Deployment", "tinsmith-sampler-qwen3-8b"))
    assert trainer["args"][0] == "--ranks=4"
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert sampler["resources"]["limits"]["nvidia.com/gpu"] == "2"
    stages = {"sampler": {"tensorParallelSize": 2, "pipelineParallelSize": 3}, "device": "cuda"}
    (staged,) = workloads(render(stages), "sampler")
    assert container(staged)["resources"]["limits"]["nvidia.com/gpu"] == "6"


def test_on_cpu_no_pod_asks_for_a_gpu() -> None:
    for one in workloads(render()):
        assert set(container(one)["resources"]["limits"]) == {"memory"}


def test_trainers_samplers_and_gateways_share_one_volume() -> None:
    for values, claim in ((TWO_MODELS, "tinsmith-data"), (MINIMAL, "weights")):
        objects = render(values)
        shared = ("trainer", "sampler", "gateway")
        for one in [found for component in shared for found in workloads(objects, component)]:
            volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
            assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim
            assert "--data-dir=/data" in arguments(one)
    assert pick(render(), "PersistentVolumeClaim", "tinsmith-data")["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]


def test_checkpoints_go_to_an_object_store_when_one_is_named() -> None:
    store = {"store": "s3://bucket/prefix", "existingSecret": "s3-keys"}
    objects = render({"checkpoints": store})
    for component in ("trainer", "gateway", "sampler"):
        for one in workloads(objects, component):
            told = component != "sampler"
            assert ("--checkpoint-store=s3://bucket/prefix" in arguments(one)) == told
            assert ("envFrom" in container(one)) == told
    (gateway,) = workloads(objects, "gateway")
    assert container(gateway)["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    for one in workloads(render()):
        assert "envFrom" not in container(one)


def test_the_data_volume_outlives_the_release() -> None:
    claim = pick(render(), "PersistentVolumeClaim", "tinsmith-data")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_an_external_redis_removes_the_bundled_one() -> None:
    objects = render(MINIMAL)
    assert not [name for name in identities(objects) if "redis" in name]
    for one in workloads(objects):
        urls = [entry for entry in container(one)["env"] if entry["name"] == "TINSMITH_REDIS_URL"]
        assert urls[0]["valueFrom"]["secretKeyRef"] == {"name": "my-redis", "key": "url"}
        assert "REDIS_PASSWORD" not in {entry["name"] for entry in container(one)["env"]}


def test_images_come_from_the_registry_and_tag_that_are_set() -> None:
    own = ("gateway", "trainer", "sampler")
    for values, template in (
        (EVERYTHING_SET, "registry.example.com/ml/tinsmith-{}:1.2.3"),
        ({}, "tinsmith-{}:0.1.0"),
    ):
        objects = render(values)
        for component in own:
            images = {container(one)["image"] for one in workloads(objects, component)}
            assert images == {template.format(component)}


def test_a_rollout_of_samplers_waits_for_no_spare_gpu_and_helm_for_the_only_one() -> None:
    three, one = workloads(render(TWO_MODELS), "sampler")
    rolls = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert (three["spec"]["replicas"], three["spec"]["strategy"]) == (3, rolls)
    assert (one["spec"]["replicas"], one["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_settings_of_a_component_reach_its_pods() -> None:
    (gateway,) = workloads(render(EVERYTHING_SET), "gateway")
    assert pod(gateway)["nodeSelector"] == {"pool": "web"}
    assert pod(gateway)["tolerations"] == [{"key": "web", "operator": "Exists"}]
    assert "--session-park-after=600" in arguments(gateway)
    assert "--session-end-after=1000000" in arguments(gateway)
    assert pod(gateway)["imagePullSecrets"] == [{"name": "pull"}]
    assert {"name": "TINSMITH_LOG_LEVEL", "value": "DEBUG"} in container(gateway)["env"]
