"""Whether a process that serves a model has loaded it.

Invariant: a trainer or sampler answers scrapes from before it loads, so that who watches knows a process that
loads from one that is gone.
"""

from __future__ import annotations

from prometheus_client import Gauge

LOADED = Gauge("tinsmith_model_loaded", "1 once this process has loaded its model, 0 while it loads")
