"""The tiny model of the cluster's tests."""

from __future__ import annotations

from tests.cluster.conftest import model_dir

__all__ = ["model_dir"]
