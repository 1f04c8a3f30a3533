"""Whether an architecture hands on to its attention what the model is given beside tokens, as how a flat
batch is cut. Transformers' classes do not say so; the layers of some, as Nemotron's, leave it out.

Pure, but for what transformers knows: nothing is computed, on no device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from services.trainer.compute.attention import window_of

_TRIAL = "tinsmith_handed_on"
"""The trial's name as transformers' `attn_implementation`."""


class _Reached(Exception):
    """A layer has come to its attention."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told


def hands_on(model_class: Any, config: Any) -> bool:
    """Whether the first attention of a model is told of `sequences`; also where none was reached: what is
    wrong then is seen when the model computes.

    Args:
        model_class: transformers' class of the causal language model.
        config: its text configuration.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_TRIAL, _reached)
    AttentionMaskInterface.register(_TRIAL, window_of)
    try:
        with torch.device("meta"), torch.no_grad():
            # It notes its attention in the configuration.
            model = model_class._from_config(copy.deepcopy(config), attn_implementation=_TRIAL).eval()
            one = torch.zeros(1, 1, dtype=torch.int64)
            embedded = model.get_input_embeddings()(one)
            # Without a mask the library looks for sequences in positions, which have no values here.
            model.base_model(inputs_embeds=embedded, attention_mask=one, use_cache=False, sequences=one)
    except _Reached as reached:
        return reached.told
    except Exception:
        return True
    return True


def _reached(*_: Any, sequences: Any = None, **__: Any) -> Any:
    """In the place of attention."""
    raise _Reached(sequences is not None)
