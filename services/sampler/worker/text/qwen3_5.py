"""Qwen3.5's text models of vLLM, from files of models that read pictures too, and without torchvision.

vLLM has the text models in one file with the others, which imports a function of transformers' image
processing with torchvision (no upstream report found). The same function is in transformers' image processing
with Pillow, to which transformers itself falls back; no text model calls it.

Invariant: each is vLLM's own class but for the weights that it leaves out. Where torchvision is installed
nothing is changed for others.
"""

from __future__ import annotations

import sys

from services.sampler.worker.text.models import complete

if not complete():
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = image_processing_pil_qwen2_vl

from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.utils import WeightsMapper

_OF_BOTH = WeightsMapper(orig_to_new_prefix={"model.visual.": None})


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM):
    hf_to_vllm_mapper = qwen3_5.Qwen3_5ForCausalLM.hf_to_vllm_mapper | _OF_BOTH


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM):
    hf_to_vllm_mapper = qwen3_5.Qwen3_5MoeForCausalLM.hf_to_vllm_mapper | _OF_BOTH
