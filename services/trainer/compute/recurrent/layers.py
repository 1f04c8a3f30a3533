"""Layers of transformers' linear attention, each of whose sequences begins anew.

What connects tokens there are two functions of each architecture's module, a short convolution and the gated
delta rule, which its layer looks up by name. The layers of one model are given others under these names; the
module keeps its own. Where the library computes by a kernel that knows boundaries (`fla`, `causal_conv1d`,
which it takes where they are installed), that one goes on to compute, and is told of them, unless what
sequences begin with alike is computed once: of that they know nothing.

Invariant: they do that where nothing but the two connects a layer's tokens, which was seen by trying. Without
`sequences` a layer is the library's own.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from inspect import getclosurevars, unwrap
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from services.trainer.compute.kernels.rotations import calling
from services.trainer.compute.recurrent.chunks import LONGEST
from services.trainer.compute.recurrent.convolution import causal_convolution
from services.trainer.compute.recurrent.delta_rule import gated_delta_rule
from services.trainer.compute.split.asked import Asked
from services.trainer.compute.split.exchange import before
from services.trainer.order.prefixes import BLOCK

if TYPE_CHECKING:
    from services.trainer.compute.attention import Sequences, Split

log = logging.getLogger(__name__)

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"

_LAYERS = {
    "Qwen3NextForCausalLM": "Qwen3NextGatedDeltaNet",
    "Qwen3_5ForCausalLM": "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeGatedDeltaNet",
}
"""Their layers, of models whose attention and masks do with a flat batch what those do that say so."""


def begins_anew(model_class: Any, config: Any, tried: Sequences) -> bool:
    """Whether the layers of linear attention of an architecture can keep to their sequences, found by trying
    one: with small weights on a CPU it comes to what it comes to of each alone.

    Args:
        model_class: transformers' class of the causal language model.
        config: its text configuration, in which a layer is of linear attention.
        tried: sequences on a CPU.
    """
    name = model_class.__name__
    if name not in _LAYERS:
        return False
    why: object = "it comes to something else"
    try:
        kind = getattr(sys.modules[model_class.__module__], _LAYERS[name])
        if _same(_small(kind, config), tried):
            return True
    except Exception as error:
        # Whatever it lacked, it is another layer.
        why = error
    log.warning("%s computes one sequence at a time, as its linear attention is not as known: %s", name, why)
    return False


def begin_anew(model: nn.Module) -> None:
    """Has the layers of linear attention of a model keep to the sequences that they are given."""
    made: dict[FunctionType, FunctionType] = {}
    for module in model.modules():
        forward = _forward(type(module))
        if forward is None:
            continue
        if forward not in made:
            convolve, apply = (forward.__globals__[name] for name in (CONVOLUTION, RULE))
            made[forward] = _keeping(forward, convolve, apply)
        module.forward = MethodType(made[forward], module)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer of linear attention, as this one knows it."""
    return _forward(type(module)) is not None


def kept_bytes(layer: Any, item: int) -> float:
    """What a layer of linear attention keeps of each token until its backward pass, beside what goes into and
    comes out of its linears: what its convolution mixes, in elements of `item` bytes, and what its rule does,
    in float32 (`gated_delta_rule`), of all heads.

    Queries and keys are there as they came, at length 1 and decayed in two ways, values as they came and
    corrected, and both as the system's solutions; the state that a chunk finds, or that a piece leaves, which
    may be of a block of shared tokens; and of each token its row of five matrices of its chunk.
    """
    keys, values = layer.head_k_dim, layer.head_v_dim
    of_head = 8 * keys + 4 * values + keys * values / BLOCK + 5 * LONGEST
    return 3 * item * layer.conv_dim + 4 * layer.num_v_heads * of_head


def _forward(kind: type[nn.Module]) -> FunctionType | None:
    """What a layer of `_LAYERS` computes by, as it was written; None: it is none, or calls others."""
    forward = unwrap(kind.forward)
    if kind.__name__ not in _LAYERS.values() or not isinstance(forward, FunctionType):
        return None
    called = forward.__globals__.keys() & set(forward.__code__.co_names)
    return forward if {CONVOLUTION, RULE} <= called else None


def _keeping(
    forward: FunctionType, convolve: Callable[..., Tensor], apply: Callable[..., Any]
) -> FunctionType:
    """A layer's forward that keeps to sequences, beside what the library computes by."""
    return calling(forward, {CONVOLUTION: partial(_convolved, convolve), RULE: partial(_ruled, apply)})


