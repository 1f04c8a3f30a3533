"""Which layers of linear attention keep to their sequences, and how the library's kernels learn of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, is_flat, register
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.prefix.layout import TreeRun
from services.trainer.compute.recurrent import layers
from services.trainer.compute.recurrent.layers import CONVOLUTION, RULE, begin_anew, is_recurrent
from tests.unit.trainer.compute.architectures import HYBRID, config_of, random_model

SHORT = Sequences.of([5, 2, 1], "cpu")


def module_of(model_type: str) -> Any:
    family = model_type.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def layer_of(model_type: str) -> Any:
    """The class of its linear attention."""
    (found,) = (
        each for each in vars(module_of(model_type)).values() if str(each).endswith("GatedDeltaNet'>")
    )
    return found


def flat(model_type: str, **settings: Any) -> bool:
    config = config_of(model_type, {**HYBRID[model_type], **settings})
    return is_flat(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.parametrize("model_type", HYBRID)
@pytest.mark.parametrize("name", [CONVOLUTION, RULE])
def test_a_library_without_a_function_computes_one_sequence_at_a_time(
    model_type: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flat(model_type)
    monkeypatch.delattr(module_of(model_type), name)
    assert not flat(model_type)


@pytest.mark.parametrize("model_type", HYBRID)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        (CONVOLUTION, lambda x, weight, bias=None, activation=None, **_: x * weight[None, :, :1]),
        (RULE, lambda query, key, value, g, beta, **_: (value * beta[..., None], None)),
        (RULE, lambda query, key, value, decay, rate, **_: (value, None)),
    ],
    ids=["another convolution", "another rule", "other names"],
)
def test_a_library_that_computes_otherwise_computes_one_sequence_at_a_time(
    model_type: str, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of(model_type), name, other)
    assert not flat(model_type)


@pytest.mark.parametrize("model_type", HYBRID)
def test_a_layer_that_hands_on_no_sequences_computes_one_at_a_time(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, own = layer_of(model_type), layer_of(model_type).forward
    monkeypatch.setattr(kind, "forward", lambda self, x, sequences=None, **options: own(self, x, **options))
    assert not flat(model_type)


@pytest.mark.parametrize("model_type", HYBRID)
def test_a_layer_that_looks_at_other_tokens_too_computes_one_sequence_at_a_time(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sys.modules[layer_of(model_type).__module__]
    mask = source.apply_mask_to_padding_states
    monkeypatch.setattr(
        source, "apply_mask_to_padding_states", lambda x, seen: mask(x + 0.1 * x.roll(1, dims=1), seen)
    )
    assert not flat(model_type)


def test_linear_attention_of_a_family_that_is_not_known_computes_one_sequence_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_LAYERS", {})
    assert not any(map(flat, HYBRID))


def test_a_kind_of_layer_beside_that_is_not_known_is_enough() -> None:
    assert not flat("qwen3_next", layer_types=["linear_attention", "chunked_attention"])


def test_trying_draws_nothing() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert flat("qwen3_next")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("model_type", HYBRID)
def test_nothing_but_the_model_itself_is_changed(model_type: str) -> None:
    config, source, kind = (
        config_of(model_type, HYBRID[model_type]),
        module_of(model_type),
        layer_of(model_type),
    )
    convolve, rule, forward = getattr(source, CONVOLUTION), getattr(source, RULE), kind.forward
    model = random_model(config, "eager")
    tokens = torch.arange(8)[None]
    expected = model(tokens, use_cache=False).logits
    begin_anew(model)
    changed = [module for module in model.modules() if "forward" in vars(module)]
    assert [type(module) for module in changed] == [kind] and all(map(is_recurrent, changed))
    assert getattr(source, CONVOLUTION) is convolve and getattr(source, RULE) is rule
    assert kind.forward is forward
    # Without sequences it is the library's own, to the last bit.
    assert torch.equal(model(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("model_type", HYBRID)
def test_a_block_that_computes_again_is_given_its_sequences_again(model_type: str) -> None:
    register()
    model = random_model(config_of(model_type, HYBRID[model_type]), FLAT_ATTENTION).requires_grad_(False)
    embedded = torch.randn(1, 8, 32).requires_grad_()
    gradients = []
    for _ in range(2):
        options = {"use_cache": False, "position_ids": SHORT.positions, "sequences": SHORT}
        made = model(inputs_embeds=embedded, **options).logits.square().sum()
        gradients += torch.autograd.grad(made, embedded)
        checkpoint_blocks(model)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_cache_is_refused() -> None:
    register()
    model = random_model(config_of("qwen3_next", HYBRID["qwen3_next"]), FLAT_ATTENTION)
    with pytest.raises(RuntimeError, match="a flat batch was given a state"):
        model(torch.ones(1, 8, dtype=torch.int64), use_cache=True, sequences=SHORT)


class Kernels(ModuleType):
    """A package with kernels that note what they are given, as the library finds it."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.called: list[dict[str, Any]] = []
        monkeypatch.setitem(sys.modules, name, self)

    def function(self, name: str, kernel: Callable[..., Any]) -> Any:
        """The library's function where the kernel is installed under its name."""
        setattr(self, name, kernel)
        return use_kernel_func_from_hub_with_fallback(name, self.__name__)(lambda *_: None)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: None = None, seq_idx: Any = None, activation: Any = None
    ) -> Tensor:
        self.called.append({"x": x, "seq_idx": seq_idx, "activation": activation})
        return x

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None,
    ) -> Any:
        self.called.append({"normed": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens})
        return v, None

    def mix(self, x: Tensor, weight: Tensor, bias: None = None, activation: Any = None) -> Tensor:
        self.called.append({"x": x})
        return x


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels("one_with_kernels", monkeypatch)


