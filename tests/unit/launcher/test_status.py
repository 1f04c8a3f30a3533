"""`tinsmith status`."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from services.common.contract import ids
from services.common.contract.experts.routing import Routing
from services.common.state.journal import Journal
from services.common.state.registry import ServiceRecord
from services.common.storage.data_dir import DataDir
from services.launcher import cli, machine, redis_server, status


def test_status_of_a_directory_where_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL", raising=False)
    assert cli.main(["status", "--data-dir", str(tmp_path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["processes"] == []
    assert "no cluster runs" in report["error"]


def test_status_looks_where_the_variable_had_up_keep_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINSMITH_REDIS_URL", raising=False)
    monkeypatch.setenv("TINSMITH_DATA_DIR", str(tmp_path / "elsewhere"))
    assert cli.main(["status"]) == 3
    assert str(tmp_path / "elsewhere") in capsys.readouterr().out


async def test_status_does_not_wait_for_long_for_a_redis_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_REDIS_TIMEOUT_S", 0.2)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(60):
        report = await status.collect(DataDir(tmp_path), f"redis://127.0.0.1:{port}/0")
    assert report["error"] == "Redis does not answer: not within 0.2 s"


async def test_status_says_which_processes_have_not_announced_themselves(
    tmp_path: Path, redis_url: str
) -> None:
    data = DataDir(tmp_path)
    data.run.mkdir(parents=True)
    for name in ("trainer-0", "redis-0"):
        (data.run / f"{name}.pid").write_text(str(os.getpid()))
    report = await status.collect(data, redis_url)
    assert report["unannounced"] == ["trainer-0"]
    assert "trainer-0  is not announced: it loads, hangs, or does not reach Redis" in status.show(report)


async def test_a_process_that_is_not_announced_is_not_well(tmp_path: Path, redis_url: str) -> None:
    data = DataDir(tmp_path)
    data.run.mkdir(parents=True)
    (data.run / "redis-0.pid").write_text(str(os.getpid()))
    assert status.healthy(await status.collect(data, redis_url))
    (data.run / "gateway-0.pid").write_text(str(os.getpid()))
    assert not status.healthy(await status.collect(data, redis_url))


def test_status_says_that_redis_takes_no_writes_when_its_disk_is_full(tmp_path: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    def told() -> dict[str, Any]:
        return asyncio.run(status.collect(DataDir(tmp_path), urls["operator"]))

    process, urls = redis_server.prepare(tmp_path / "redis", machine.free_port(), "everysec", 700 << 20)
    server = subprocess.Popen(process.argv, stdout=subprocess.DEVNULL, preexec_fn=small_files)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "redis-0.pid").write_text(str(server.pid))
    patient = redis.Redis.from_url(urls["operator"], retry=Retry(ConstantBackoff(0.1), 300))
    try:
        with patient as client:
            client.ping()
            assert status.healthy(told())
            with pytest.raises(redis.ResponseError, match="MISCONF"):
                for number in range(100):
                    client.set(f"filling:{number}", "x" * 50_000)
        assert told()["error"].startswith("Redis takes no writes")
        assert not status.healthy(told())
    finally:
        server.kill()
        server.wait(60)


def test_ranks_of_a_trainer_are_announced_by_their_first() -> None:
    running = [{"name": f"trainer-{number}", "alive": True} for number in (2, 3, 4, 5, 6)]
    services = [{"id": "trainer-2", "world_size": 4}, {"id": "gateway-0"}]
    assert status._unannounced({"processes": running, "services": services}) == ["trainer-6"]


def test_status_says_what_cannot_be_read() -> None:
    met = {"name": "tinsmith:session:{a}", "reason": "no such field", "count": 7, "last": time.time() - 5}
    shown = status.show({"processes": [], "services": [], "set_aside": [met]})
    assert "cannot be read: tinsmith:session:{a}: no such field (7 times, 5 s ago)" in shown


async def test_status_says_which_models_wait_and_why(
    tmp_path: Path, redis_client: redis.asyncio.Redis, redis_url: str
) -> None:
    journal, why = Journal(redis_client), "the trainer cannot bring the model back at present (no memory)"
    models = [ids.model_id("s", number) for number in range(14)]
    for model_id in models:
        await journal._announce(model_id)
    for model_id in models[1:13]:
        await journal.set_queue_state(model_id, why)
    await journal.set_queue_state(models[0], "no trainer is ready")
    report = await status.collect(DataDir(tmp_path), redis_url)
    assert report["waiting"] == {models[0]: "no trainer is ready", **dict.fromkeys(models[1:13], why)}
    text = status.show(report)
    assert text.index(f"12 models wait: {why}\n") < text.index("1 model waits: no trainer is ready\n")
    (named,) = [line for line in text.splitlines() if line.endswith("and 2 more")]
    assert named.count(", ") == 9
    assert models[13] not in text


def test_of_models_that_wait_each_for_a_reason_of_its_own_some_are_told() -> None:
    told = status.show({"processes": [], "services": [], "waiting": {f"m{n}": f"{n}" for n in range(14)}})
    assert told.count("1 model waits") == 10
    assert "4 more wait for other reasons (--json has them)" in told


def test_status_says_which_samplers_of_a_base_model_have_different_model_runners() -> None:
    runners = {"org/one": {"v1": ["sampler-0"], "v2": ["sampler-1", "sampler-2"]}}
    shown = status.show({"processes": [], "services": [], "mixed_runners": runners})
    assert "samplers of org/one have different model runners (v1: sampler-0; v2: sampler-1, " in shown
    assert "different model runners" not in status.show({"processes": [], "services": []})


def test_status_says_how_a_sampler_was_started_and_what_it_has_room_for() -> None:
    sampler = ServiceRecord(
        kind="sampler",
        id="sampler-0",
        address="h:1",
        context_length=4096,
        world_size=4,
        max_sequences=64,
        queued_sequences=16,
        batched_tokens=2048,
        kv_tokens=9000,
        adapter_slots=8,
        kv_cache_dtype="fp8",
        head_dtype="auto",
        quantization="none",
        model_runner="v1",
        pipeline_stages=2,
        speculative_ngram_tokens=4,
    )
    shown = status.show({"processes": [], "services": [msgspec.to_builtins(sampler)]})
    assert (
        "  contexts of 4096 tokens, generates 64 sequences at once, takes on 16 beside them, "
        "2048 tokens a step, keys and values of 9000, 8 adapters at a time, "
        "workers 4, model runner v1, pipeline stages 2, drafted tokens 4, keys and values in fp8"
    ) in shown.splitlines()
    routes = ServiceRecord(kind="sampler", id="s", address="h:1", max_sequences=64, routing=Routing(2, 4, 8))
    trainer = msgspec.structs.replace(routes, kind="trainer")
    shown = status.show(
        {"processes": [], "services": [msgspec.to_builtins(one) for one in (routes, trainer)]}
    )
    assert "  generates 64 sequences at once, tells routed experts" in shown.splitlines()
    assert "  replays routed experts" in shown.splitlines()
    plain = ServiceRecord(kind="sampler", id="sampler-1", address="h:2", max_sequences=64)
    shown = status.show({"processes": [], "services": [msgspec.to_builtins(plain)]})
    assert "  generates 64 sequences at once" in shown.splitlines()
    base_only = msgspec.structs.replace(plain, adapts=False, full_models=False)
    shown = status.show({"processes": [], "services": [msgspec.to_builtins(base_only)]})
    assert "  generates 64 sequences at once, no adapters, no full models" in shown.splitlines()


def test_status_says_what_trains_and_which_weights_a_sampler_has() -> None:
    trainer = {
        "world_size": 2,
        "zero_stage": 1,
        "max_sequence_tokens": "4096",
        "max_forward_tokens": "8192",
        "max_operation_tokens": "100000",
        "adapter_bytes": str(3 * 2**20),
        "adapter_room_bytes": str(2**30),
        "adapter_host_bytes": str(5 * 2**20),
        "adapter_host_room_bytes": str(2**31),
        "page_locked_bytes": str(6 * 2**20),
        "page_locked_kept_bytes": str(7 * 2**20),
        "weight_bytes": str(8 * 2**20),
        "pass_bytes": str(9 * 2**20),
        "asked_micro_batch_tokens": "1024",
        "models": [
            {
                "model_id": name,
                "lora_rank": rank,
                "applied_seq_id": 3,
                "durable_seq_id": 2,
                "queued": 0,
                "on_host": on_host,
            }
            for name, rank, on_host in (
                ("s:train:0", 8, False),
                ("s:train:1", 0, False),
                ("s:train:2", 8, True),
            )
        ],
    }
    snapshot = {"model_id": "s:train:1", "version": 3}
    sampler = {"running": 1, "waiting": 4, "group_epoch": 2, "resident": [], "weights": snapshot}
    services: list[dict[str, Any]] = [
        {"id": name, "state": "ready", "address": "h:1", "status": status}
        for name, status in (("trainer-0", trainer), ("sampler-0", sampler))
    ]
    # Of the trainer's record.
    services[0] |= {"micro_batch_tokens": 1024, "one_rank_tokens": 3000}
    shown = status.show({"processes": [], "services": services})
    assert "s:train:0  rank 8 " in shown
    assert "adapters take 3 of 1024 MiB of each rank; sequences of up to 4096 tokens (8192 that only" in shown
    assert "that only run forward), 100000 tokens an operation" in shown
    weights = "  weights take 8 MiB of each rank, the last pass 9; micro-batches of up to 1024 tokens"
    assert weights in shown.splitlines()
    assert "  all ranks together compute sequences in training of more than 3000 tokens" in shown.splitlines()
    assert "adapters that are idle take 5 of 2048 MiB of each rank's host" in shown
    assert "6 MiB of the host are page-locked, and 7 kept for later" in shown
    assert [line.endswith("0 queued, on the host") for line in shown.splitlines() if ":train:" in line] == [
        False,
        False,
        True,
        False,
    ]
    assert "s:train:1  all weights " in shown
    assert "1 requests, 4 waiting for other weights" in shown
    assert "has the weights of s:train:1 version 3" in shown
    unshared = "what sequences begin with alike is computed for each of them; its log says why"
    assert unshared in shown
    services[0]["status"] = {**trainer, "shares_prefixes": True}
    assert unshared not in status.show({"processes": [], "services": services})

    services[0] |= {"micro_batch_tokens": 256, "one_rank_tokens": 0}
    shown = status.show({"processes": [], "services": services})
    lacking = f"{weights.replace('1024', '256')} (started for 1024, but memory was lacking)"
    assert lacking in shown.splitlines()
    assert "all ranks together" not in shown
