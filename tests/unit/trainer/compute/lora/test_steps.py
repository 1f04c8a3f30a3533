"""A step of an adapter is taken whole or not at all, whatever memory there is for it."""

from __future__ import annotations

import pytest
import torch

from services.common.process import failpoints
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState
from services.trainer.compute.lora import steps
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.steps import scratch_room, step_adapters
from services.trainer.compute.memory.buffers import KEPT_BYTES, FlatBuffers
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.compute.optimizer import AdapterOptimizer
from services.trainer.compute.tenant import LoraTenant
from tests.unit.trainer.compute.gradients import give_gradient

ADAM = AdamSpec(1e-2, weight_decay=0.1)

pytestmark = pytest.mark.usefixtures("world_of_one")


def made(name: str) -> LoraTenant:
    adapter = Adapter(LoraSpec(2), {"lm_head": LinearShape(8, 16)}, name, "cpu", 8, torch.bfloat16)
    return LoraTenant(adapter, FlatBuffers())


def trained(*names: str) -> list[LoraTenant]:
    """Models with a gradient since their last step, which was none."""
    tenants = [made(name) for name in names]
    for number, tenant in enumerate(tenants):
        give_gradient(tenant, number + 1)
    return tenants


def is_step(found: object) -> bool:
    return isinstance(found, dict) and "update_norm" in found


def state(tenant: LoraTenant) -> ModelState:
    return tenant.snapshot(True).state()


class Device:
    """One that refuses memory for the moments of some models.

    Args:
        full_for: whose.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *full_for: LoraTenant) -> None:
        self.full_for = [tenant._optimizer for tenant in full_for]
        self.asked = 0
        start = AdapterOptimizer.start

        def refuses(optimizer: AdapterOptimizer) -> None:
            self.asked += 1
            start(optimizer)
            if optimizer in self.full_for:
                raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(AdapterOptimizer, "start", refuses)


@pytest.mark.parametrize(
    ("free", "room"),
    [(0, KEPT_BYTES), (-1, KEPT_BYTES), (16 * KEPT_BYTES, KEPT_BYTES), (64 * 2**30, 4 * 2**30)],
)
def test_scratch_of_steps_follows_what_is_free_of_a_device(free: int, room: int) -> None:
    assert scratch_room(free) == room
    # Moments of a first step and a gradient of zeros included, it stays within that.
    assert room == KEPT_BYTES or 4 * room <= free // 4


def test_as_many_step_at_once_as_have_room_for_their_scratch_and_at_least_one() -> None:
    tenants = [made(name) for name in "abcde"]
    each = 4 * tenants[0].adapter.part.padded
    due = [(tenant, ADAM) for tenant in tenants]

    def sizes(most: int) -> list[int]:
        found = [*steps._chunks(due, most)]
        assert [one for some in found for one in some] == due
        return [len(some) for some in found]

    assert sizes(5 * each) == [5]
    assert sizes(5 * each - 1) == [4, 1]
    assert sizes(2 * each) == [2, 2, 1]
    assert sizes(each - 1) == [1] * 5
    assert not [*steps._chunks([], each)]


def test_one_that_finds_no_memory_steps_alone_what_the_others_step_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenants, twins = trained("a", "b", "c"), trained("a", "b", "c")
    expected = step_adapters([(twin, ADAM) for twin in twins], FlatBuffers())
    before = state(tenants[1])
    device = Device(monkeypatch, tenants[1])
    found = step_adapters([(tenant, ADAM) for tenant in tenants], FlatBuffers())
    assert (found[0], found[2]) == (expected[0], expected[2])
    refused = found[1]
    assert isinstance(refused, NoMemory) and refused.code == "out_of_memory"
    assert "weights and gradient are as they were" in refused.message
    assert state(tenants[1]) == before and tenants[1].has_gradient
    assert not tenants[1]._optimizer.moments, "what it had taken of the memory is free again"

    device.full_for.clear()
    assert step_adapters([(tenants[1], ADAM)], FlatBuffers()) == [expected[1]]
    assert [state(tenant) for tenant in tenants] == [state(twin) for twin in twins]


def test_what_is_kept_for_later_makes_room_before_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (tenant,), (twin,) = trained("a"), trained("a")
    buffers = FlatBuffers()
    buffers.give(torch.empty(1000))
    points = []

    def full_at_first(point: str) -> None:
        points.append(point)
        if point == "trainer.before_step_memory" and points.count(point) == 1:
            raise torch.OutOfMemoryError(f"failpoint {point}: oom")

    monkeypatch.setattr(failpoints, "hit", full_at_first)
    assert all(map(is_step, step_adapters([(tenant, ADAM)], buffers)))
    assert points == ["trainer.before_step_memory"] * 2 + ["trainer.mid_step"]
    step_adapters([(twin, ADAM)], FlatBuffers())
    assert state(tenant) == state(twin)
    assert not any(each.numel() == 1000 for unused in buffers._unused.values() for each in unused)


def test_gradients_that_come_after_a_step_without_memory_are_added_to_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tenant,), (twin,) = trained("a"), trained("a")
    with monkeypatch.context() as patched:
        Device(patched, tenant)
        (refused,) = step_adapters([(tenant, ADAM)], FlatBuffers())
        assert isinstance(refused, NoMemory)
    for each in (tenant, twin):
        give_gradient(each, 9)
    assert step_adapters([(tenant, ADAM)], FlatBuffers()) == step_adapters([(twin, ADAM)], FlatBuffers())
    assert state(tenant) == state(twin)


def test_a_first_step_whose_gradient_is_not_finite_leaves_no_moments() -> None:
    tenant = made("a")
    tenant.begin(1)
    gradient, _ = tenant.gradient(1)
    gradient.fill_(torch.inf)
    tenant.note_added(1)
    (refused,) = step_adapters([(tenant, ADAM)], FlatBuffers())
    assert isinstance(refused, FloatingPointError)
    assert not tenant._optimizer.moments and not tenant.has_gradient


def test_a_state_that_finds_no_memory_changes_nothing_and_may_be_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (source,) = trained("source")
    step_adapters([(source, ADAM)], FlatBuffers())
    saved = state(source)
    (tenant,) = trained("a")
    before = state(tenant)
    with monkeypatch.context() as patched:
        Device(patched, tenant)
        with pytest.raises(NoMemory, match="was not loaded: nothing was changed"):
            tenant.load_state(saved, optimizer=True)
    assert state(tenant) == before and tenant.has_gradient
    tenant.load_state(saved, optimizer=True)
    assert state(tenant) == saved and not tenant.has_gradient