X, WEIGHT = torch.empty(1, 6, 8, device="meta"), torch.empty(6, 4, device="meta")
"""On no CPU."""


def test_a_kernel_of_the_convolution_is_told_which_sequence_each_token_is_of(kernels: Kernels) -> None:
    library = kernels.function(CONVOLUTION, kernels.convolve)
    layers._convolved(library, X, WEIGHT, activation="silu", sequences=SHORT, use_cache=False)
    (given,) = kernels.called
    assert given["x"] is X and given["activation"] == "silu"
    assert given["seq_idx"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 2]] and given["seq_idx"].dtype == torch.int32


def test_a_kernel_of_the_rule_is_told_where_sequences_begin(kernels: Kernels) -> None:
    library = kernels.function("chunk_gated_delta_rule", kernels.rule)
    given, numbers = [torch.empty(1, 8, 2, 4, device="meta")] * 3, torch.empty(1, 8, 2, device="meta")
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": None, "use_cache": False}
    layers._ruled(library, *given, g=numbers, beta=numbers, sequences=SHORT, **options)
    (told,) = kernels.called
    assert told["cu_seqlens"].tolist() == [0, 5, 7, 8] and told["normed"] is True


def test_of_what_sequences_share_a_kernel_knows_nothing_and_is_not_called(kernels: Kernels) -> None:
    shared = replace(SHORT, trees=[(0, TreeRun((5, 2), (-1, 0)))])
    library = kernels.function(CONVOLUTION, kernels.convolve)
    assert layers._convolved(library, X, WEIGHT, sequences=shared).shape == X.shape
    library = kernels.function("chunk_gated_delta_rule", kernels.rule)
    given, numbers = [torch.empty(1, 8, 2, 4, device="meta")] * 3, torch.empty(1, 8, 2, device="meta")
    made, _ = layers._ruled(library, *given, g=numbers, beta=numbers, sequences=shared)
    assert made.shape == given[2].shape and kernels.called == []


def test_a_kernel_that_knows_no_boundaries_is_not_called(kernels: Kernels) -> None:
    library = kernels.function(CONVOLUTION, kernels.mix)
    on_meta = replace(SHORT, positions=torch.empty(1, 8, dtype=torch.int64, device="meta"))
    assert layers._convolved(library, X, WEIGHT, sequences=on_meta).shape == X.shape
    assert kernels.called == []


def test_on_a_cpu_no_kernel_is_called(kernels: Kernels) -> None:
    library = kernels.function(CONVOLUTION, kernels.convolve)
    layers._convolved(library, torch.ones(1, 6, 8), torch.ones(6, 4), sequences=SHORT)
    assert kernels.called == []
