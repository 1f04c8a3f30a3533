"""`tinsmith status`: processes of a data directory, live services, and what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import psutil
from google.protobuf.json_format import MessageToDict
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.common.process import rpc
from services.common.state import keys, redis_client, registry
from services.common.state.journal import Journal
from services.common.state.poison import Poison
from services.common.storage.data_dir import DataDir
from services.common.tls.wires import Identity, Role, identity
from services.gateway.placement import model_runners
from services.launcher import machine, usage
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc

_RPC_TIMEOUT_S = 3.0
_REDIS_TIMEOUT_S = 15.0
"""A client of Redis tries for over a minute; who looks at a cluster that hangs is told sooner."""
_NO_WRITES = "Redis takes no writes, as it cannot write to its disk: mostly it is full; its log says more"
_IDENTITY_VARIABLE = "TINSMITH_IDENTITY"
_ROOM = {
    "context_length": "contexts of {} tokens",
    "max_sequences": "generates {} sequences at once",
    "queued_sequences": "takes on {} beside them",
    "batched_tokens": "{} tokens a step",
    "kv_tokens": "keys and values of {}",
    "adapter_slots": "{} adapters at a time",
}
"""Of a sampler's record, in words; 0 is not said."""
_SETTINGS = {
    "world_size": "workers",
    "model_runner": "model runner",
    "pipeline_stages": "pipeline stages",
    "speculative_ngram_tokens": "drafted tokens",
    "kv_cache_dtype": "keys and values in",
    "head_dtype": "head in",
    "quantization": "weights in",
}
_LACKS = {"adapts": "no adapters", "full_models": "no full models"}
_NAMED = 10
"""Reasons for which models wait, and models of each, that are told; all are in the report."""
_USUAL = (None, 0, 1, "", "auto", "none")


async def collect(data: DataDir, redis_url: str | None) -> dict[str, Any]:
    """{"processes": [...], "services": [...]}; "error" when Redis cannot be asked, or takes no writes."""
    report: dict[str, Any] = {"processes": _processes(data), "services": []}
    file = data.redis_url
    url = redis_url or (file.read_text() if file.exists() else None)
    if url is None:
        report["error"] = f"no cluster runs on {data.root} (no {file})"
        return report
    client = redis_client.connect(url)
    try:
        async with asyncio.timeout(_REDIS_TIMEOUT_S):
            records = [record for kind in registry.KINDS for record in await registry.live(client, kind)]
            samples = await _samples(client, records)
            report["storage"] = await _storage(client, data)
            report["limits"], report["owners"] = usage.limits(records), await usage.collect(client)
            report["mixed_runners"] = model_runners.mixed(records)
            report["waiting"] = await Journal(client).queue_states()
            report["set_aside"] = [asdict(met) for met in await Poison(client).listed()]
            if (await client.info("persistence")).get("aof_last_write_status", "ok") != "ok":
                report["error"] = _NO_WRITES
    except (RedisError, TimeoutError) as error:
        why = str(error) or f"not within {_REDIS_TIMEOUT_S:g} s"
        report["error"] = f"Redis does not answer: {why}"
        return report
    finally:
        await client.aclose()
    who = _operator(data)
    report["services"] = await asyncio.gather(*(_service(record, who) for record in records))
    for entry in report["services"]:
        if entry["id"] in samples:
            entry["samples"] = samples[entry["id"]]
    report["unannounced"] = _unannounced(report)
    return report


def _unannounced(report: dict[str, Any]) -> list[str]:
    """Services that run here and have not announced themselves. The first rank of a trainer announces all."""
    announced = set()
    for entry in report["services"]:
        kind, _, first = entry["id"].rpartition("-")
        ranks = entry.get("world_size", 1) if kind == "trainer" and first.isdecimal() else 1
        announced |= {entry["id"], *(f"{kind}-{int(first) + rank}" for rank in range(1, ranks))}
    return [
        entry["name"]
        for entry in report["processes"]
        if entry["alive"]
        and entry["name"].rpartition("-")[0] in registry.KINDS
        and entry["name"] not in announced
    ]


async def _samples(client: Redis, records: Iterable[registry.ServiceRecord]) -> dict[str, int]:
    """Of each gateway, how many samples it has not answered, whether a sampler has them or none is there."""
    gateways = [record.id for record in records if record.kind == "gateway"]
    pipeline = client.pipeline(transaction=False)
    for name in gateways:
        pipeline.scard(keys.gateway_samples(name))
    return dict(zip(gateways, await pipeline.execute(), strict=True))


async def _storage(client: Redis, data: DataDir) -> dict[str, Any]:
    """How full the data directory's volume is, and what each owner's unnamed snapshots take of it."""
    volume = shutil.disk_usage(data.root)
    found: Any = await client.hgetall(keys.SNAPSHOT_BYTES)
    snapshots = {owner.decode(): int(size) for owner, size in found.items()}
    return {"volume_bytes": volume.total, "free_bytes": volume.free, "snapshot_bytes": snapshots}


