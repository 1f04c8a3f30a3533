"""A flat batch computes what the library computes for each sequence alone, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, is_flat, register
from services.trainer.compute.base_model import Scorer
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears, hook_adapters
from tests.unit.trainer.compute.architectures import FLAT, SINGLE, config_of, random_model

# Two that are computed at once, one as long as a window, longer ones, and a single token.
LENGTHS = [7, 7, 5, 11, 1, 3]


@pytest.mark.parametrize("model_type", FLAT)
def test_sequences_end_to_end_are_computed_as_if_each_were_alone(model_type: str) -> None:
    register()
    config = config_of(model_type, FLAT[model_type])
    assert is_flat(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    flat, plain = random_model(config, FLAT_ATTENTION), random_model(config, "eager")
    plain.load_state_dict(flat.state_dict())
    assert flat.config._attn_implementation == FLAT_ATTENTION
    tokens = torch.randint(1, 64, (1, sum(LENGTHS)))
    sequences = Sequences.of(LENGTHS, "cpu")

    options: dict[str, Any] = {"position_ids": sequences.positions, "sequences": sequences}
    embedded = flat.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = flat(inputs_embeds=embedded, use_cache=False, **options).logits[0]
    weights = torch.randn(logits.shape)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), embedded)

    alone = embedded.detach().clone().requires_grad_()
    parts = [plain(inputs_embeds=part, use_cache=False).logits[0] for part in alone.split(LENGTHS, dim=1)]
    torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-4, atol=1e-5)
    (expected,) = torch.autograd.grad((torch.cat(parts) * weights).sum(), alone)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", SINGLE)
def test_what_carries_a_state_or_looks_at_the_whole_batch_computes_one_sequence_at_a_time(
    model_type: str,
) -> None:
    config = config_of(model_type, SINGLE[model_type])
    assert not is_flat(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_a_model_that_computes_one_sequence_at_a_time_is_given_no_more() -> None:
    model = random_model(config_of("falcon_h1", SINGLE["falcon_h1"]), "eager")
    tokens = torch.ones(1, 3, dtype=torch.int64)
    scorer, targets = Scorer(model, LoraRouter(), detached=False), Targets(tokens[0], ((3, 1),))
    with pytest.raises(RuntimeError, match="FalconH1Model computes one sequence at a time"):
        scorer(tokens, targets, Sequences.of([2, 1], "cpu"))


def test_a_shared_expert_has_each_tenants_adapter() -> None:
    register()
    model = random_model(config_of("qwen2_moe", FLAT["qwen2_moe"]), FLAT_ATTENTION).requires_grad_(False)
    router, linears = LoraRouter(), find_linears(model)
    assert any("shared_expert." in name for name in linears)
    hook_adapters(model, router)
    scorer, tokens = Scorer(model, router, detached=False), torch.randint(1, 64, (1, 16))
    spec = LoraSpec(4)
    adapters = [Adapter(spec, select_targets(linears, spec), name, "cpu", 32) for name in ("a", "b")]
    for each in adapters:
        each.flat.normal_(std=0.1)

    def trained(which: list[Adapter], tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        lengths = [9, 7][: len(which)] if len(which) > 1 else [tokens.shape[1]]
        gradients = [torch.zeros_like(each.flat) for each in which]
        targets = Targets(tokens[0], ((tokens.shape[1], 1),))
        with router.route([Segment(*each) for each in zip(lengths, which, gradients, strict=True)]):
            logprobs, _ = scorer(tokens, targets, Sequences.of(lengths, "cpu"))
            logprobs.sum().backward()
        return logprobs.detach(), gradients

    logprobs, gradients = trained(adapters, tokens)
    alone = [trained([each], part) for each, part in zip(adapters, tokens.split([9, 7], dim=1), strict=True)]
    torch.testing.assert_close(logprobs, torch.cat([part for part, _ in alone]), rtol=1e-4, atol=1e-4)
    for together, (_, (apart,)) in zip(gradients, alone, strict=True):
        assert apart.any()
        torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-3)


def test_sequences_know_where_they_begin_and_where_each_token_stands() -> None:
    sequences = Sequences.of([3, 1, 2], "cpu")
    assert sequences.offsets.tolist() == [0, 3, 4, 6]
    assert sequences.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
