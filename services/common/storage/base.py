"""What all kinds of storage share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Writer = Callable[[Path], object]
"""Writes one file at the path it is given. May be called again; writes the same each time."""
