"""Certificates: on the public ports, and among the services."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from services.common.process import rpc
from services.common.tls.wires import ROLES, Identity, mutual, name_of
from services.gateway.config import parse
from tests.helm.rendered import Values, container, pick, pod, refusal, render, workloads
from tests.security.certificates import write_role

SECRETS = {"gateway": "for-gateways", "trainer": "for-trainers", "sampler": "for-samplers"}
OWN = {"mtls": {"enabled": True, "existingSecrets": SECRETS}}
FOLDER = "/etc/tinsmith-identity"


def test_each_component_has_the_identity_of_its_role_alone() -> None:
    objects = render(OWN)
    for component, secret in SECRETS.items():
        (one,) = workloads(objects, component)
        assert f"--identity={FOLDER}" in container(one)["args"]
        (volume,) = [found for found in pod(one)["volumes"] if found["name"] == "identity"]
        assert volume["secret"]["secretName"] == secret
        (mount,) = [found for found in container(one)["volumeMounts"] if found["name"] == "identity"]
        assert (mount["mountPath"], mount["readOnly"]) == (FOLDER, True)


def test_cert_manager_makes_certificates_with_the_names_that_services_look_for() -> None:
    objects = render({"mtls": {"enabled": True, "issuerRef": {"name": "ours", "kind": "Issuer"}}})
    for component in SECRETS:
        spec = pick(objects, "Certificate", f"tinsmith-{component}-identity")["spec"]
        assert spec["dnsNames"] == [name_of(role) for role in ROLES if role == component]
        (one,) = workloads(objects, component)
        (volume,) = [found for found in pod(one)["volumes"] if found["name"] == "identity"]
        assert volume["secret"]["secretName"] == spec["secretName"]


def test_mtls_without_certificates_is_refused() -> None:
    assert "mtls.issuerRef" in refusal({"mtls": {"enabled": True}})


def test_without_mtls_nothing_speaks_of_it() -> None:
    for one in workloads(render()):
        assert "identity" not in str(one)


@pytest.mark.parametrize("component", ["trainer", "sampler"])
async def test_the_kubelet_asks_for_health_with_the_pods_own_certificate(
    tmp_path: Path, component: str
) -> None:
    (one,) = workloads(render(OWN), component)
    program = container(one)["readinessProbe"]["exec"]["command"]
    ca = trustme.CA()
    directory = write_role(tmp_path, ca, component)  # type: ignore[arg-type]
    tls = mutual(Identity(directory), "gateway", component)  # type: ignore[arg-type]
    server = await rpc.serve([], "127.0.0.1:0", tls=tls)

    async def check() -> int:
        words = [word.replace(":9000", f":{server.port}").replace(FOLDER, str(directory)) for word in program]
        process = await asyncio.create_subprocess_exec(sys.executable, *words[1:], stderr=subprocess.DEVNULL)
        return await asyncio.wait_for(process.wait(), 60)

    assert await check() == 0
    await server.drain(0)
    assert await check() != 0


def test_a_certificate_of_the_public_ports_is_mounted_and_probed() -> None:
    objects = render({"gateway": {"tls": {"existingSecret": "public"}, "trustedProxies": ["10.0.0.0/8"]}})
    (gateway,) = workloads(objects, "gateway")
    files = {"TINSMITH_REDIS_URL": "redis://x"}
    config = parse(container(gateway)["args"], files)
    assert str(config.tls_cert) == "/etc/tinsmith-tls/tls.crt"
    assert str(config.tls_key) == "/etc/tinsmith-tls/tls.key"
    assert config.trusted_proxies == ("10.0.0.0/8",)
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {container(gateway)[probe]["httpGet"]["scheme"] for probe in probes} == {"HTTPS"}
    (volume,) = [found for found in pod(gateway)["volumes"] if found["name"] == "tls"]
    assert volume["secret"]["secretName"] == "public"


def test_cert_manager_may_make_the_certificate_of_the_public_ports() -> None:
    tls = {"issuerRef": {"name": "letsencrypt", "kind": "ClusterIssuer"}, "dnsNames": ["tinsmith.internal"]}
    objects = render({"gateway": {"tls": tls, "publicUrl": "https://tinsmith.example.com:8443"}})
    spec = pick(objects, "Certificate", "tinsmith-gateway-tls")["spec"]
    assert spec["issuerRef"] == tls["issuerRef"]
    names = {"tinsmith-gateway", "tinsmith-gateway.default.svc", "tinsmith.example.com", "tinsmith.internal"}
    assert names <= set(spec["dnsNames"])
    (gateway,) = workloads(objects, "gateway")
    (volume,) = [found for found in pod(gateway)["volumes"] if found["name"] == "tls"]
    assert volume["secret"]["secretName"] == spec["secretName"]
    assert "--tls-cert=/etc/tinsmith-tls/tls.crt" in container(gateway)["args"]
    # `helm test` calls the Service by a name of the certificate, and believes its authority.
    test = pick(objects, "Pod", "tinsmith-test")["spec"]
    environment = {entry["name"]: entry.get("value") for entry in test["containers"][0]["env"]}
    assert environment["TINKER_BASE_URL"] == "https://tinsmith-gateway:8000"
    assert [one["secret"]["secretName"] for one in test["volumes"] if "secret" in one] == [spec["secretName"]]


def test_a_secret_of_ones_own_needs_no_issuer() -> None:
    both = {"existingSecret": "public", "issuerRef": {"name": "ca"}}
    assert not [one for one in render({"gateway": {"tls": both}}) if one["kind"] == "Certificate"]


@pytest.mark.parametrize(
    ("values", "protocol"),
    [({}, "kubernetes.io/h2c"), ({"gateway": {"tls": {"existingSecret": "public"}}}, "https")],
    ids=["in the clear", "tls"],
)
def test_proxies_are_told_what_the_grpc_port_speaks(values: Values, protocol: str) -> None:
    for name in ("tinsmith-gateway", "tinsmith-gateway-headless"):
        ports = pick(render(values), "Service", name)["spec"]["ports"]
        (grpc,) = [port for port in ports if port["name"] == "grpc"]
        assert grpc["appProtocol"] == protocol


@pytest.mark.parametrize(("version", "seconds"), [("1.23.0", 30), ("1.30.0", 10)])
def test_a_probe_that_starts_a_program_has_the_time_for_it(version: str, seconds: int) -> None:
    for component in ("trainer", "sampler"):
        (one,) = workloads(render(kubernetes=version), component)
        probes = [container(one)[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert min(probe["timeoutSeconds"] for probe in probes) == seconds
