"""The other side: what one would write without Tinsmith, transformers with PEFT, one adapter at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu import device as devices
from bench.gpu.shapes import RANK, Shape, fill, lengths

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def fused(device: str) -> AbstractContextManager[Any]:
    """Attention by a fused kernel: FlashAttention where it takes the call, never by a matrix of scores."""
    if device != "cuda":
        return nullcontext()
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return sdpa_kernel(kernels, set_priority=True)


class PeftSide:
    """The same shape in bfloat16 with one adapter of the same rank on the same linears, checkpointed too."""

    def __init__(self, shape: Shape, device: str, scratch: Path) -> None:
        config = AutoConfig.for_model("qwen3", **shape.config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        model = model.to_empty(device=device)
        model.tie_weights()
        # What is no weight, such as the frequencies of rotations, was left empty too.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        fill(model)
        self._model: Any = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        )
        self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model.enable_input_require_grads()
        self._model.train()
        self._shape, self._device = shape, device

    def train(self, tokens: int, adapters: int, limit_s: float) -> dict[str, object]:
        """Times passes over sequences of the same number and length as ours, all with the one adapter.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        each = lengths(tokens, adapters)
        generator = torch.Generator().manual_seed(adapters)
        ids = torch.randint(self._shape.vocab, (len(each), each[0]), generator=generator).to(self._device)

        def step() -> None:
            with fused(self._device):
                self._model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        try:
            found = devices.measure(step, self._device, limit_s)
        finally:
            self._model.zero_grad(set_to_none=True)
        return {"seconds": found.seconds, "peak_bytes": found.peak_bytes}
