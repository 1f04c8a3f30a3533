"""Puts the parts of a sampler together: the one place that decides who is given what.

Invariant: no part makes another or looks for one; what is not passed here is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.process import rpc
from services.common.process.crashes import CrashLedger
from services.common.state.registry import ServiceRecord
from services.common.storage.data_dir import DataDir
from services.sampler import convert
from services.sampler.config import GIB, SamplerConfig
from services.sampler.engine.engine import Engine
from services.sampler.requests.admission import Admission, Capacity
from services.sampler.requests.generations import Generations
from services.sampler.requests.samples import Samples
from services.sampler.requests.suspects import Suspects
from services.sampler.service import SamplerService
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import Snapshots
from services.sampler.snapshots.staging import Staging


@dataclass(frozen=True)
class Parts:
    """What a replica starts and ends."""

    full: FullSnapshots
    generations: Generations[convert.Answer]
    suspects: Suspects
    service: SamplerService


def build(config: SamplerConfig, engine: Engine) -> Parts:
    """The parts around an engine that stands. Must be called in the loop that uses it."""
    data_dir = DataDir(config.data_dir)
    staging = Staging(int(config.full_snapshot_cache_gib * GIB), engine.workers)
    full = FullSnapshots(engine.weights, data_dir, staging)
    # Workers of one stage have at most all of an adapter each, those of another the rest.
    copies = config.tensor_parallel_size
    residency = Residency(int(config.snapshot_cache_gib * GIB), engine.first_adapter_id, copies)
    slots = AdapterSlots(config.max_loras)
    snapshots = Snapshots(engine, data_dir, residency, slots, full, engine.adapts, engine.full_models)
    admission = Admission(_capacity(engine))
    ledger = CrashLedger[str](data_dir.run / f"{config.id}.executing", str, "sampler")
    suspects = Suspects(ledger, lambda: engine.dead)
    samples = Samples(engine, snapshots, admission, suspects)
    generations = Generations[convert.Answer](lambda answer: answer.bytes_to_keep)
    service = SamplerService(engine, generations, samples, admission, snapshots)
    return Parts(full, generations, suspects, service)


def record(config: SamplerConfig, engine: Engine, port: int) -> ServiceRecord:
    """What the replica tells gateways and trainers about itself."""
    return ServiceRecord(
        kind="sampler",
        id=config.id,
        address=rpc.address(config.advertise_host, port),
        base_model=config.base_model,
        model_path=config.model_path,
        arch=engine.arch,
        vocab_size=engine.limits.vocab_size,
        context_length=engine.limits.context_length,
        device=engine.device,
        dtype=engine.dtype,
        world_size=engine.workers,
        max_lora_rank=config.max_lora_rank,
        max_sequences=engine.limits.max_sequences,
        adapts=engine.adapts,
        full_models=engine.full_models,
        routing=engine.limits.routing,
        queued_sequences=_capacity(engine).queued,
        kv_tokens=engine.kv_tokens,
        batched_tokens=engine.batched_tokens,
        adapter_slots=config.max_loras if engine.adapts else 0,
        kv_cache_dtype=config.kv_cache_dtype,
        head_dtype=config.head_dtype,
        quantization=engine.quantization,
        model_runner=engine.model_runner,
        pipeline_stages=config.pipeline_parallel_size,
        speculative_ngram_tokens=config.speculative_ngram_tokens,
        gpus=engine.gpus,
    )


def _capacity(engine: Engine) -> Capacity:
    return Capacity.of(engine.limits.max_sequences)
