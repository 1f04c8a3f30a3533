"""Saved states for the unit tests of the trainer."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import LoraSpec, ModelState


def _array(*shape: int, fill: float) -> HostTensor:
    values = np.full(shape, fill, dtype="<f4")
    return HostTensor("float32", shape, values.tobytes())


@pytest.fixture
def model_state() -> ModelState:
    """A model with one adapted linear, after three steps."""
    adapter = {"lm_head.lora_A": _array(2, 8, fill=0.5), "lm_head.lora_B": _array(16, 2, fill=-1.25)}
    optimizer = {
        f"{name}.{moment}": _array(*array.shape, fill=0.125)
        for name, array in adapter.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return ModelState(LoraSpec(2, seed=1), adapter, optimizer, step=3)
