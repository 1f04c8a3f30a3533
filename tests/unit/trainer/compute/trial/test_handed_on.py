"""An architecture whose attention is not told how a flat batch is cut computes one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from services.trainer.compute.attention import is_flat
from services.trainer.compute.base_model import computes_flat, load_model
from services.trainer.compute.trial.handed_on import hands_on
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model


@pytest.mark.parametrize("model_type", FLAT)
def test_every_family_hands_on_what_it_is_given(model_type: str) -> None:
    config = config_of(model_type, FLAT[model_type])
    assert hands_on(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_one_whose_layers_leave_it_out_computes_one_sequence_at_a_time(tmp_path: Path) -> None:
    config = config_of("nemotron", {})
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert is_flat(kind, config) and not hands_on(kind, config)
    random_model(config, "eager").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.float32, None)
    assert not computes_flat(model)
    assert model(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_to_try_it_draws_no_number_and_changes_no_configuration() -> None:
    config = config_of("llama", {})
    before, state = config.to_dict(), torch.get_rng_state()
    assert hands_on(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
