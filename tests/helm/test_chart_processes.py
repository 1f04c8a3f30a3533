"""The chart's command lines and probes, tried on the programs that they are for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.common.process import rpc
from tests.helm.rendered import CHART, arguments, container, pod, render, workloads

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(autouse=True)
def redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TINSMITH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://:secret@tinsmith-redis:6379/0")


def test_the_gateway_understands_its_command_line() -> None:
    from services.gateway import config

    (gateway,) = workloads(render(), "gateway")
    settings = config.parse(arguments(gateway))
    assert (settings.id, settings.host) == ("a-pod-0", "0.0.0.0")
    assert settings.api_keys_file == Path("/etc/tinsmith/api-keys")
    ports = {port["name"]: port["containerPort"] for port in container(gateway)["ports"]}
    assert ports == {"http": settings.port, "grpc": settings.grpc_port, "metrics": settings.metrics_port}


def test_without_values_the_chart_gives_the_gateway_its_own_defaults() -> None:
    from services.gateway import config

    (gateway,) = workloads(render(), "gateway")
    told, own = config.parse(arguments(gateway)), config.parse(["--data-dir=/data"])
    for name in (
        "limits",
        "retention",
        "journal",
        "room",
        "memory_mib",
        "snapshot_bytes",
        "snapshot_owner_bytes",
    ):
        assert getattr(told, name) == getattr(own, name), name
    limit = container(gateway)["resources"]["limits"]["memory"]
    assert limit == "3Gi"
    assert told.memory_mib <= 0.7 * 3 * 1024


def test_what_api_keys_may_have_and_how_much_memory_gateways_take_are_values() -> None:
    from services.common.state.journal_records import JournalLimits
    from services.common.state.room import RoomLimits
    from services.gateway import config
    from services.gateway.access.limits import OwnerLimits

    owner = {
        "sessions": 11,
        "models": 12,
        "samplers": 13,
        "checkpoints": 14,
        "checkpointBytes": 5_000_000_000_000,
        "requestsPerSecond": 16,
        "burstSeconds": 17,
        "calls": 18,
        "downloads": 19,
        "waitingSequences": 20,
        "pendingOperations": 21,
        "pendingBytes": 22,
    }
    values = {
        "memoryMiB": 600,
        "sessions": {"forgetAfter": 86400},
        "state": {"bytes": 3_000_000_000, "ownerBytes": 1_000_000_000, "ownerOperations": 23},
        "snapshots": {"bytes": 2_000_000_000_000, "ownerBytes": 1_000_000_000_000},
        "ownerLimits": owner,
    }
    (gateway,) = workloads(render({"gateway": values}), "gateway")
    settings = config.parse(arguments(gateway))
    assert settings.limits.owners == OwnerLimits(11, 12, 13, 14, 5_000_000_000_000, 16, 17, 18, 19)
    assert settings.limits.waiting_sequences == 20
    assert settings.journal == JournalLimits(pending_bytes=22, entries=21)
    assert settings.room == RoomLimits(3_000_000_000, 1_000_000_000, 23)
    assert (settings.memory_mib, settings.retention.forget_after) == (600, 86400)
    assert (settings.snapshot_bytes, settings.snapshot_owner_bytes) == (2 * 10**12, 10**12)


def test_gateways_do_not_take_a_port_forward_for_a_client_with_their_files() -> None:
    from services.gateway import config

    (gateway,) = workloads(render({"gateway": {"publicUrl": "https://a.example"}}), "gateway")
    settings = config.parse(arguments(gateway))
    assert (settings.near_clients, settings.public_url) == (False, "https://a.example")


def test_gateways_are_told_which_loss_runs_in_place_of_stable_reinforce() -> None:
    from services.gateway import config

    (gateway,) = workloads(render({"gateway": {"stableReinforceAs": "cispo"}}), "gateway")
    assert config.parse(arguments(gateway)).limits.stable_reinforce_as == "cispo"


def test_gateways_are_told_which_base_models_there_are() -> None:
    from services.common.state.known_models import Configured
    from services.gateway import config

    models = [
        {"name": 'org/a"b', "path": "x", "id": "a", "sampler": {"replicas": 0}},
        {"name": "org/c", "path": "y", "trainer": {"enabled": False}},
    ]
    (gateway,) = workloads(render({"models": models}), "gateway")
    told = config.parse(arguments(gateway)).base_models
    assert told == (Configured(name='org/a"b', sampled=False), Configured(name="org/c", trained=False))


def test_the_trainer_understands_its_command_line_and_advertises_the_address_of_its_pod() -> None:
    from services.trainer import config

    full = {"offloadOptimizer": "cpu", "maxFullModels": 2, "fullSnapshotSteps": 5}
    (trainer,) = workloads(render({"trainer": {"ranks": 2, "zeroStage": 3, **full}}), "trainer")
    launcher_args, rank_args = split(arguments(trainer))
    assert launcher_args == ["--ranks=2"]
    settings = config.parse(rank_args)
    assert settings.id == trainer["metadata"]["name"]
    assert (settings.host, settings.advertise_host) == ("0.0.0.0", "10.1.2.3")
    assert settings.base_model == settings.model_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (settings.zero_stage, settings.device) == (3, "cpu")
    assert (settings.offload_optimizer, settings.max_full_models, settings.full_snapshot_steps) == (
        "cpu",
        2,
        5,
    )
    assert [port["containerPort"] for port in container(trainer)["ports"]] == [
        settings.port,
        settings.metrics_port,
    ]


def test_a_trainer_takes_examples_as_long_as_it_is_told() -> None:
    from services.trainer import config

    for values, tokens in (
        ({}, 0),
        ({"sampler": {"maxContext": 4096}}, 0),
        ({"sampler": {"maxContext": 4096}, "trainer": {"maxContext": 2048}}, 2048),
        ({"sampler": {"replicas": 0}, "trainer": {"maxContext": 2048}}, 2048),
    ):
        (trainer,) = workloads(render(values), "trainer")
        _, rank_args = split(arguments(trainer))
        assert config.parse(rank_args).max_context == tokens


def test_the_sampler_understands_its_command_line_and_advertises_the_address_of_its_pod() -> None:
    from services.sampler import config

    sizes = {
        "maxContext": 4096,
        "maxSequences": 7,
        "headDtype": "float32",
        "modelRunner": "v1",
        "tensorParallelSize": 2,
        "pipelineParallelSize": 3,
        "snapshotCacheGiB": 1,
        "drainSeconds": 30,
    }
    values = {"gpuMemoryUtilization": 0.5, "maxLoraRank": 128, "quantization": "fp8_per_block", **sizes}
    (sampler,) = workloads(render({"sampler": values, "device": "cuda"}), "sampler")
    settings = config.parse(arguments(sampler))
    (drafting,) = workloads(render({"sampler": {"speculativeNgramTokens": 4, "kvCacheGiB": 0.5}}), "sampler")
    assert config.parse(arguments(drafting)).speculative_ngram_tokens == 4
    assert config.parse(arguments(drafting)).kv_cache_gib == 0.5
    assert (settings.id, settings.host, settings.advertise_host) == ("a-pod-0", "0.0.0.0", "10.1.2.3")
    assert (settings.gpu_memory_utilization, settings.max_lora_rank) == (0.5, 128)
    assert (settings.max_context, settings.max_sequences, settings.kv_cache_gib) == (4096, 7, 0)
    assert (settings.head_dtype, settings.quantization) == ("float32", "fp8_per_block")
    assert settings.model_runner == "v1"
    assert not settings.routed_experts
    (telling,) = workloads(render({"sampler": {"routedExperts": True}, "device": "cuda"}), "sampler")
    assert config.parse(arguments(telling)).routed_experts
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (2, 3)
    assert (settings.snapshot_cache_gib, settings.full_snapshot_cache_gib) == (1, 4)
    assert [port["containerPort"] for port in container(sampler)["ports"]] == [
        settings.port,
        settings.metrics_port,
    ]
    # Kubernetes must not kill what the sampler still lets finish.
    assert settings.drain_seconds == 30
    assert pod(sampler)["terminationGracePeriodSeconds"] == 90


def test_a_sampler_compiles_its_model_unless_the_chart_is_told_otherwise() -> None:
    for value, word in ((False, "no"), (True, "yes")):
        (sampler,) = workloads(render({"sampler": {"enforceEager": value}}), "sampler")
        assert f"--enforce-eager={word}" in container(sampler)["args"]
    (usual,) = workloads(render({}), "sampler")
    assert "--enforce-eager=no" in container(usual)["args"]


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    at = words.index("--")
    return words[:at], words[at + 1 :]


def test_the_trainer_image_starts_a_world_of_as_many_ranks_as_the_chart_says() -> None:
    from services.trainer.world.launch import launch_command

    text = (CHART.parents[1] / "docker" / "trainer.Dockerfile").read_text()
    entry = json.loads(text.rpartition("\nENTRYPOINT ")[2])
    (trainer,) = workloads(render({"trainer": {"ranks": 3}}), "trainer")
    words = arguments(trainer)
    _, *started = launch_command(3, split(words)[1])
    assert entry[:3] == ["tini", "--", "python"]
    assert [*entry[3:], *words] == started


def test_new_clusters_check_grpc_health_themselves() -> None:
    for version in ("1.24.0", "1.37.0", "1.29.3-eks-a5ec690"):
        objects = render(kubernetes=version)
        for one in workloads(objects, "trainer") + workloads(objects, "sampler"):
            for probe in PROBES:
                assert container(one)[probe]["grpc"] == {"port": 9000}


async def test_old_clusters_check_grpc_health_with_a_program_that_tells_serving_from_draining() -> None:
    (trainer,) = workloads(render(kubernetes="1.23.17"), "trainer")
    program = container(trainer)["readinessProbe"]["exec"]["command"]
    server = await rpc.serve([], "127.0.0.1:0")

    async def check() -> int:
        words = [word.replace(":9000", f":{server.port}") for word in program]
        process = await asyncio.create_subprocess_exec(sys.executable, *words[1:], stderr=subprocess.DEVNULL)
        return await asyncio.wait_for(process.wait(), 30)

    assert program[0] == "python"
    assert await check() == 0
    await server.drain(0)
    assert await check() != 0


def test_a_model_may_take_as_long_to_load_as_startup_seconds_say() -> None:
    (trainer,) = workloads(render({"trainer": {"startupSeconds": 605}}), "trainer")
    probe = container(trainer)["startupProbe"]
    assert 605 <= probe["periodSeconds"] * probe["failureThreshold"] < 615


def test_the_gateway_is_asked_for_its_health_over_http() -> None:
    (gateway,) = workloads(render(), "gateway")
    paths = {"startupProbe": "healthz", "readinessProbe": "readyz", "livenessProbe": "healthz"}
    for probe, path in paths.items():
        assert container(gateway)[probe]["httpGet"] == {"path": f"/api/v1/{path}", "port": "http"}


def test_a_gateway_is_given_as_long_to_start_as_the_redis_that_it_waits_for() -> None:
    patience = {}
    for component in ("gateway", "redis"):
        (one,) = workloads(render(), component)
        probe = container(one)["startupProbe"]
        patience[component] = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience["gateway"] >= patience["redis"]


def test_the_chart_names_the_version_of_the_distribution() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