def _processes(data: DataDir) -> list[dict[str, Any]]:
    found = []
    for path in sorted(data.run.glob("*.pid")):
        entry: dict[str, Any] = {"name": path.stem, "pid": path.read_text().strip(), "alive": False}
        process = machine.alive(path)
        if process is not None:
            with contextlib.suppress(psutil.Error), process.oneshot():
                entry |= {
                    "alive": True,
                    "pid": process.pid,
                    "uptime_seconds": round(time.time() - process.create_time()),
                    "memory_mib": process.memory_info().rss >> 20,
                }
        found.append(entry)
    return found


def _operator(data: DataDir) -> Identity | None:
    """Who asks, of a cluster whose services want to know it."""
    given = os.environ.get(_IDENTITY_VARIABLE)
    own = data.tls / "operator"
    return identity(Path(given) if given else own if own.exists() else Path())


async def _service(record: registry.ServiceRecord, who: Identity | None) -> dict[str, Any]:
    entry = {key: value for key, value in msgspec.to_builtins(record).items() if value}
    if record.kind == "gateway":
        # They are told apart from the services.
        entry.pop("limits", None)
        return entry
    peer: Role = "trainer" if record.kind == "trainer" else "sampler"
    async with rpc.channel(record.address, who, peer) as channel:
        try:
            if record.kind == "trainer":
                reply: Any = await trainer_pb2_grpc.TrainerServiceStub(channel).GetTrainerStatus(
                    trainer_pb2.GetTrainerStatusRequest(), timeout=_RPC_TIMEOUT_S
                )
            else:
                reply = await sampler_pb2_grpc.SamplerServiceStub(channel).GetSamplerStatus(
                    sampler_pb2.GetSamplerStatusRequest(), timeout=_RPC_TIMEOUT_S
                )
        except grpc.aio.AioRpcError as error:
            return entry | {"error": error.details() or error.code().name}
    return entry | {
        "status": MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    }


def show(report: dict[str, Any]) -> str:
    """The report as text for people."""
    lines = ["PROCESS       PID     STATE  UPTIME  MEMORY"]
    for entry in report["processes"]:
        state = "alive" if entry["alive"] else "gone"
        lines.append(
            f"{entry['name']:<12}{entry['pid'] or '-':>8}  {state:<5}"
            f"{entry.get('uptime_seconds', 0):>7} s{entry.get('memory_mib', 0):>5} MiB"
        )
    for entry in report["services"]:
        lines += ["", _headline(entry), *_details(entry)]
    for name in report.get("unannounced", ()):
        lines += [
            "",
            f"{name}  is not announced: it loads, hangs, or does not reach Redis; its log says which",
        ]
    for base_model, runners in report.get("mixed_runners", {}).items():
        lines += ["", model_runners.sentence(base_model, runners)]
    if "storage" in report:
        lines += ["", *_space(report["storage"])]
    if report.get("limits") or report.get("owners"):
        lines += ["", *usage.show(report.get("limits", {}), report.get("owners", {}))]
    lines += _waiting(report.get("waiting", {}))
    for met in report.get("set_aside", ()):
        ago = max(0, round(time.time() - met["last"]))
        lines += ["", f"cannot be read: {met['name']}: {met['reason']} ({met['count']} times, {ago} s ago)"]
    if "error" in report:
        lines += ["", report["error"]]
    return "\n".join(lines)


def _space(storage: dict[str, Any]) -> Sequence[str]:
    snapshots = storage["snapshot_bytes"]
    gib = 2**30
    line = f"{storage['free_bytes'] / gib:.1f} of {storage['volume_bytes'] / gib:.1f} GiB are free"
    return [
        f"{line}; snapshots without a name take {sum(snapshots.values()) / gib:.2f} GiB",
        *(f"  {owner}  {size / gib:.2f} GiB" for owner, size in sorted(snapshots.items())),
    ]


