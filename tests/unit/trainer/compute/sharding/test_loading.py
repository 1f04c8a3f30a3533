"""Which part of a model's files each rank takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from services.trainer.compute.sharding import loading
from services.trainer.compute.sharding.loading import layers, own_part


def test_what_a_conversion_may_put_together_is_read_together() -> None:
    names = [
        "lm_head.weight",
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.10.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
    ]
    assert list(layers(names)) == [
        ["lm_head.weight"],
        [names[1], names[3], names[5]],
        [names[2]],
        ["model.embed_tokens.weight"],
    ]


def test_ranks_parts_are_the_weight_and_what_fills_them_up() -> None:
    whole = torch.arange(10, dtype=torch.float32).view(2, 5)
    parts = [torch.full((4,), -1, dtype=torch.bfloat16) for _ in range(4)]
    for rank, part in enumerate(parts):
        own_part(whole, part, rank)
    assert torch.cat(parts).tolist() == [*range(10), *[-1] * 6]


def test_ranks_meet_when_all_have_read_and_wait_as_long_as_files_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(4, 100)
    model.base_model_prefix = "model"  # type: ignore[assignment]
    done: list[object] = []

    def take(name: str, weight: object, whole: torch.Tensor) -> list[str]:
        done.append(name)
        return []

    @contextmanager
    def patience(seconds: float) -> Iterator[None]:
        done.append(seconds)
        yield
        done.append("over")

    for weight in model.parameters():
        weight.ds_tensor = weight.data  # type: ignore[attr-defined]
    monkeypatch.setattr(loading, "_take", take)
    monkeypatch.setattr(loading, "patience", patience)
    monkeypatch.setattr(loading, "meet", done.append)
    in_files = set[str]()
    assert loading._load(in_files, model, dict(model.state_dict())) == ([], set())
    assert in_files == {"weight", "bias"}
    assert done == ["weight", "bias", 4 * 500 / 50e6, "cpu", "over"]
