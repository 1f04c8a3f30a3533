"""A trainer of several pods, as the chart makes it."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.worlds.nodes import Nodes
from services.trainer import config
from services.trainer.world import node as program
from tests.helm.rendered import (
    POD,
    Object,
    arguments,
    container,
    identities,
    pick,
    pod,
    refusal,
    render,
    workloads,
)

TWO: dict[str, Any] = {"trainer": {"ranks": 4, "nodes": 2, "zeroStage": 3, "zeroReplicaRanks": 4}}
HEAD = "tinsmith-trainer-smollm2-135m-instruct"


def labels(workload: Object) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def selects(selector: dict[str, str], workload: Object) -> bool:
    return selector.items() <= labels(workload).items()


def trainer_pods(objects: list[Object]) -> list[Object]:
    """The head's and the others', in the order of their ranks."""
    return [*workloads(objects, "trainer"), *workloads(objects, "trainer-node")]


def test_each_pod_is_a_node_of_the_same_trainer_with_a_rank_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": [POD["POD_IP"]]})
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://:secret@tinsmith-redis:6379/0")
    three = {"trainer": {**TWO["trainer"], "nodes": 3, "startupSeconds": 600}}
    found = trainer_pods(render(three))
    nodes, ranks, flags = zip(*(program._parse(arguments(one)) for one in found), strict=True)
    assert nodes == (
        Nodes(3, 0, POD["POD_IP"], 29400, "eth0", 600),
        Nodes(3, 1, f"{HEAD}-head", 29400, "eth0", 600),
        Nodes(3, 2, f"{HEAD}-head", 29400, "eth0", 600),
    )
    assert ranks == (4, 4, 4)
    assert flags[0] == flags[1] == flags[2]
    settings = config.parse(flags[0])
    assert (settings.id, settings.zero_stage, settings.sharding.replica_ranks) == (HEAD, 3, 4)
    for one in found:
        assert container(one)["command"] == ["tini", "--", "python", "-m", "services.trainer.world.node"]


def test_the_head_alone_serves_and_the_others_find_it_before_it_does() -> None:
    objects = render(TWO)
    head, follower = trainer_pods(objects)
    service = pick(objects, "Service", f"{HEAD}-head")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert selects(service["selector"], head) and not selects(service["selector"], follower)
    assert {"startupProbe", "readinessProbe", "livenessProbe", "ports"} <= container(head).keys()
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & container(follower).keys()


def test_no_deployment_takes_another_ones_pods() -> None:
    found = workloads(render(TWO))
    for one in found:
        selector = one["spec"]["selector"]["matchLabels"]
        assert [other["metadata"]["name"] for other in found if selects(selector, other)] == [
            one["metadata"]["name"]
        ]


def test_all_pods_have_what_the_first_has() -> None:
    values = {"trainer": {**TWO["trainer"], "nodeSelector": {"pool": "h100"}}, "device": "cuda"}
    head, follower = trainer_pods(render(values))
    for name in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert container(head)[name] == container(follower)[name], name
    assert container(head)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    first, other = (
        {name: value for name, value in pod(one).items() if name != "containers"} for one in (head, follower)
    )
    assert first == other


def test_nodes_reach_each_other_and_nobody_else_reaches_the_followers() -> None:
    objects = render({**TWO, "networkPolicy": {"egress": {"enabled": True}}})

    def may_come(component: str) -> set[str]:
        policy = pick(objects, "NetworkPolicy", f"tinsmith-{component}")["spec"]
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
        return {
            name
            for rule in policy["ingress"]
            if "ports" not in rule
            for peer in rule["from"]
            for name in peer["podSelector"]["matchExpressions"][0]["values"]
        }

    assert may_come("trainer") == {"trainer", "trainer-node", "sampler"}
    assert may_come("trainer-node") == {"trainer", "trainer-node"}
    egress = pick(objects, "NetworkPolicy", "tinsmith-egress")["spec"]["podSelector"]
    assert "trainer-node" in egress["matchExpressions"][0]["values"]


def test_one_pod_is_started_as_ever() -> None:
    objects = render()
    (only,) = trainer_pods(objects)
    assert "command" not in container(only)
    assert arguments(only)[:2] == ["--ranks=1", "--"]
    assert f"Service {HEAD}-head" not in identities(objects)


def test_what_a_release_before_did_not_have_is_as_by_default() -> None:
    """`helm upgrade --reuse-values` takes the values of the release that is there."""
    names = (
        "nodes",
        "nodeInterface",
        "zeroReplicaRanks",
        "zeroPrefetchElements",
        "zeroQuantizedBase",
        "gpuMemoryShare",
        "adapterHostGib",
    )
    for stage in (0, 3):
        missing = render({"trainer": {"zeroStage": stage, **dict.fromkeys(names)}})
        assert trainer_pods(missing) == trainer_pods(render({"trainer": {"zeroStage": stage}}))


def test_a_head_may_wait_for_the_others_and_then_load() -> None:
    (head, _) = trainer_pods(render({"trainer": {"nodes": 2, "startupSeconds": 600}}))
    probe = container(head)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1200
    assert "--wait=600" in arguments(head)
    assert head["spec"]["progressDeadlineSeconds"] > 1200


def test_the_longest_names_are_names_to_kubernetes() -> None:
    longest = {"models": [{"name": "a/b", "path": "a/b", "id": "x" * 23}], "fullnameOverride": "y" * 20}
    objects = render({**longest, "trainer": {"nodes": 99, "zeroStage": 3}})
    assert max(len(one["metadata"]["name"]) for one in objects) <= 63


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"zeroReplicaRanks": 2, "ranks": 4}, "set trainer.zeroStage to 3"),
        ({"zeroQuantizedBase": True}, "set trainer.zeroStage to 3"),
        ({"zeroPrefetchElements": 0}, "set trainer.zeroStage to 3"),
        ({"zeroStage": 3, "zeroReplicaRanks": 3, "ranks": 4}, "cannot cut a trainer of 4 ranks"),
        ({"zeroStage": 3, "zeroReplicaRanks": 8, "ranks": 4, "nodes": 2}, "cannot cut a trainer of 8 ranks"),
        ({"nodes": 0}, "nodes"),
        ({"gpuMemoryShare": 0.5}, "trainer.gpuMemoryShare is for device cuda"),
        (
            {"ranks": 16},
            "16 ranks on a CPU take 1072 MiB of /dev/shm, 67 each, and trainer.sharedMemory is 1Gi",
        ),
        ({"ranks": 2, "sharedMemory": "64Mi"}, "take 134 MiB of /dev/shm, 67 each"),
    ],
)
def test_a_trainer_that_could_not_start_is_refused(trainer: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal({"trainer": trainer})


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"ranks": 15}},
        {"trainer": {"ranks": 2, "sharedMemory": "134Mi"}},
        # One rank talks to nobody, those of several pods not by memory, and those on GPUs by what NCCL finds.
        {"trainer": {"sharedMemory": "1Mi"}},
        {"trainer": {"ranks": 16, "nodes": 2}},
        {"trainer": {"ranks": 16}, "device": "cuda"},
        {"trainer": {"ranks": 16, "enabled": False}},
    ],
    ids=str,
)
def test_ranks_whose_shared_memory_suffices_are_taken(values: dict[str, Any]) -> None:
    assert render(values)
