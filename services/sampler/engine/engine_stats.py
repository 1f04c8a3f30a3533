"""What vLLM measures of its engine, for Prometheus.

Invariant: no label's values grow in number with the adapters that ever ran.
"""

from __future__ import annotations

from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger


class EngineStats(PrometheusStatLogger):
    """What vLLM measures, but for the gauge whose labels are adapters: it keeps each that ever ran (no
    upstream report found)."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        if (gauge := vars(self).get("gauge_lora_info")) is not None:
            REGISTRY.unregister(gauge)
            self.gauge_lora_info = None
