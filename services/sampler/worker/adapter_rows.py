"""Which adapter vLLM's LoRA logits processor uses for rows of its own choosing.

vLLM maps the rows that a step samples to adapters, one per request; a prompt's rows that are scored are
others.

Invariant: what the step mapped is mapped again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.lora.layers import LoRAMapping


@contextmanager
def adapter_rows(runner: Any, adapter_id: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that maps a number of rows to the adapter.

    Args:
        runner: vLLM's model runner, of either kind, in a step.
        adapter_id: 0 = none.
    """
    if not getattr(runner, "lora_config", None):
        yield lambda rows: None
        return
    manager = runner.lora_manager._adapter_manager
    step_mapping = manager._last_mapping
    mapped = 0

    def use_for(rows: int) -> None:
        nonlocal mapped
        if rows != mapped:
            ids = (adapter_id,) * rows
            manager._set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
            mapped = rows

    try:
        yield use_for
    finally:
        manager._set_adapter_mapping(step_mapping)
