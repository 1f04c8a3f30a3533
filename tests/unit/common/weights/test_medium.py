"""Which medium a weight group uses."""

from __future__ import annotations

import pytest

from services.common.weights.medium import choose_medium


@pytest.mark.parametrize(
    ("gpus", "medium"),
    [
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-b", "GPU-c", "GPU-d"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", "GPU-b", "GPU-b"], "gloo"),
        (["GPU-a", ""], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_nccl_is_for_members_that_share_no_gpu(gpus: list[str], medium: str) -> None:
    assert choose_medium(gpus) == medium
