"""A step of a DeepSpeed engine.

Invariant: of a gradient that was dropped nothing is in the next one.
"""

from __future__ import annotations

from typing import Any


def stepped(engine: Any) -> bool:
    """Has an engine take a step; whether it did, and did not drop a gradient that is not finite."""
    engine.step()
    zero = engine.optimizer
    if not zero.overflow:
        return True
    # Where the step is on the host, ZeRO 1 and 2 drop what they have copied there, and keep the float32 sum
    # on the device that it was copied from: the next gradient would be added to it. ZeRO-3 writes over it.
    if engine.zero_optimization_stage() < 3:
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
    return False
