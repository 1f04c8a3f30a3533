"""Secrets stay in Secrets, and pods may do no more than they need."""

from __future__ import annotations

import base64
import json

import pytest

from services.launcher.redis_server import USERS
from tests.helm.rendered import (
    CHART,
    Object,
    Values,
    container,
    environment,
    identities,
    pick,
    pod,
    render,
    workloads,
)

CASES: list[Values] = [{}, {"redis": {"externalSecret": "mine"}}, {"device": "cuda"}]


def secret_values(name: str, entry: str) -> tuple[str, str]:
    """The secret's value, and every object but the Secrets as text."""
    objects = render()
    value = base64.b64decode(pick(objects, "Secret", name)["data"][entry]).decode()
    return value, json.dumps([one for one in objects if one["kind"] != "Secret"])


def test_the_api_key_never_appears_on_a_command_line() -> None:
    line, elsewhere = secret_values("tinsmith-api-keys", "api-keys")
    key, owner, role = line.split()
    assert key.startswith("tml-")
    assert len(key) >= 40
    assert (owner, role) == ("operator", "role=admin")
    assert key not in elsewhere
    (gateway,) = workloads(render(), "gateway")
    assert "--api-keys-file=/etc/tinsmith/api-keys" in container(gateway)["args"]
    volumes = {volume["name"]: volume for volume in pod(gateway)["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "tinsmith-api-keys"


@pytest.mark.parametrize("entry", ["password", "gateway", "trainer", "sampler"])
def test_each_redis_password_comes_from_a_secret(entry: str) -> None:
    password, elsewhere = secret_values("tinsmith-redis", entry)
    assert len(password) >= 40
    assert password not in elsewhere
    source = {"secretKeyRef": {"name": "tinsmith-redis", "key": entry}}
    holders = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in workloads(render())
        for variable in environment(one).values()
        if variable.get("valueFrom") == source
    }
    # Each service has its own and no other one's.
    assert holders == ({"redis"} if entry == "password" else {"redis", entry})


def test_services_are_the_users_of_redis_that_tinsmith_up_makes_them() -> None:
    text = (CHART / "files" / "redis-users.txt").read_text()
    assert text == "".join(f"{role} {rules}\n" for role, rules in USERS.items() if role != "operator")
    (redis,) = workloads(render(), "redis")
    script = container(redis)["command"][2]
    for role, rules in USERS.items():
        line = f"user {role} on >${role.upper()}_PASSWORD {rules}\n"
        assert (line in script) == (role != "operator")


def test_the_kubelet_puts_the_password_into_the_redis_url() -> None:
    for component in ("gateway", "trainer", "sampler"):
        (one,) = workloads(render(), component)
        names = list(environment(one))
        assert (
            environment(one)["TINSMITH_REDIS_URL"]["value"]
            == f"redis://{component}:$(REDIS_PASSWORD)@tinsmith-redis:6379/0"
        )
        # A variable is filled in only from variables before it.
        assert names.index("REDIS_PASSWORD") < names.index("TINSMITH_REDIS_URL")


def test_passwords_and_keys_differ_between_installations() -> None:
    for name, entry in (("tinsmith-redis", "password"), ("tinsmith-api-keys", "api-keys")):
        assert secret_values(name, entry)[0] != secret_values(name, entry)[0]


def test_secrets_of_ones_own_replace_the_made_ones() -> None:
    objects = render({"apiKeys": {"existingSecret": "keys"}, "redis": {"existingSecret": "password"}})
    assert not [name for name in identities(objects) if name.startswith("Secret")]
    (redis,) = workloads(objects, "redis")
    assert environment(redis)["REDISCLI_AUTH"]["valueFrom"]["secretKeyRef"]["name"] == "password"
    (gateway,) = workloads(objects, "gateway")
    volumes = {volume["name"]: volume for volume in pod(gateway)["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "keys"


def test_the_hub_token_reaches_only_the_pods_that_load_models() -> None:
    objects = render({"huggingFace": {"existingSecret": "hub"}})
    for one in workloads(objects, "trainer") + workloads(objects, "sampler"):
        assert environment(one)["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    for one in workloads(objects, "gateway") + workloads(objects, "redis"):
        assert "HF_TOKEN" not in environment(one)


@pytest.mark.parametrize("values", CASES, ids=json.dumps)
def test_every_pod_meets_the_restricted_pod_security_standard(values: Values) -> None:
    for one in workloads(render(values)):
        spec = pod(one)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert container(one)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for volume in spec["volumes"]:
            assert len(volume.keys() & {"emptyDir", "secret", "persistentVolumeClaim"}) == 1


@pytest.mark.parametrize("values", CASES, ids=json.dumps)
def test_no_pod_gets_a_token_of_the_kubernetes_api(values: Values) -> None:
    objects = render(values)
    accounts = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ServiceAccount"}
    assert not any(one["automountServiceAccountToken"] for one in accounts.values())
    used = {pod(one)["serviceAccountName"] for one in workloads(objects)}
    assert used == set(accounts)
    assert not any(pod(one)["automountServiceAccountToken"] for one in workloads(objects))


def test_a_service_called_tinsmith_cannot_set_flags_of_the_services() -> None:
    for one in workloads(render()):
        assert pod(one)["enableServiceLinks"] is False


def admitted(objects: list[Object], workload: Object) -> list[Object]:
    """The ingress rules of all policies that select a workload's pods; fails when none does."""
    found = []
    for policy in (one for one in objects if one["kind"] == "NetworkPolicy"):
        spec = policy["spec"]
        if spec["policyTypes"] == ["Ingress"] and selects(spec["podSelector"], workload):
            found += spec["ingress"]
    assert found, f"no policy selects {workload['metadata']['name']}"
    return found


def selects(selector: Object, workload: Object) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", [])
    )


def reached_by(objects: list[Object], workload: Object, others: list[Object]) -> dict[str, str]:
    """{component: port, or "any"} of those of the others that may reach a workload's pods."""
    found: dict[str, str] = {}
    for rule in admitted(objects, workload):
        if rule.get("ports") == [{"port": "metrics"}]:
            continue
        (peer,) = rule["from"]
        assert set(peer) == {"podSelector"}
        ports = [port["port"] for port in rule.get("ports", [{"port": "any"}])]
        for one in others:
            if selects(peer["podSelector"], one):
                found[one["metadata"]["labels"]["app.kubernetes.io/component"]] = ports[0]
    return found


def test_trainers_samplers_and_redis_are_reached_by_those_of_the_release_that_need_to() -> None:
    objects = render()
    weights = {"gateway": "grpc", "trainer": "any", "sampler": "any"}
    redis = dict.fromkeys(("gateway", "trainer", "sampler"), "redis")
    for component, expected in (("trainer", weights), ("sampler", weights), ("redis", redis)):
        for one in workloads(objects, component):
            assert reached_by(objects, one, workloads(objects)) == expected
            assert reached_by(objects, one, workloads(render(release="other"))) == {}


def test_what_pods_may_reach_can_be_bounded() -> None:
    objects = render({"networkPolicy": {"egress": {"enabled": True}}})
    (egress,) = [one for one in objects if one.get("spec", {}).get("policyTypes") == ["Egress"]]
    callers = [one for one in workloads(objects) if one["kind"] != "StatefulSet"]
    assert all(selects(egress["spec"]["podSelector"], one) for one in callers)
    # Redis answers only.
    (redis,) = workloads(objects, "redis")
    assert not selects(egress["spec"]["podSelector"], redis)
    policy = pick(objects, "NetworkPolicy", "tinsmith-redis")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    own, names, web = egress["spec"]["egress"]
    assert all(selects(own["to"][0]["podSelector"], one) for one in workloads(objects))
    # OpenShift's servers of names listen on 5353.
    assert {port["port"] for port in names["ports"]} == {53, 5353}
    assert web["to"] == [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fd00:ec2::254/128"]}},
    ]
    assert web["ports"] == [{"port": 443, "protocol": "TCP"}]


def test_gateways_are_reached_on_their_ports_by_everybody_unless_told() -> None:
    edges, metrics = admitted(render(), workloads(render(), "gateway")[0])
    assert edges == {"ports": [{"port": "http"}, {"port": "grpc"}]}
    assert metrics == {"ports": [{"port": "metrics"}]}
    peers = [{"namespaceSelector": {"matchLabels": {"team": "ml"}}}]
    objects = render({"networkPolicy": {"gatewayFrom": peers}})
    edges, metrics = admitted(objects, workloads(objects, "gateway")[0])
    fine_tune, *told = edges["from"]
    assert fine_tune["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    assert told == peers
    assert "from" not in metrics
    objects = render({"networkPolicy": {"metricsFrom": peers}})
    for component in ("gateway", "trainer", "sampler"):
        assert {"ports": [{"port": "metrics"}], "from": peers} in admitted(
            objects, workloads(objects, component)[0]
        )


def test_network_policies_can_be_left_out() -> None:
    objects = render({"networkPolicy": {"enabled": False}})
    assert not [one for one in objects if one["kind"] == "NetworkPolicy"]


def test_every_container_has_a_memory_limit_and_requests() -> None:
    for one in workloads(render()):
        resources = container(one)["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert "memory" in resources["limits"]
