"""Which adapter vLLM's LoRA logits processor uses for rows of its own choosing.

vLLM maps the rows that a step samples to adapters, one per request; a prompt's rows that are scored are
others, and so are, with its V2 model runner, those behind drafts.

Invariant: what the step mapped is mapped again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.lora.layers import LoRAMapping


@contextmanager
def adapter_rows(runner: Any) -> Iterator[Callable[[Sequence[int]], None]]:
    """Gives a function that maps rows to adapters: the id of each row, 0 = none.

    Args:
        runner: vLLM's model runner, of either kind, in a step.
    """
    if not getattr(runner, "lora_config", None):
        yield lambda ids: None
        return
    manager = runner.lora_manager._adapter_manager
    step_mapping = manager._last_mapping
    mapped: tuple[int, ...] = ()

    def use(ids: Sequence[int]) -> None:
        nonlocal mapped
        if tuple(ids) != mapped:
            mapped = tuple(ids)
            manager._set_adapter_mapping(LoRAMapping(mapped, mapped, is_prefill=True))

    try:
        yield use
    finally:
        if mapped:
            manager._set_adapter_mapping(step_mapping)
