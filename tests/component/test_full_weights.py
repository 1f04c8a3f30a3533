"""What vLLM's loader makes of weights, on a small module instead of an engine: tried, and replaced."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from services.common.contract.errors import InvalidRequest
from services.sampler.worker import full_weights

pytestmark = pytest.mark.heavy


class Model(torch.nn.Module):
    """Loads as vLLM's models do; `reports` as some of them do not."""

    def __init__(self, reports: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(4, 3)
        self.reports = reports

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            parameter: Any = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded if self.reports else None


def worker(reports: bool = True) -> SimpleNamespace:
    model = Model(reports)
    record_metadata_for_reloading(model)
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        device=torch.device("cpu"),
        vllm_config=VllmConfig(device_config=DeviceConfig("cpu")),
        model=model,
    )


def bits(model: torch.nn.Module) -> dict[str, tuple[int, list[float]]]:
    """Where each parameter lies and what it is."""
    return {name: (p.data_ptr(), p.flatten().tolist()) for name, p in model.named_parameters()}


def others(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reports", [True, False])
def test_weights_that_fit_pass_and_nothing_is_replaced_before_they_are_loaded(reports: bool) -> None:
    mine = worker(reports)
    before, wanted = bits(mine.model), others(mine.model)
    for _ in range(2):
        full_weights.check(mine, wanted.items())
        assert bits(mine.model) == before


@pytest.mark.parametrize("reports", [True, False])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_replaced(reports: bool) -> None:
    mine = worker(reports)
    before, whole = bits(mine.model), others(mine.model)
    wrong = {
        "do not fit": whole | {"down.weight": torch.zeros(4, 3)},
        "do not fit this model: 'side.weight'": whole | {"side.weight": torch.zeros(3)},
        "lack down": {name: tensor for name, tensor in whole.items() if "down" not in name},
        r"lack .*in all": {},
    }
    for hint, tensors in wrong.items():
        with pytest.raises(InvalidRequest, match=hint):
            full_weights.check(mine, tensors.items())
        assert bits(mine.model) == before, hint
    full_weights.check(mine, whole.items())
