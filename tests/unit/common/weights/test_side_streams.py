"""Streams beside those that compute, without a device: what stands for one is told apart and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.common.weights import side_streams
from services.common.weights.side_streams import side_stream

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _none_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(side_streams, "_unused", {})
    yield


def make(device: torch.device) -> Any:
    return device, object()


def test_a_stream_is_used_again_by_one_user_at_a_time() -> None:
    with side_stream(FIRST, make) as one, side_stream(FIRST, make) as other:
        assert one is not other
    with side_stream(FIRST, make) as again, side_stream(FIRST, make) as once_more:
        assert {id(again), id(once_more)} == {id(one), id(other)}


def test_each_device_has_its_own() -> None:
    for device in (FIRST, SECOND, FIRST):
        with side_stream(device, make) as stream:
            assert stream[0] == device  # type: ignore[index]


def test_a_stream_is_given_back_by_work_that_fails() -> None:
    with pytest.raises(RuntimeError), side_stream(FIRST, make) as one:
        raise RuntimeError("no memory")
    with side_stream(FIRST, make) as again:
        assert again is one
