"""vLLM's scheduler, whose prefix-cache hits end where the scores of a prompt begin.

The cache keeps keys and values, not hidden states, so vLLM takes nothing from it for a request that
scores its prompt. But what is asked for often begins late in a long prompt (prompt_logprobs_last_n, a
few targets): everything before the first row that is needed may come from the cache.

Invariant: of a request that scores its prompt, no row that is needed is taken from the cache.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.sampler.worker.prompt_scores import CACHE_LIMIT_KEY


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """The scheduler of an engine core, of the class that vLLM itself would take."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **arguments)
    _limit_cache_hits(scheduler.kv_cache_manager)
    return scheduler


def _limit_cache_hits(manager: Any) -> None:
    get_computed_blocks = manager.get_computed_blocks
    find_longest_cache_hit = manager.coordinator.find_longest_cache_hit
    limit: int | None = None

    def find(block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = max_cache_hit_length if limit is None else min(limit, max_cache_hit_length)
        return find_longest_cache_hit(block_hashes, most)

    def get(request: Any) -> Any:
        nonlocal limit
        arguments = request.sampling_params.extra_args or {}
        limit = arguments.get(CACHE_LIMIT_KEY)
        return get_computed_blocks(request)

    manager.coordinator.find_longest_cache_hit = find
    manager.get_computed_blocks = get
