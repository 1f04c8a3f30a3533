"""Gemma 3's text model of vLLM, from files of models that read pictures too.

Invariant: it is vLLM's own class but for the names of weights in such files, of both layouts that there are.
"""

from __future__ import annotations

from vllm.model_executor.models import gemma3
from vllm.model_executor.models.utils import WeightsMapper

_OF_BOTH = WeightsMapper(
    orig_to_new_prefix={
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        **dict.fromkeys(("model.vision_tower.", "vision_tower."), None),
        **dict.fromkeys(("model.multi_modal_projector.", "multi_modal_projector."), None),
    }
)


class Gemma3ForCausalLM(gemma3.Gemma3ForCausalLM):
    hf_to_vllm_mapper = gemma3.Gemma3ForCausalLM.hf_to_vllm_mapper | _OF_BOTH
