"""Reads a model under ZeRO-3: each rank its own part of every weight, from files that it maps.

transformers' own way has rank 0 read all weights and spread them, one collective a layer, and each rank hold
a copy of what it converts meanwhile, as the experts of a model whose files have them one by one: of all
layers at once.

Invariants: weights are what transformers makes of the files, by its own conversions. Of what no conversion
touches a rank reads its part of the pages alone, where files can be mapped, and beside that it holds what one
layer's conversions made. Ranks meet when all have read, if each gets `_SLOWEST` bytes a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.trainer.compute.exchange import meet, patience

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""What the names of a layer's weights begin with."""
_SLOWEST = 50e6
"""Bytes of files that a machine reads in a second, at least. Another one may have them in memory."""


@contextmanager
def reading_own_parts() -> Iterator[set[str]]:
    """Within it `from_pretrained` under ZeRO-3 loads so; the names of all that files have, of which
    transformers does not tell then what it leaves out."""
    from transformers import modeling_utils

    theirs, names = modeling_utils._load_state_dict_into_zero3_model, set[str]()
    modeling_utils._load_state_dict_into_zero3_model = partial(_load, names)
    try:
        yield names
    finally:
        modeling_utils._load_state_dict_into_zero3_model = theirs


def layers(names: Iterable[str]) -> Iterable[list[str]]:
    """The names of weights in files, those of each layer together, as conversions need them. Pure."""
    found: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        found.setdefault(layer.group() if layer else name, []).append(name)
    return found.values()


def own_part(whole: Tensor, part: Tensor, rank: int) -> None:
    """Copies a rank's part of a weight, of which it has `part` elements: flat, filled up at the end."""
    start = rank * part.numel()
    mine = whole.reshape(-1)[start : start + part.numel()]
    part[: len(mine)].copy_(mine)


def _load(
    in_files: set[str], model: Any, state: dict[str, Tensor], load_config: Any = None
) -> tuple[list[str], set[str]]:
    """In the place, and of the shape, of transformers' function: errors, and names that files lack. What
    files have is added to `in_files`."""
    in_files.update(state)
    weights = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    missing = set(model.state_dict())
    errors: list[str] = []
    for names in layers(state):
        some = _converted(model, {name: state[name] for name in names}, load_config)
        for name, whole in some.items():
            if name in weights:
                errors += _take(name, weights[name], whole)
            elif name in buffers:
                buffers[name].copy_(whole)
                buffers[name]._is_hf_initialized = True
            missing.discard(name)
    with patience(sum(each.nbytes for each in state.values()) / _SLOWEST):
        meet(str(next(iter(weights.values())).ds_tensor.device))
    return errors, missing


def _converted(model: Any, state: dict[str, Tensor], load_config: Any) -> dict[str, Tensor]:
    """Weights by the names and in the shapes that the model has them."""
    from transformers.integrations.deepspeed import _apply_weight_conversions_to_state_dict

    mapping = getattr(load_config, "weight_mapping", None)
    if mapping:
        state = _apply_weight_conversions_to_state_dict(model, state, mapping)
        # It is asked for when the model is saved.
        model._weight_conversions = mapping
    prefix, known = model.base_model_prefix, model.state_dict()
    return {f"{prefix}.{name}" if f"{prefix}.{name}" in known else name: each for name, each in state.items()}


@torch.no_grad()
def _take(name: str, weight: Any, whole: Tensor) -> list[str]:
    """Takes this rank's part of a weight; what is wrong with it."""
    from deepspeed.utils import groups

    # It is not made anew then.
    weight._is_hf_initialized = True
    if whole.shape != weight.ds_shape:
        return [f"size mismatch for {name}: {tuple(whole.shape)} in files, not {tuple(weight.ds_shape)}"]
    own_part(whole, weight.ds_tensor, weight.ds_zero_partition_rank)
    if weight.ds_secondary_tensor is not None:
        own_part(whole, weight.ds_secondary_tensor, groups._get_zero_param_intra_parallel_rank_in_mygroup())
    return []
