"""`helm test`, and values that are taken away with null."""

from __future__ import annotations

import ast
import json

import pytest

from tests.helm.rendered import CHART, Object, container, pick, pod, render, workloads

TRAINED_AND_SAMPLED = {
    "models": [
        {"name": "org/both", "path": "org/both"},
        {"name": "org/trained", "path": "org/trained", "sampler": {"replicas": 0}},
        {"name": "org/sampled", "path": "org/sampled", "trainer": {"enabled": False}},
    ]
}


def variable(one: Object, name: str) -> Object:
    (only,) = one["spec"]["containers"]
    (found,) = [entry for entry in only["env"] if entry["name"] == name]
    return found


def test_helm_test_trains_every_model_that_can_be_trained_and_samples_it_where_it_can() -> None:
    one = pick(render(TRAINED_AND_SAMPLED), "Pod", "tinsmith-test")
    assert one["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert json.loads(variable(one, "MODELS")["value"]) == [
        {"name": "org/both", "sampled": True},
        {"name": "org/trained", "sampled": False},
    ]
    assert variable(one, "TINKER_BASE_URL")["value"] == "http://tinsmith-gateway:8000"
    (only,) = one["spec"]["containers"]
    assert ast.parse(only["args"][0]) and only["args"][0].strip() == (
        (CHART / "files" / "finetune.py").read_text().strip()
    )


def test_helm_test_speaks_tls_where_the_gateways_do_and_believes_the_secrets_authority() -> None:
    public = {"gateway": {"tls": {"existingSecret": "public"}, "service": {"httpPort": 443}}}
    one = pick(render(public), "Pod", "tinsmith-test")
    assert variable(one, "TINKER_BASE_URL")["value"] == "https://tinsmith-gateway:443"
    (volume,) = [each for each in one["spec"]["volumes"] if "secret" in each]
    assert volume["secret"]["secretName"] == "public"
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"], "its key is the gateways'"
    (only,) = one["spec"]["containers"]
    (mount,) = [each for each in only["volumeMounts"] if each["name"] == volume["name"]]
    assert f'"{mount["mountPath"]}/ca.crt"' in only["args"][0]
    named = public | {"test": {"url": "https://tinsmith.example.com"}}
    named_url = variable(pick(render(named), "Pod", "tinsmith-test"), "TINKER_BASE_URL")["value"]
    assert named_url == "https://tinsmith.example.com"
    assert not [
        each for each in pick(render(), "Pod", "tinsmith-test")["spec"]["volumes"] if "secret" in each
    ]


def test_a_release_that_only_samples_has_no_pod_for_helm_test() -> None:
    objects = render({"trainer": {"enabled": False}})
    assert not [one for one in objects if one["kind"] == "Pod"]


def test_the_pod_of_helm_test_reaches_gateways_whomever_else_they_are_for() -> None:
    objects = render({"networkPolicy": {"gatewayFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}})
    labels = pick(objects, "Pod", "tinsmith-test")["metadata"]["labels"]
    (rule,) = pick(objects, "NetworkPolicy", "tinsmith-gateway")["spec"]["ingress"]
    tested, given = rule["from"]
    assert tested["podSelector"]["matchLabels"].items() <= labels.items()
    assert given == {"ipBlock": {"cidr": "10.0.0.0/8"}}


def test_no_service_leads_to_the_pod_of_helm_test() -> None:
    objects = render()
    labels = pick(objects, "Pod", "tinsmith-test")["metadata"]["labels"]
    for one in objects:
        if one["kind"] == "Service":
            assert not one["spec"]["selector"].items() <= labels.items()


def test_pods_may_ask_for_names_where_dns_has_a_port_of_its_own() -> None:
    egress = pick(
        render({"networkPolicy": {"egress": {"enabled": True}}}), "NetworkPolicy", "tinsmith-egress"
    )
    ports = [port for rule in egress["spec"]["egress"] for port in rule.get("ports", ())]
    for number in (53, 5353):
        assert {port["protocol"] for port in ports if port["port"] == number} == {"UDP", "TCP"}


@pytest.mark.parametrize("component", ["gateway", "trainer", "sampler", "redis"])
def test_resources_can_be_taken_away(component: str) -> None:
    (one,) = workloads(render({component: {"resources": None}}), component)
    assert not container(one)["resources"]


def test_labels_of_dashboards_and_alerts_can_be_taken_away() -> None:
    bare = {"enabled": True, "labels": None}
    objects = render({"metrics": {"dashboards": bare, "alerts": bare}})
    for kind, name in (("ConfigMap", "tinsmith-dashboards"), ("PrometheusRule", "tinsmith")):
        labels = pick(objects, kind, name)["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == "metrics"
        assert "grafana_dashboard" not in labels


def test_security_contexts_can_be_taken_away() -> None:
    for one in workloads(render({"podSecurityContext": None, "containerSecurityContext": None})):
        assert not pod(one)["securityContext"] or one["kind"] == "StatefulSet"
        assert not container(one)["securityContext"]
