"""What a cluster asks of pods beyond the chart's own settings reaches them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.helm.rendered import (
    CHART,
    ROOT,
    Object,
    container,
    identities,
    pick,
    pod,
    refusal,
    render,
    workloads,
)

COMPONENTS = ("gateway", "trainer", "sampler", "redis")
EXAMPLES = sorted((ROOT / "examples" / "values").glob("*.yaml"))
PLACED: dict[str, Any] = {
    "podLabels": {"team": "ml"},
    "podAnnotations": {"a/b": "c"},
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    "extraContainers": [{"name": "beside", "image": "beside:1"}],
    "initContainers": [{"name": "before", "image": "before:1"}],
    "serviceAccount": {"annotations": {"iam/role": "reader"}},
    "podSpec": {"schedulerName": "volcano", "dnsConfig": {"searches": ["example.com"]}},
}


def test_every_component_takes_what_a_pod_may_have() -> None:
    own = {"redis": PLACED} | {name: PLACED | {"extraArgs": ["--more=1"]} for name in COMPONENTS[:3]}
    objects = render(own)
    for component in COMPONENTS:
        (one,) = workloads(objects, component)
        template, spec = one["spec"]["template"], pod(one)
        first, beside = spec["containers"]
        assert template["metadata"]["labels"]["team"] == "ml"
        assert template["metadata"]["annotations"]["a/b"] == "c"
        for name in ("affinity", "topologySpreadConstraints", "priorityClassName", "runtimeClassName"):
            assert spec[name] == PLACED[name], name
        assert PLACED["podSpec"].items() <= spec.items()
        assert spec["initContainers"] == PLACED["initContainers"]
        assert [beside] == PLACED["extraContainers"]
        assert PLACED["extraVolumes"][0] in spec["volumes"]
        assert PLACED["extraVolumeMounts"][0] in first["volumeMounts"]
        if component != "redis":
            assert PLACED["extraEnv"][0] in first["env"]
            assert PLACED["extraEnvFrom"][0] in first["envFrom"]
            assert first["args"][-1] == "--more=1"
        account = pick(objects, "ServiceAccount", spec["serviceAccountName"])
        assert account["metadata"]["annotations"] == {"iam/role": "reader"}


def test_accounts_of_ones_own_are_used_and_not_made() -> None:
    values = {"gateway": {"serviceAccount": {"create": False, "name": "mine"}}}
    objects = render(values | {"trainer": {"serviceAccount": {"create": False}}})
    (gateway,), (trainer,) = workloads(objects, "gateway"), workloads(objects, "trainer")
    assert pod(gateway)["serviceAccountName"] == "mine"
    assert pod(trainer)["serviceAccountName"] == "default"
    assert "ServiceAccount tinsmith-trainer" not in identities(objects)
    assert "ServiceAccount mine" not in identities(objects)


def test_each_image_can_come_from_elsewhere_and_be_pinned() -> None:
    digest = "sha256:" + "a" * 64
    objects = render(
        {
            "image": {"registry": "r.example", "tag": "1.0"},
            "gateway": {"image": {"digest": digest}},
            "trainer": {"image": {"tag": "1.0-cuda"}},
            "sampler": {"image": {"repository": "other.example:5000/vllm", "tag": "2"}},
        }
    )
    images = {name: container(workloads(objects, name)[0])["image"] for name in COMPONENTS[:3]}
    assert images == {
        "gateway": f"r.example/tinsmith-gateway@{digest}",
        "trainer": "r.example/tinsmith-trainer:1.0-cuda",
        "sampler": "other.example:5000/vllm:2",
    }


def test_a_platform_that_chooses_users_itself_may() -> None:
    mine = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    for one in workloads(render({"podSecurityContext": mine})):
        assert not mine.keys() & pod(one)["securityContext"].keys()
        assert pod(one)["securityContext"]["runAsNonRoot"] is True


def test_a_pod_gets_the_resources_of_one_process_as_often_as_it_has_them() -> None:
    each = {"requests": {"cpu": "500m", "memory": "1.5Gi", "ephemeral-storage": "2Gi"}, "limits": {"cpu": 3}}
    models = [{"name": "a/b", "path": "a/b", "trainer": {"ranks": 4, "resources": each}}]
    (trainer,) = workloads(render({"models": models, "device": "cuda"}), "trainer")
    assert container(trainer)["resources"] == {
        "requests": {"cpu": "2000m", "memory": "6Gi", "ephemeral-storage": "2Gi"},
        "limits": {"cpu": "12", "nvidia.com/gpu": "4"},
    }
    assert pod(trainer)["terminationGracePeriodSeconds"] == 120


def test_trainer_and_sampler_may_have_gpus_of_different_kinds() -> None:
    objects = render({"device": "cuda", "sampler": {"gpuResource": "nvidia.com/mig-3g.40gb"}})
    gpus = {
        name: set(container(workloads(objects, name)[0])["resources"]["limits"]) - {"memory"}
        for name in ("trainer", "sampler")
    }
    assert gpus == {"trainer": {"nvidia.com/gpu"}, "sampler": {"nvidia.com/mig-3g.40gb"}}


def test_a_model_changes_one_entry_of_an_image_a_budget_or_resources_and_keeps_the_others() -> None:
    digest = "sha256:" + "b" * 64
    own = {
        "replicas": 2,
        "image": {"tag": "2"},
        "podDisruptionBudget": {"maxUnavailable": 2},
        "resources": {"limits": {"memory": "32Gi"}},
    }
    models = [{"name": "a/b", "path": "a/b", "sampler": own}]
    objects = render({"models": models, "sampler": {"image": {"repository": "r/s", "digest": digest}}})
    (sampler,) = workloads(objects, "sampler")
    assert container(sampler)["image"] == f"r/s@{digest}"
    assert container(sampler)["resources"]["limits"] == {"memory": "32Gi"}
    assert container(sampler)["resources"]["requests"] == {"cpu": "400m", "memory": "2Gi"}
    assert pick(objects, "PodDisruptionBudget", "tinsmith-sampler-b")["spec"]["maxUnavailable"] == 2


def test_pods_may_take_as_long_to_be_up_as_their_probes_allow() -> None:
    objects = render({"trainer": {"startupSeconds": 7200}, "sampler": {"startupSeconds": 7200}})
    for one in workloads(objects, "trainer") + workloads(objects, "sampler"):
        assert one["spec"]["progressDeadlineSeconds"] > 7200 + pod(one)["terminationGracePeriodSeconds"]


def test_what_is_not_installed_is_not_checked() -> None:
    small = {"replicas": 0, "resources": {"limits": {"memory": "1Gi"}}}
    assert workloads(render({"sampler": small}), "sampler") == []


def test_a_model_has_no_account_of_its_own_and_that_is_said() -> None:
    models = [{"name": "a/b", "path": "a/b", "trainer": {"serviceAccount": {"name": "mine"}}}]
    assert "serviceAccount" in refusal({"models": models})


def test_the_cpu_example_takes_what_it_says() -> None:
    values = yaml.safe_load((ROOT / "examples" / "values" / "one-node-cpu.yaml").read_text())
    limits = [container(one)["resources"]["limits"]["memory"] for one in workloads(render(values))]
    assert sum(int(limit.removesuffix("Gi")) for limit in limits) == 12


def test_a_model_may_be_only_trained_or_only_sampled() -> None:
    objects = render(
        {
            "models": [
                {"name": "org/trained", "path": "x", "sampler": {"replicas": 0}},
                {"name": "org/sampled", "path": "y", "trainer": {"enabled": False}},
            ]
        }
    )
    names = {one["metadata"]["name"] for one in workloads(objects)}
    assert {name for name in names if "trained" in name} == {"tinsmith-trainer-trained"}
    assert {name for name in names if "sampled" in name} == {"tinsmith-sampler-sampled"}


def test_models_may_be_kept_on_each_node() -> None:
    objects = render({"modelCache": {"hostPath": "/var/lib/tinsmith"}})
    for one in workloads(objects, "trainer") + workloads(objects, "sampler"):
        homes = {entry["name"]: entry.get("value", "") for entry in container(one)["env"]}
        assert homes["HF_HOME"] == "/cache/huggingface"
        # What is compiled: by vLLM and torch, by triton, by flashinfer, and by the driver.
        for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"):
            assert homes[name].startswith("/cache"), name
        assert {"name": "cache", "mountPath": "/cache"} in container(one)["volumeMounts"]
        volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
        # Kubernetes would make it as root's, and no pod of ours could write there.
        assert volumes["cache"]["hostPath"] == {"path": "/var/lib/tinsmith", "type": "Directory"}
    (gateway,) = workloads(objects, "gateway")
    assert "cache" not in {volume["name"] for volume in pod(gateway)["volumes"]}


def templates_of(objects: list[Object]) -> dict[str, Object]:
    return {one["metadata"]["name"]: one["spec"]["template"] for one in workloads(objects)}


def test_a_new_version_of_the_chart_alone_restarts_nothing(tmp_path: Any) -> None:
    chart = tmp_path / "chart"
    copy_of_chart(chart, version="9.9.9")
    pinned = {"image": {"tag": "0.1.0"}}
    assert templates_of(render(pinned, chart=chart)) == templates_of(render(pinned))


def test_a_new_version_of_ours_does_not_restart_redis(tmp_path: Any) -> None:
    chart = tmp_path / "chart"
    copy_of_chart(chart, version="9.9.9", app="9.9.9")
    old, new = templates_of(render()), templates_of(render(chart=chart))
    assert {name for name in old if old[name] != new[name]} == set(old) - {"tinsmith-redis"}


def copy_of_chart(to: Any, version: str, app: str | None = None) -> None:
    import shutil

    shutil.copytree(CHART, to)
    described = yaml.safe_load((to / "Chart.yaml").read_text())
    described |= {"version": version, **({"appVersion": app} if app else {})}
    (to / "Chart.yaml").write_text(yaml.safe_dump(described))


def test_drained_nodes_leave_all_but_one_of_several_replicas() -> None:
    objects = render({"sampler": {"replicas": 3}})
    budgets = {
        one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"
    }
    assert set(budgets) == {"tinsmith-gateway", "tinsmith-sampler-smollm2-135m-instruct"}
    for name, spec in budgets.items():
        workload = pick(objects, "Deployment", name)
        assert spec["maxUnavailable"] == 1
        assert spec["selector"] == workload["spec"]["selector"]
    # A budget for a single pod would keep its node from ever being drained.
    alone = render({"gateway": {"replicas": 1}})
    assert not [one for one in alone if one["kind"] == "PodDisruptionBudget"]


def test_a_node_may_be_drained_of_replicas_that_are_not_ready_whatever_becomes_of_the_others() -> None:
    """While Redis is away no gateway is ready, and samplers load for minutes."""

    def policies(kubernetes: str) -> list[str | None]:
        objects = render({"sampler": {"replicas": 3}}, kubernetes=kubernetes)
        budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]
        return [spec.get("unhealthyPodEvictionPolicy") for spec in budgets]

    assert policies("1.27.0") == ["AlwaysAllow", "AlwaysAllow"]
    # Before it is not known, or not by default.
    assert policies("1.26.0") == [None, None]


@pytest.mark.parametrize(
    ("version", "api"), [("1.22.0", "autoscaling/v2beta2"), ("1.30.0", "autoscaling/v2")]
)
def test_gateways_may_be_as_many_as_their_load_asks_for(version: str, api: str) -> None:
    objects = render({"gateway": {"autoscaling": {"enabled": True}}}, kubernetes=version)
    scaler = pick(objects, "HorizontalPodAutoscaler", "tinsmith-gateway")
    assert scaler["apiVersion"] == api
    assert scaler["spec"]["scaleTargetRef"]["name"] == "tinsmith-gateway"
    # Else each upgrade would set it back.
    assert "replicas" not in pick(objects, "Deployment", "tinsmith-gateway")["spec"]


def test_gateways_are_reached_through_an_ingress_or_routes() -> None:
    parents = [{"name": "edge", "namespace": "infra"}]
    objects = render(
        {
            "gateway": {
                "ingress": {
                    "enabled": True,
                    "className": "nginx",
                    "hosts": [{"host": "a.example"}],
                    "tls": [{"hosts": ["a.example"], "secretName": "tls"}],
                },
                "httpRoute": {
                    "enabled": True,
                    "parentRefs": parents,
                    "hostnames": ["b.example"],
                    "timeouts": {"request": "0s"},
                },
                "grpcRoute": {"enabled": True, "parentRefs": parents},
            }
        }
    )
    ingress = pick(objects, "Ingress", "tinsmith-gateway")["spec"]
    (rule,) = ingress["rules"]
    assert (ingress["ingressClassName"], rule["host"]) == ("nginx", "a.example")
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "tinsmith-gateway",
        "port": {"name": "http"},
    }
    for kind, port in (("HTTPRoute", 8000), ("GRPCRoute", 8001)):
        route = pick(objects, kind, "tinsmith-gateway")["spec"]
        assert route["parentRefs"] == parents
        (rule,) = route["rules"]
        assert rule["backendRefs"] == [{"name": "tinsmith-gateway", "port": port}]
        assert rule.get("timeouts") == ({"request": "0s"} if kind == "HTTPRoute" else None)


def test_pods_listen_where_an_ipv6_cluster_finds_them() -> None:
    for component in COMPONENTS[:3]:
        (one,) = workloads(render({"listen": "::"}), component)
        assert "--host=::" in container(one)["args"]


def test_the_gateways_service_may_have_addresses_of_both_families() -> None:
    both = {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    objects = render({"gateway": {"service": both}})
    for name in ("tinsmith-gateway", "tinsmith-gateway-headless"):
        assert both.items() <= pick(objects, "Service", name)["spec"].items()
        assert not both.keys() & pick(render(), "Service", name)["spec"].keys()


def test_no_pod_fills_the_disk_of_its_node_with_temporary_files() -> None:
    small = {"temporarySize": "3Gi"}
    objects = render({"trainer": small, "sampler": small})
    pods = [pod(one) for one in workloads(objects)] + [pick(objects, "Pod", "tinsmith-test")["spec"]]
    for spec in pods:
        on_disk = [one["emptyDir"] for one in spec["volumes"] if "emptyDir" in one]
        assert all("sizeLimit" in one for one in on_disk)
    for component in ("trainer", "sampler"):
        (one,) = workloads(objects, component)
        assert {"name": "tmp", "emptyDir": {"sizeLimit": "3Gi"}} in pod(one)["volumes"]


@pytest.mark.parametrize("key", ["containers", "volumes", "nodeSelector", "restartPolicy"])
def test_what_the_chart_sets_of_a_pod_is_not_set_beside_it(key: str) -> None:
    assert key in refusal({"sampler": {"podSpec": {key: []}}})


def test_every_process_of_ours_is_measured_and_an_operator_may_scrape_it() -> None:
    monitor = {"enabled": True, "labels": {"release": "prometheus"}}
    objects = render({"metrics": {"port": 9999, "podMonitor": monitor}})
    for component in COMPONENTS[:3]:
        (one,) = workloads(objects, component)
        assert "--metrics-port=9999" in container(one)["args"]
        assert {"name": "metrics", "containerPort": 9999} in container(one)["ports"]
    spec = pick(objects, "PodMonitor", "tinsmith")["spec"]
    assert spec["podMetricsEndpoints"] == [{"port": "metrics", "interval": "30s"}]
    assert not [one for one in render() if one["kind"] == "PodMonitor"]
    for one in workloads(render({"metrics": {"enabled": False}})):
        assert "metrics" not in {port["name"] for port in container(one)["ports"]}
        assert "--metrics-port=0" in container(one).get("args", ["--metrics-port=0"])


def test_objects_of_ones_own_belong_to_the_release() -> None:
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"a": "b"}}
    assert pick(render({"extraObjects": [copy.deepcopy(mine)]}), "ConfigMap", "mine") == mine


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_renders_for_what_it_says(example: Any) -> None:
    values = yaml.safe_load(example.read_text())
    objects = render(values)
    kind = "cpu" if "cpu" in example.stem else "cuda"
    for one in workloads(objects, "trainer") + workloads(objects, "sampler"):
        assert f"--device={kind}" in container(one)["args"]
        assert ("nvidia.com/gpu" in container(one)["resources"]["limits"]) == (kind == "cuda")


def test_no_proxy_of_an_example_ends_an_answer_that_is_still_generated() -> None:
    """One of OpenAI's API that is not streamed begins when it is whole."""
    values = yaml.safe_load((ROOT / "examples" / "values" / "four-nodes.yaml").read_text())
    found = pick(render(values), "Ingress", "tinsmith-gateway")["metadata"]["annotations"]
    assert int(found["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600


def test_there_is_an_example_for_a_cpu_one_gpu_four_nodes_samplers_by_load_and_a_trainer_of_two_nodes() -> (
    None
):
    found = [path.stem for path in EXAMPLES]
    assert found == ["four-nodes", "one-gpu", "one-node-cpu", "scaled-samplers", "two-node-trainer"]
