"""Two names of one base are told by where its weights come from."""

from __future__ import annotations

import pytest

from services.common.contract.base_weights import portable_name, weights_of


@pytest.mark.parametrize(
    ("path", "weights", "portable"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/hub/models--Qwen--Qwen3-0.6B/snapshots/ab12", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/data/models/mine", "/data/models/mine", "org/served"),
        ("", "", "org/served"),
    ],
)
def test_a_base_is_known_by_its_hub_id_or_its_directory(path: str, weights: str, portable: str) -> None:
    assert weights_of(path) == weights
    assert portable_name("org/served", path) == portable