def _waiting(waiting: dict[str, str]) -> list[str]:
    """Why operations of models wait, what keeps most of them first, and which these are."""
    alike: dict[str, list[str]] = {}
    for model_id, why in sorted(waiting.items()):
        alike.setdefault(why, []).append(model_id)
    reasons = sorted(alike, key=lambda why: -len(alike[why]))
    lines = []
    for why in reasons[:_NAMED]:
        models = alike[why]
        what, more = "model waits" if len(models) == 1 else "models wait", len(models) - _NAMED
        named = ", ".join(models[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        lines += ["", f"{len(models)} {what}: {why}", f"  {named}"]
    if rest := reasons[_NAMED:]:
        lines += ["", f"{sum(len(alike[why]) for why in rest)} more wait for other reasons (--json has them)"]
    return lines


def _headline(entry: dict[str, Any]) -> str:
    parts = [entry["id"], entry["state"], entry["address"]]
    if entry.get("base_model"):
        parts.append(
            f"{entry['base_model']} ({entry.get('arch', '?')}, {entry.get('dtype')} on {entry.get('device')})"
        )
    return "  ".join(parts)


def _details(entry: dict[str, Any]) -> Sequence[str]:
    if "error" in entry:
        return [f"  does not answer: {entry['error']}"]
    status = entry.get("status", {})
    lines = _engine(entry) if entry.get("kind") == "sampler" else []
    if entry.get("routing") and entry.get("kind") == "trainer":
        lines.append("  replays routed experts")
    if entry.get("samples"):
        lines.append(f"  samples that wait or run: {entry['samples']}")
    if entry.get("stalls"):
        longest = entry["longest_stall_ms"]
        lines.append(f"  its event loop stood still {entry['stalls']} times, for {longest} ms at most")
    if "world_size" in status:
        lines.append(f"  {status['world_size']} ranks, ZeRO stage {status['zero_stage']}")
    if "adapter_room_bytes" in status:
        lines.append(
            f"  adapters take {_mib(status, 'adapter_bytes'):.0f} of "
            f"{_mib(status, 'adapter_room_bytes'):.0f} MiB of each rank; sequences of up to "
            f"{status['max_sequence_tokens']} tokens ({status['max_forward_tokens']} that only run forward), "
            f"{status['max_operation_tokens']} tokens an operation"
        )
        lines += _passes(entry, status)
        on_host, locked = (_mib(status, name) for name in ("adapter_host_room_bytes", "page_locked_bytes"))
        kept = _mib(status, "page_locked_kept_bytes")
        if on_host:
            used = _mib(status, "adapter_host_bytes")
            lines.append(f"  adapters that are idle take {used:.0f} of {on_host:.0f} MiB of each rank's host")
        if locked or kept:
            lines.append(f"  {locked:.0f} MiB of the host are page-locked, and {kept:.0f} kept for later")
        if not status.get("shares_prefixes"):
            lines.append("  what sequences begin with alike is computed for each of them; its log says why")
    for model in status.get("models", []):
        lines.append(
            f"  {model['model_id']}  {_trained(model)}  at operation {model['applied_seq_id']}"
            f" (durable {model['durable_seq_id']}), {model['queued']} queued"
            f"{', on the host' if model.get('on_host') else ''}"
        )
    if "running" in status:
        lines.append(
            f"  {status['running']} requests, {status['waiting']} waiting for other weights, "
            f"weight group {status['group_epoch']}"
        )
    if status.get("weights"):
        lines.append(f"  has the weights of {_snapshot(status['weights'])}")
    for snapshot in status.get("resident", []):
        lines.append(f"  {_snapshot(snapshot)}")
    return lines


def _engine(entry: dict[str, Any]) -> list[str]:
    """What a sampler has room for, and where it was started otherwise than the model is."""
    told = [text.format(entry[name]) for name, text in _ROOM.items() if entry.get(name)]
    told += [f"{text} {entry[name]}" for name, text in _SETTINGS.items() if entry.get(name) not in _USUAL]
    told += [text for name, text in _LACKS.items() if not entry.get(name)]
    told += ["tells routed experts"] if entry.get("routing") else []
    return ["  " + ", ".join(told)] if told else []


def _passes(entry: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """What a trainer computes with, and how much at a time."""
    tokens, asked = entry.get("micro_batch_tokens", 0), int(status["asked_micro_batch_tokens"])
    lines = [
        f"  weights take {_mib(status, 'weight_bytes'):.0f} MiB of each rank, the last pass "
        f"{_mib(status, 'pass_bytes'):.0f}; micro-batches of up to {tokens} tokens"
        f"{f' (started for {asked}, but memory was lacking)' if tokens < asked else ''}"
    ]
    if beyond := entry.get("one_rank_tokens"):
        lines.append(f"  all ranks together compute sequences in training of more than {beyond} tokens")
    return lines


def _mib(status: dict[str, Any], name: str) -> float:
    return int(status.get(name, 0)) / 2**20


def _trained(model: dict[str, Any]) -> str:
    return f"rank {model['lora_rank']}" if model["lora_rank"] else "all weights"


def _snapshot(snapshot: dict[str, Any]) -> str:
    return f"{snapshot['model_id']} version {snapshot['version']}"


def healthy(report: dict[str, Any]) -> bool:
    """Every process is alive and announced, and every service answers."""
    return (
        "error" not in report
        and bool(report["processes"])
        and not report.get("unannounced")
        and all(entry["alive"] for entry in report["processes"])
        and not any("error" in entry for entry in report["services"])
    )


def main(data: DataDir, redis_url: str | None, as_json: bool) -> int:
    """Prints the report; 0 when all is well, 3 when nothing runs, else 1."""
    report = asyncio.run(collect(data, redis_url or os.environ.get("TINSMITH_REDIS_URL")))
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else show(report))
    if healthy(report):
        return 0
    return 1 if report["processes"] else 3
