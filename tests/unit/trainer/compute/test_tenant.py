"""An adapter's share of the ranks."""

from __future__ import annotations

import pytest

from services.trainer.compute.data import Failure, LoraSpec
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.optimizer import FlatBuffers
from services.trainer.compute.tenant import LoraTenant

FULL = Failure("server", "out_of_memory", "it does not fit")


@pytest.fixture
def tenant() -> LoraTenant:
    adapter = Adapter(LoraSpec(2, seed=0), {"lm_head": LinearShape(8, 16)}, "m", "cpu", 8)
    return LoraTenant(adapter, FlatBuffers("cpu"))


def dealt(tenant: LoraTenant, seq_id: int, *sizes: int) -> list[list[int]]:
    tenant.begin(seq_id)
    found = tenant.deal(sizes, [seq_id] * len(sizes), 3)
    tenant.close_before(seq_id)
    return found


def test_a_pass_goes_on_where_the_last_one_ended(tenant: LoraTenant) -> None:
    assert dealt(tenant, 1, 10) == [[0], [], []]
    assert dealt(tenant, 2, 10, 10) == [[], [0], [1]]


def test_what_comes_after_a_failed_operation_is_dealt_as_if_it_had_never_been(tenant: LoraTenant) -> None:
    dealt(tenant, 1, 10)
    dealt(tenant, 2, 7, 9)
    dealt(tenant, 2, 30)
    tenant.fail(2, FULL)
    assert tenant.loads == [10, 0, 0]
    assert dealt(tenant, 3, 10, 10) == [[], [0], [1]]


def test_a_failed_operation_takes_nothing_of_others_with_it(tenant: LoraTenant) -> None:
    for seq_id in (1, 2):
        tenant.begin(seq_id)
    tenant.deal([5, 6, 7], [1, 2, 2], 3)
    tenant.fail(2, FULL)
    assert tenant.loads == [5, 0, 0]
    tenant.fail(2, FULL)
    assert tenant.loads == [5, 0, 0]
