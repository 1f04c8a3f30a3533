"""A model that does more than the trainer does with it is refused; what a trainer takes passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from services.common.contract.errors import InvalidRequest
from services.trainer.compute import exchange
from services.trainer.compute.attention import FLAT_ATTENTION, register
from services.trainer.compute.base_model import Scorer
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.split.asked import Asked
from services.trainer.compute.trial.own_forward import agree, check_own_forward
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of, random_model

DTYPES = [torch.float32, torch.bfloat16]
PLAIN = {"gemma2": {"final_logit_softcapping": None}}
"""What makes a family's logits plain."""
LOADED = sorted({*FLAT, *SINGLE} - {"llama4_text", "recurrent_gemma"})


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)


def settings_of(model_type: str) -> dict[str, Any]:
    return {**(FLAT.get(model_type) or SINGLE.get(model_type) or {}), **PLAIN.get(model_type, {})}


def tried(model: Any, flat: bool) -> list[Asked]:
    scorer = Scorer(model, LoraRouter(), detached=False)
    return check_own_forward(
        model,
        lambda *given: scorer(*given)[0],
        model_path="/models/x",
        flat=flat,
        vocab_size=model.config.vocab_size,
        context_length=model.config.max_position_embeddings,
        device="cpu",
    )


def made(model_type: str, dtype: torch.dtype, **settings: Any) -> tuple[Any, bool]:
    register()
    flat = model_type in FLAT
    config = config_of(model_type, {**settings_of(model_type), **settings})
    return random_model(config, FLAT_ATTENTION if flat else "eager").to(dtype), flat


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", LOADED)
def test_every_family_comes_to_what_it_comes_to_by_itself(model_type: str, dtype: torch.dtype) -> None:
    model, flat = made(model_type, dtype)
    asked = tried(model, flat)
    assert len(asked) == (model.config.num_hidden_layers if flat else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.0195}),
        ("recurrent_gemma", {}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_what_changes_its_logits_is_refused(
    model_type: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    with pytest.raises(InvalidRequest, match=r"^/models/x: \w+ changes its logits after its output head"):
        tried(*made(model_type, dtype, **settings))


def test_a_cap_is_found_that_changes_logits_by_less_than_rounding() -> None:
    model, flat = made("gemma2", torch.bfloat16, final_logit_softcapping=30.0)
    for weights in model.parameters():
        nn.init.normal_(weights, std=0.02)
    with pytest.raises(InvalidRequest, match="changes its logits"):
        tried(model, flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_does_something_to_embeddings_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidRequest, match="comes to other log-probabilities by itself than the trainer"):
        tried(*made("falcon_h1", dtype, embedding_multiplier=5.65))


def test_what_chooses_experts_by_tokens_that_it_is_not_given_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="from embeddings alone: AttributeError: "):
        tried(*made("deepseek_v4", torch.float32))


def test_the_decoder_of_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="from embeddings alone: NotImplementedError: "):
        tried(*made("bart", torch.float32, d_model=32, decoder_attention_heads=4, decoder_layers=1))


def test_a_failure_that_may_be_the_machines_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, flat = made("llama", torch.float32)
    monkeypatch.setattr(model.model, "forward", _broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tried(model, flat)


def _broken(**_: Any) -> None:
    raise RuntimeError("the device is gone")


def test_what_comes_to_no_numbers_is_refused() -> None:
    model, flat = made("llama", torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(InvalidRequest, match="comes to logits that are not finite"):
        tried(model, flat)


def test_other_ranks_findings_are_every_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "services.trainer.compute.trial.own_forward.any_rank", lambda flags, device: [False, False, True]
    )
    with pytest.raises(InvalidRequest, match="comes to other log-probabilities"):
        tried(*made("llama", torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_all_alike_may_be_off_by_the_last_bit(dtype: torch.dtype) -> None:
    """As of a model whose weights are all zero, where a sum of exponentials and its logarithm are of another
    kernel than a softmax."""
    logits, targets = torch.zeros(4, 151_936), torch.arange(8)
    expected = logits.log_softmax(-1)[:, targets]
    assert agree(expected.nextafter(torch.tensor(0.0)), logits, targets, dtype)
    assert not agree(expected + 1e-4, logits, targets, dtype)
