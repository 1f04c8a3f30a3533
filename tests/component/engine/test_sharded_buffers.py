"""Buffers of a model in bfloat16 are under ZeRO-3 what they are without: DeepSpeed rounds all that a model's
constructors make, also what no file has, as rotary frequencies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.worlds.sharding import Sharding
from services.trainer.compute.base_model import _deepspeed_config, init_distributed, load_model
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of, random_model

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("one_rank")]

# llama4_text stands for pictures too in its files, and is not read from these alone.
SERVED = {**FLAT, **{name: settings for name, settings in SINGLE.items() if name != "llama4_text"}}


@pytest.mark.parametrize("name", SERVED)
def test_every_architecture_keeps_them(name: str, tmp_path: Path) -> None:
    random_model(config_of(name, SERVED[name]), "eager").save_pretrained(tmp_path)
    init_distributed("cpu")
    expected = dict(load_model(str(tmp_path), torch.bfloat16, None, False).named_buffers())
    config = _deepspeed_config(3, torch.bfloat16, Sharding())
    found = dict(load_model(str(tmp_path), torch.bfloat16, config, False).named_buffers())
    assert {each: held.dtype for each, held in found.items()} == {
        each: held.dtype for each, held in expected.items()
    }
    assert torch.float32 in {held.dtype for held in found.values()}
    assert all(torch.equal(held, expected[each]) for each, held in found.items())
