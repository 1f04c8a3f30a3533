"""What every rank of a world plays for test_adapter_parts: adapters that step, are saved and are loaded."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from services.common.contract.tensors import HostTensor, sharing
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState
from services.trainer.compute.lora import away, parts
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.steps import step_adapters
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.compute.memory.host import Away
from services.trainer.compute.optimizer import AdapterOptimizer
from services.trainer.compute.tenant import LoraTenant
from tests.component.engine.data import on_all_ranks
from tests.component.engine.process import run_ranks

HIDDEN = 8 * 21
TARGETS = {
    "layers.0.self_attn.q_proj": LinearShape(HIDDEN, 8 * 37),
    "layers.0.mlp.up": LinearShape(HIDDEN, 8 * 5),
}
SPECS = {
    "a": LoraSpec(3, 1),
    "b": LoraSpec(1, 2),
    "critic": LoraSpec(5, 3, role="critic"),
}
TINY = LoraSpec(1, 4)
"""Of fewer elements than all ranks but the first would have to have any."""

ADAMS = [
    AdamSpec(1e-2, weight_decay=0.1, grad_clip_norm=3.0),
    AdamSpec(3e-3, beta1=0.5, eps=1e-3),
    AdamSpec(1e-2, weight_decay=0.1, grad_clip_norm=1e6),
]
"""Of a step each."""

TIMEOUT = timedelta(seconds=120)


class Report(msgspec.Struct):
    """Of one rank.

    Attributes:
        stepped: by name, after all steps; `resumed`: the same of models that were loaded before the last one.
        alone: as `stepped`, where no two models stepped together and none was on the host between.
        refused: after a gradient that was not finite on the last rank.
        computes: bits of what passes compute with, `heads` of value heads; after all steps.
        moments, masters: bytes that this rank holds, of the model that has most.
        whole: bytes of one of that model's moments or masters, if it were whole.
        metrics: of the steps, one model after the other.
        gathers: whether snapshots with and without moments are made of other ranks' parts.
    """

    stepped: dict[str, ModelState] = {}
    resumed: dict[str, ModelState] = {}
    alone: dict[str, ModelState] = {}
    refused: dict[str, ModelState] = {}
    computes: dict[str, HostTensor] = {}
    heads: dict[str, HostTensor] = {}
    moments: int = 0
    masters: int = 0
    whole: int = 0
    metrics: list[list[dict[str, float]]] = []
    gathers: tuple[bool, bool] = (False, False)


def bits(values: torch.Tensor) -> HostTensor:
    return sharing(values.detach().float().clone().numpy())


def made(spec: LoraSpec, dtype: torch.dtype, buffers: FlatBuffers) -> LoraTenant:
    targets = {"layers.0.self_attn.q_proj": LinearShape(7, 2)} if spec is TINY else TARGETS
    ranks, rank = dist.get_world_size(), dist.get_rank()
    adapter = Adapter(spec, targets, "m", "cpu", HIDDEN, dtype, ranks, rank)
    # Nothing but zeros would hide what is added to the wrong place; a head of negative zeros stays one.
    flat = torch.randn(adapter.part.size, generator=torch.Generator().manual_seed(spec.rank))
    flat[flat.numel() - adapter.value_head :] = -0.0
    adapter.load(flat)
    return LoraTenant(adapter, buffers)


def give_gradient(tenant: LoraTenant, seed: int) -> None:
    """Of whole numbers, whose sums over ranks have one value in whatever order. Some steps are such that rank
    1 computed nothing, and a value head gets a gradient in the last one only."""
    size, ranks, rank = tenant.adapter.part.size, dist.get_world_size(), dist.get_rank()
    shares = np.random.default_rng([seed, size]).integers(-4, 5, (6, size)).astype(np.float32)
    if seed == 3:
        shares[[1, 3, 4, 5]] = 0
    if seed < 5:
        shares[:, size - tenant.adapter.value_head :] = 0
    tenant.begin(seed)
    if seed != 3 or rank != 1:
        gradient, _ = tenant.gradient(seed)
        gradient.copy_(torch.from_numpy(shares[rank::ranks].sum(0)))
        tenant.note_added(seed)


def travel(tenant: LoraTenant) -> None:
    """To the host and back, where the last rank has no memory for it at first."""
    assert away.leave(tenant, "cpu")
    held = [*tenant.adapter.tensors(), *tenant._optimizer.moments.values()]
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    take_room = Away.take_room
    if dist.get_rank() == dist.get_world_size() - 1:
        Away.take_room = refuse
    assert not away.come_back(tenant, "cpu")
    Away.take_room = take_room
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert away.come_back(tenant, "cpu")


def refuse(_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def step(
    tenants: list[LoraTenant], number: int, buffers: FlatBuffers, *, travelling: bool = False
) -> list[dict[str, float]]:
    for tenant in tenants:
        give_gradient(tenant, 2 * number + 1)
        if travelling:
            travel(tenant)
    found = step_adapters([(tenant, ADAMS[number]) for tenant in tenants], buffers)
    return [each for each in found if isinstance(each, dict)]


def lack_memory(tenants: dict[str, LoraTenant], buffers: FlatBuffers) -> None:
    """A step, and then a state, for which the last rank has no memory: on all of them nothing changes."""
    start = AdapterOptimizer.start
    if dist.get_rank() == dist.get_world_size() - 1:
        AdapterOptimizer.start = refuse
    for tenant in tenants.values():
        before = tenant.snapshot(True).state()
        tenant.begin(1)
        (found,) = step_adapters([(tenant, ADAMS[0])], buffers)
        assert isinstance(found, NoMemory)
        try:
            tenant.load_state(msgspec.structs.replace(on_all_ranks(before), step=9), optimizer=True)
        except NoMemory:
            assert tenant.has_gradient
        else:
            raise AssertionError("a state was loaded without memory")
        tenant.clear_gradient()
        assert tenant.snapshot(True).state() == before
    AdapterOptimizer.start = start


def scenario(dtype: torch.dtype) -> Report:
    report, buffers = Report(), FlatBuffers()
    specs = {**SPECS, "tiny": TINY}
    tenants = {name: made(spec, dtype, buffers) for name, spec in specs.items()}
    apart = {name: made(spec, dtype, buffers) for name, spec in specs.items()}
    saved: dict[str, ModelState] = {}
    for number in range(len(ADAMS)):
        if number == len(ADAMS) - 1:
            saved = {name: on_all_ranks(tenant.snapshot(True).state()) for name, tenant in tenants.items()}
        report.metrics.append(step(list(tenants.values()), number, buffers, travelling=True))
        if not number:
            report.heads["untrained"] = bits(tenants["critic"].adapter.value_weights)
        for tenant in apart.values():
            step([tenant], number, buffers)
    report.stepped = {name: tenant.snapshot(True).state() for name, tenant in tenants.items()}
    report.alone = {name: tenant.snapshot(True).state() for name, tenant in apart.items()}
    report.computes = {name: bits(tenant.adapter.low) for name, tenant in tenants.items()}
    report.heads["trained"] = bits(tenants["critic"].adapter.value_weights)

    resumed = {name: made(spec, dtype, buffers) for name, spec in specs.items()}
    for name, tenant in resumed.items():
        tenant.load_state(saved[name], optimizer=True)
    lack_memory(resumed, buffers)
    step(list(resumed.values()), len(ADAMS) - 1, buffers)
    report.resumed = {name: tenant.snapshot(True).state() for name, tenant in resumed.items()}

    overflowing = resumed["a"]
    overflowing.begin(99)
    gradient, _ = overflowing.gradient(99)
    gradient.zero_()
    overflowing.note_added(99)
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient[3] = torch.inf
    give_gradient(resumed["b"], 101)
    (refused, _) = step_adapters([(overflowing, ADAMS[0]), (resumed["b"], ADAMS[0])], buffers)
    assert isinstance(refused, FloatingPointError)
    report.refused = {"a": overflowing.snapshot(True).state()}

    critic = tenants["critic"]
    held = critic._optimizer.moments.values()
    report.moments = sum(moment.untyped_storage().nbytes() for moment in held)
    report.masters = critic.adapter.flat.untyped_storage().nbytes()
    report.whole = 4 * critic.adapter.part.size
    report.gathers = critic.gathers(True), critic.gathers(False)
    return report


def run_rank(directory: Path) -> None:
    # So that snapshots come in several pieces, and not all of one size.
    parts._AT_ONCE = 400
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        (directory / f"{name}-{rank}").write_bytes(msgspec.msgpack.encode(scenario(dtype)))
    dist.destroy_process_group()


def play(ranks: int, directory: Path) -> dict[str, list[Report]]:
    """What the ranks of a world report, by element type of the base model."""
    run_ranks(run_rank, ranks, directory, directory)
    return {
        name: [
            msgspec.msgpack.decode((directory / f"{name}-{rank}").read_bytes(), type=Report)
            for rank in range(ranks)
        ]
        for name in ("float32", "bfloat16")
    }
