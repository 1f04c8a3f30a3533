"""Ranks wait equally long for each other in all groups that they have."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from services.trainer.compute import exchange
from services.trainer.compute.engine import Engine

pytestmark = pytest.mark.heavy


def timeouts() -> list[timedelta]:
    """That of the world, and that of the group in which DeepSpeed reduces and spreads."""
    from deepspeed.utils import groups

    found = [dist.group.WORLD, groups._get_data_parallel_group()]
    assert found[0] is not found[1]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in found]


def test_ranks_wait_in_deepspeeds_own_group_as_long_as_in_the_world(engine: Engine) -> None:
    assert timeouts() == [exchange.COLLECTIVE_TIMEOUT] * 2
    with exchange.patience(60):
        assert timeouts() == [exchange.COLLECTIVE_TIMEOUT + timedelta(seconds=60)] * 2
    assert timeouts() == [exchange.COLLECTIVE_TIMEOUT] * 2
