"""Adapters whose memory goes to the host and comes back."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import REGISTRY

from services.common.contract.errors import InvalidRequest
from services.common.process import failpoints
from services.trainer.compute.data import AdamSpec, LoraSpec
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.away import come_back, leave
from services.trainer.compute.lora.steps import step_adapters
from services.trainer.compute.memory import machine
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.host import Away, pieces
from services.trainer.compute.tenant import LoraTenant
from tests.unit.trainer.compute.gradients import give_gradient

pytestmark = pytest.mark.usefixtures("world_of_one")


def made(dtype: torch.dtype, role: str = "policy") -> LoraTenant:
    adapter = Adapter(LoraSpec(2, seed=0, role=role), {"lm_head": LinearShape(8, 16)}, "m", "cpu", 8, dtype)  # type: ignore[arg-type]
    return LoraTenant(adapter, FlatBuffers())


def on_device(tenant: LoraTenant) -> int:
    tensors = [*tenant.adapter.tensors(), *tenant._optimizer.moments.values()]
    tensors += [] if tenant._total is None else [tenant._total]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_what_was_away_goes_on_with_every_bit_its_gradient_included(dtype: torch.dtype, role: str) -> None:
    travels, stays = made(dtype, role), made(dtype, role)
    buffers = FlatBuffers()
    for number in range(3):
        for tenant in (travels, stays):
            give_gradient(tenant, 10 * number)
            give_gradient(tenant, 10 * number + 1)
        travels_with = sum(tensor.nbytes for tensor in travels.tensors())
        assert leave(travels, "cpu")
        assert travels.away is not None and on_device(travels) == 0
        assert come_back(travels, "cpu")
        assert travels.away is None and on_device(travels) == travels_with
        give_gradient(travels, 10 * number + 2)
        give_gradient(stays, 10 * number + 2)
        adam = AdamSpec(1e-2, weight_decay=0.1)
        assert step_adapters([(travels, adam)], buffers) == step_adapters([(stays, adam)], buffers)
        assert torch.equal(travels.adapter.low, stays.adapter.low)
    assert travels.snapshot(True).state() == stays.snapshot(True).state()


def test_without_memory_to_come_back_into_it_stays_whole_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, twin = made(torch.bfloat16), made(torch.bfloat16)
    give_gradient(tenant, 1)
    give_gradient(twin, 1)
    assert leave(tenant, "cpu")
    take_room, taken = Away.take_room, []

    def refused(away: Away) -> None:
        # Some of it was there already.
        take_room(away)
        taken.append(on_device(tenant))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Away, "take_room", refused)
        assert not come_back(tenant, "cpu")
    assert taken[0] > 0 and on_device(tenant) == 0
    assert come_back(tenant, "cpu")
    assert torch.equal(tenant.take_gradient(), twin.take_gradient())
    assert tenant.snapshot(True).state() == twin.snapshot(True).state()


def test_a_failpoint_stands_for_a_device_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = made(torch.float32)
    assert leave(tenant, "cpu")

    def full(point: str) -> None:
        assert point == "trainer.before_return"
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", full)
        assert not come_back(tenant, "cpu")
    assert tenant.away is not None and on_device(tenant) == 0


def test_a_device_that_fails_meanwhile_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = made(torch.float32)
    assert leave(tenant, "cpu")

    def fails(away: Away) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Away, "take_room", fails)
    with pytest.raises(torch.AcceleratorError):
        come_back(tenant, "cpu")


def test_a_host_without_memory_leaves_it_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = made(torch.float32)

    def refused(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    before = on_device(tenant)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", refused)
        before_refused = REGISTRY.get_sample_value("tinsmith_adapter_moves_refused_total") or 0.0
        for _ in range(5):
            assert not leave(tenant, "cpu")
    assert REGISTRY.get_sample_value("tinsmith_adapter_moves_refused_total") == before_refused + 5
    # Unless another test of this process had it.
    assert len([one for one in caplog.messages if "no memory for an adapter" in one]) <= 1
    assert tenant.away is None and on_device(tenant) == before


@pytest.mark.parametrize("nbytes", [0, 1, 2**20, 2**20 + 1, 3 * 2**20 + 12345, 1_234_567_890, 2**31])
def test_page_locked_pieces_are_powers_of_two_so_that_no_more_is_taken(nbytes: int) -> None:
    found = pieces(nbytes)
    assert sum(found) == nbytes
    taken = sum(1 << (size - 1).bit_length() for size in found)
    assert taken - nbytes < 2**20
    assert len(found) <= 13


def test_on_a_cpu_adapters_get_no_room_on_the_host_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "machine_memory", lambda: 64 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine.host_memory(None, "cpu") == 0
    assert machine.host_memory(None, "cuda:0") == 8 * 2**30
    assert machine.host_memory(0, "cuda:0") == 0
    assert machine.host_memory(32 * 2**30, "cpu") == 32 * 2**30
    with pytest.raises(InvalidRequest, match=r"--adapter-host-gib 33 .* 64.0 GiB for 2 ranks; give less"):
        machine.host_memory(33 * 2**30, "cuda:0")


def test_the_data_of_an_operation_has_its_part_of_the_host_which_on_a_cpu_is_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "machine_memory", lambda: 16 * 2**30)
    assert machine.operation_memory(139 * 2**30, "cuda:0") == 2 * 2**30
    assert machine.operation_memory(6 * 2**30, "cpu") == 6 * 2**30 // 4
