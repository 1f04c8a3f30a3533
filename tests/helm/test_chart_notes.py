"""What the chart tells people: its README, in the words of values.yaml, and what helm prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts import chart_docs
from tests.helm.rendered import CHART, ROOT, Values, pick, render


def leaves(values: object, prefix: str = "") -> set[str]:
    """Dotted names of all values, as deep as values.yaml has them on lines of their own."""
    if not isinstance(values, dict) or not values:
        return {prefix}
    return {name for key, one in values.items() for name in leaves(one, f"{prefix}.{key}".strip("."))}


def test_the_readme_is_current() -> None:
    text = (CHART / "values.yaml").read_text()
    assert chart_docs.README.read_text() == chart_docs.page(text), "run make chart-docs"


def test_every_value_is_told_of() -> None:
    text = (CHART / "values.yaml").read_text()
    told = {name for entry in chart_docs.entries(text) for name, _ in entry.values}
    for name in leaves(yaml.safe_load(text)):
        parts = name.split(".")
        assert any(".".join(parts[:end]) in told for end in range(1, len(parts) + 1)), name


def test_a_comment_is_of_the_values_that_follow_it() -> None:
    text = "a:\n  # One.\n  b: 1\n  c: []\n\n  d: 2\n# Block.\ne:\n  f: {}\n"
    found = [(entry.comment, entry.values) for entry in chart_docs.entries(text)]
    assert found == [
        ("", [("a", "")]),
        ("One.", [("a.b", "1"), ("a.c", "[]")]),
        ("", [("a.d", "2")]),
        ("Block.", [("e", "")]),
        ("", [("e.f", "{}")]),
    ]


def notes(tmp_path: Path, values: Values) -> str:
    """NOTES.txt as rendered; `helm template` leaves it out, so a copy of the chart makes an object of it."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text('{{- define "notes" -}}' + text + "{{- end -}}")
    (chart / "templates" / "notes.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\n"
        'data: {text: {{ include "notes" . | toJson }}}\n'
    )
    return pick(render(values, chart=chart), "ConfigMap", "notes")["data"]["text"]


@pytest.mark.parametrize("service_type", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_the_notes_tell_how_to_get_the_base_url_and_the_api_key(tmp_path: Path, service_type: str) -> None:
    text = notes(tmp_path, {"gateway": {"service": {"type": service_type}}})
    assert "export TINKER_BASE_URL=http://" in text
    assert "export TINKER_API_KEY=$(kubectl -n default get secret tinsmith-api-keys" in text
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in text
    # Without .result() the SDK takes the call and warns that it is on its way out.
    assert '.create_lora_training_client("HuggingFaceTB/SmolLM2-135M-Instruct").result().get_info()' in text
    # Every command must be one that a shell can read.
    commands = "\n".join(
        line for line in text.splitlines() if line.startswith("  kubectl") or "export" in line
    )
    assert subprocess.run(["bash", "-n"], input=commands, text=True, timeout=10).returncode == 0


INGRESS: Values = {"enabled": True, "hosts": [{"host": "b.example"}]}
TLS: Values = {"tls": [{"hosts": ["b.example"], "secretName": "s"}]}


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        ({"publicUrl": "https://a.example/t"}, "https://a.example/t"),
        ({"ingress": INGRESS}, "http://b.example"),
        ({"ingress": INGRESS | TLS}, "https://b.example"),
        ({"ingress": INGRESS, "publicUrl": "https://a.example"}, "https://a.example"),
    ],
    ids=str,
)
def test_gateways_that_have_a_public_url_are_told_by_it(tmp_path: Path, gateway: Values, url: str) -> None:
    text = notes(tmp_path, {"gateway": gateway})
    assert f"  export TINKER_BASE_URL={url}\n" in text
    assert "port-forward" not in text


def test_the_key_that_the_notes_print_is_the_first_of_the_secret(tmp_path: Path) -> None:
    text = notes(tmp_path, {"apiKeys": {"existingSecret": "mine"}})
    line = next(line for line in text.splitlines() if "TINKER_API_KEY" in line)
    assert "get secret mine " in line
    pipeline = line.split("base64 -d | ")[1].removesuffix(")")
    done = subprocess.run(
        ["bash", "-c", pipeline],
        input="tml-first alice\ntml-second\n",
        text=True,
        capture_output=True,
        timeout=10,
    )
    assert done.stdout.strip() == "tml-first"


def warnings(tmp_path: Path, values: Values) -> str:
    """What helm warns of, but for the registry and the access mode, which the defaults do not name."""
    named: Values = {"image": {"registry": "r.example"}, "data": {"existingClaim": "weights"}}
    merged = values | {part: named[part] | values.get(part, {}) for part in named}
    lines = notes(tmp_path, merged).splitlines()
    return "\n".join(line for line in lines if line.startswith("WARNING"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"device": "cuda"},
            "sampler of HuggingFaceTB/SmolLM2-135M-Instruct computes on GPUs and has the image of",
        ),
        (
            {"redis": {"storage": {"size": "8Gi"}}},
            "redis.storage.size is less than three times redis.maxmemory",
        ),
        (
            {"gateway": {"ingress": {"enabled": True, "hosts": [{"host": "a"}]}}},
            "download links begin with http://",
        ),
        (
            {"sampler": {"sharedMemory": "7Gi"}},
            "may have 16384 MiB, of which sharedMemory and caches may take 13312",
        ),
        (
            {"trainer": {"ranks": 2, "sharedMemory": "25Gi"}},
            "may have 32768 MiB, of which sharedMemory and caches",
        ),
        ({"sampler": {"terminationGracePeriodSeconds": 60}}, "is killed 60 s after it was asked to end"),
    ],
    ids=str,
)
def test_what_may_not_fit_is_warned_of(tmp_path: Path, values: Values, says: str) -> None:
    assert says in warnings(tmp_path, values)


@pytest.mark.parametrize(
    ("own", "bare"),
    [
        ([], "tinsmith-gateway, tinsmith-trainer, tinsmith-sampler, tinsmith-client"),
        (["test"], "tinsmith-gateway, tinsmith-trainer, tinsmith-sampler"),
        (["gateway", "trainer", "sampler"], "tinsmith-client"),
    ],
    ids=str,
)
def test_every_image_that_nodes_must_have_is_named(tmp_path: Path, own: list[str], bare: str) -> None:
    values: Values = {"image": {"registry": ""}}
    for part in own:
        values[part] = {"image": {"repository": "r.example/mine"}}
    assert f"images have no registry: {bare} must be loaded onto the nodes" in warnings(tmp_path, values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "device": "cuda",
            "image": {"tag": "1-cuda"},
            "trainer": {"cpuThreads": 1, "resources": {"requests": {"cpu": 1}}},
            "sampler": {"cpuThreads": 1, "resources": {"requests": {"cpu": 1}}},
        },
        {"gateway": {"ingress": {"enabled": True, "hosts": [{"host": "a"}]}, "publicUrl": "https://a"}},
    ],
    ids=str,
)
def test_what_fits_is_not_warned_of(tmp_path: Path, values: Values) -> None:
    assert warnings(tmp_path, values) == ""


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples" / "values").glob("*.yaml")), ids=lambda path: path.stem
)
def test_examples_fit(tmp_path: Path, example: Path) -> None:
    assert warnings(tmp_path, yaml.safe_load(example.read_text())) == ""