def _small(kind: type[nn.Module], config: Any) -> nn.Module:
    """A layer with few weights, all of which matter."""
    config = copy.deepcopy(config)
    config.hidden_size = 8
    config.linear_num_key_heads, config.linear_num_value_heads = 1, 2
    config.linear_key_head_dim, config.linear_value_head_dim = 4, 6
    # What a trainer draws later does not depend on what was tried.
    with torch.random.fork_rng(devices=[]):
        layer = kind(config, list(config.layer_types).index("linear_attention")).float().eval()
    generator = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.5, generator=generator)
    return layer


@torch.no_grad()
def _same(layer: nn.Module, tried: Sequences) -> bool:
    forward = _forward(type(layer))
    if forward is None:
        return False
    # Kernels compute nothing on a CPU.
    convolve, apply = (unwrap(forward.__globals__[name]) for name in (CONVOLUTION, RULE))
    alone = calling(forward, {CONVOLUTION: convolve, RULE: apply})
    together = _keeping(forward, convolve, apply)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, sum(tried.lengths), 8, generator=generator)
    expected = torch.cat([alone(layer, part) for part in x.split(tried.lengths, dim=1)], dim=1)
    return torch.allclose(together(layer, x, sequences=tried), expected, rtol=1e-4, atol=1e-5)


def _convolved(
    library: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    sequences: Sequences | None = None,
    **options: Any,
) -> Tensor:
    """In the place of `causal_conv1d_fn`: x is [1, features, T]."""
    if sequences is None:
        return library(x, weight, bias, activation=activation, **options)
    if sequences.split is not None:
        back = weight.shape[1] - 1
        reached = torch.cat((before(x, back), x), dim=-1)
        return library(reached, weight, bias, activation=activation, **options)[..., back:]
    if x.device.type != "cpu" and _takes(library, "seq_idx") and not sequences.trees:
        number = (sequences.positions == 0).cumsum(1, dtype=torch.int32) - 1
        return library(x, weight, bias, activation=activation, **{**options, "seq_idx": number})
    from transformers.activations import ACT2FN

    made = causal_convolution(x, weight, bias, sequences.reach(weight.shape[1] - 1))
    return (made if activation is None else ACT2FN[activation](made)).to(x.dtype)


def _ruled(
    library: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sequences: Sequences | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """In the place of `torch_chunk_gated_delta_rule`: queries, keys and values are [1, T, heads, size]."""
    settings = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    if sequences is None:
        return library(query, key, value, g=g, beta=beta, **settings, **options)
    if initial_state is not None or output_final_state:
        raise RuntimeError("a flat batch was given a state")
    if sequences.split is not None:
        given = query, key, value, g, beta
        return _split_ruled(library, sequences.split, *given, {**settings, **options}), None
    kernel = query.device.type != "cpu" and _takes(library, "cu_seqlens")
    if sequences.asked is not None:
        heads = value.shape[2]
        elements = heads * 2 * (key.shape[3] + value.shape[3])
        sequences.asked.append(Asked(heads, heads, elements, None, kernel, plain=False, recurrent=True))
    if kernel and not sequences.trees:
        options["cu_seqlens"] = sequences.offsets.long()
        return library(query, key, value, g=g, beta=beta, **settings, **options)
    made = gated_delta_rule(
        query[0], key[0], value[0], g[0], beta[0], sequences.chunks, normed=use_qk_l2norm_in_kernel
    )
    return made[None], None


def _split_ruled(
    library: Callable[..., Any],
    split: Split,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    settings: dict[str, Any],
) -> Tensor:
    """What the rule comes to of this rank's part of a sequence, of which each rank computes some heads."""
    exchange, sizes = split.exchange, [query.shape[-1], key.shape[-1], value.shape[-1]]
    # By themselves, as they are in float32 whatever the others are in.
    rates = exchange.by_heads(torch.stack((g.float(), beta.float()), dim=-1)).unbind(-1)
    query, key, value = exchange.by_heads(torch.cat((query, key, value), dim=-1)).split(sizes, dim=-1)
    g, beta = (mine.to(each.dtype) for mine, each in zip(rates, (g, beta), strict=True))
    made, _ = _ruled(library, query, key, value, g, beta, sequences=split.whole, **settings)
    return exchange.by_tokens(made)


@cache
def _takes(library: Callable[..., Any], name: str) -> bool:
    """Whether what the library found to compute by takes a setting: transformers says it nowhere, and leaves
    out what that does not take (`use_kernel_func_from_hub_with_fallback`)."""
    if not isinstance(library, FunctionType):
        return False
    return name in getclosurevars(library).nonlocals.get("applicable_params", ())
