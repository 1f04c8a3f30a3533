"""Qwen3.5's text models of vLLM without torchvision.

vLLM has them in one file with the models that read pictures, which imports a function of transformers' image
processing with torchvision (no upstream report found). The same function is in transformers' image processing
with Pillow, to which transformers itself falls back; no text model calls it.

Invariant: to be imported only where torchvision is not installed.
"""

from __future__ import annotations

import sys

from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = image_processing_pil_qwen2_vl

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM  # noqa: E402

__all__ = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
