"""The memory of what is in flight is divided, not multiplied."""

from dataclasses import asdict

import pytest

from services.gateway.access.body_budget import BodyBudget
from services.gateway.access.limits import MIB, Limits
from services.gateway.access.memory import DEFAULT_MIB, LEAST_MIB, RECEIVING_COPIES, Memory


@pytest.mark.parametrize("mib", [LEAST_MIB, 1000, DEFAULT_MIB])
def test_the_parts_are_no_more_than_the_whole(mib: int) -> None:
    memory = Memory.of(mib * MIB)
    parts = asdict(memory).values()
    assert min(parts) > 0
    assert sum(parts) <= mib * MIB
    most = Limits().grpc_message_bytes
    assert memory.largest_message >= most
    assert BodyBudget(memory).messages_at_once(most) * RECEIVING_COPIES * most <= memory.receiving


def test_by_default_there_is_room_for_the_largest_request() -> None:
    limits, budget = Limits(), BodyBudget(Memory.of())
    assert budget.largest >= limits.training_body_bytes
    assert budget.messages_at_once(limits.grpc_message_bytes) >= 4
