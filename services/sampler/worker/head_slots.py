"""For how many adapters of an output head vLLM's kernel on GPUs finds their weights.

It multiplies the slot of an adapter by the elements of one slot in 32 bits: beyond them it reads elsewhere.
vllm-project/vllm#53034 widened its rows alone, and #53038, which would have widened slots, was not merged.
Other layers that it is for have smaller slots than the vocabulary makes those of the head. Layers of experts
have a kernel of their own, of which nothing is said here.

Invariant: of a head on a GPU there is no slot that the kernel does not reach. No vLLM.
"""

from __future__ import annotations

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig

_ELEMENTS = 2**31


def check(config: SamplerConfig, vocabulary: int) -> None:
    """Refuses more adapters in a step than the kernel reaches.

    Raises:
        InvalidRequest: with what to change.
    """
    rank = config.max_lora_rank
    if (config.max_loras - 1) * vocabulary * rank >= _ELEMENTS:
        most = 1 + (_ELEMENTS - 1) // (vocabulary * rank)
        raise InvalidRequest(
            f"--max-loras is {config.max_loras}, and of rank {rank} vLLM's kernel for adapters reaches "
            f"{most} in the output head of {config.base_model}, of {vocabulary} tokens: give no more, or a "
            "lower --max-lora-rank"
        )
