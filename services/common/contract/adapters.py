"""What trainers, samplers and exports agree on about adapters.

Invariant: an adapter has one scale wherever it is computed with.
"""

from __future__ import annotations

LORA_ALPHA = 32
"""The scale of every adapter is LORA_ALPHA / rank (arXiv:2106.09685, section 4.1)."""
