"""An adapter's share of the ranks, and the gradients of its operations."""

from __future__ import annotations

import pytest
import torch

from services.trainer.compute.data import Failure, LoraSpec
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.tenant import LoraTenant

FULL = Failure("server", "out_of_memory", "it does not fit")


@pytest.fixture
def tenant() -> LoraTenant:
    adapter = Adapter(LoraSpec(2, seed=0), {"lm_head": LinearShape(8, 16)}, "m", "cpu", 8)
    return LoraTenant(adapter, FlatBuffers())


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


def test_why_an_operation_failed_is_known_until_it_is_complete(tenant: LoraTenant) -> None:
    failure = Failure("user", "bad", "it failed")
    for seq_id in (3, 4):
        tenant.fail(seq_id, failure)
        tenant.close_before(seq_id)
    assert tenant.failure(3) is None and tenant.failure(4) is failure


def test_the_gradient_of_an_operation_counts_once_something_was_added(tenant: LoraTenant) -> None:
    for seq_id, value in ((1, torch.nan), (2, 2.0), (3, torch.nan), (4, 5.0)):
        tenant.begin(seq_id)
        gradient, fresh = tenant.gradient(seq_id)
        assert fresh
        gradient.fill_(value)
        if seq_id % 2 == 0:
            tenant.note_added(seq_id)
            assert tenant.gradient(seq_id)[1] is False
    assert tenant.has_gradient
    assert (tenant.take_gradient() == 7).all()


def test_a_rank_that_computed_nothing_has_a_gradient_of_zeros(tenant: LoraTenant) -> None:
    stale = torch.full((tenant.adapter.part.padded,), torch.nan)
    tenant._buffers.give(stale)
    tenant.begin(1)
    taken = tenant.take_gradient()
    assert taken.data_ptr() == stale.data_ptr()
    assert not taken.any()


def test_what_fills_a_gradient_up_for_other_ranks_is_zero() -> None:
    adapter = Adapter(LoraSpec(3, seed=0), {"lm_head": LinearShape(8, 17)}, "m", "cpu", 8, ranks=2, rank=0)
    tenant = LoraTenant(adapter, FlatBuffers())
    size, padded = adapter.part.size, adapter.part.padded
    assert size < padded
    tenant._buffers.give(torch.full((padded,), torch.nan))
    tenant.begin(1)
    tenant.gradient(1)[0].fill_(1.0)
    tenant.note_added(1)
    taken = tenant.take_gradient()
    assert (taken[:size] == 1).all() and not taken[size:].any()
