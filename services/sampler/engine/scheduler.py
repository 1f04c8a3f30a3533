"""vLLM's scheduler, which shifts requests to other weights (see `shifts`), and whose prefix-cache hits end
where the scores of a prompt begin.

The cache keeps keys and values, not hidden states, so vLLM takes nothing from it for a request that
scores its prompt. But what is asked for often begins late in a long prompt (prompt_logprobs_last_n, a
few targets): everything before the first row that is needed may come from the cache.

A request may ask for the experts that have its tokens, too. Where vLLM itself tells them (of all requests,
on its V2 model runner), `own_rows` sees to it that they are this request's own. Else workers tell them of
each step where one asks; here they are put together, and go to the front end beside the tokens, as vLLM has
a way for it. The cache keeps none that are told, so nothing of such a request comes from there.

Log-probabilities of sampled tokens leave as one array a step (see `logprobs`), and a grammar that takes too
long to make counts as one that cannot be made (see `grammars`). Tokens that end a sequence are looked up.

Invariant: of a request that scores its prompt, no row that is needed is taken from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.sampler.engine.experts.own_rows import OwnRows
from services.sampler.engine.experts.routed_rows import RoutedRows
from services.sampler.engine.grammars import core as grammars
from services.sampler.engine.logprobs import core as logprobs
from services.sampler.engine.shifts import core as shifts
from services.sampler.engine.shifts import full_core
from services.sampler.worker.prompt_scores import CACHE_LIMIT_KEY, asked


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """The scheduler of an engine core, of the class that vLLM itself would take."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **arguments)
    _limit_cache_hits(scheduler.kv_cache_manager)
    look_up_stop_tokens(scheduler)
    if scheduler.aux_output_connector is None:
        _pass_experts_on(scheduler)
    else:
        scheduler.aux_output_connector = OwnRows(scheduler.hash_block_size)
    logprobs.install(scheduler)
    full_core.install(scheduler)
    if seconds := vllm_config.additional_config.get(grammars.SECONDS_KEY):
        grammars.install(scheduler, seconds)
    if vllm_config.lora_config is not None:
        shifts.install(scheduler, vllm_config.lora_config.max_loras)
    return scheduler


def look_up_stop_tokens(scheduler: Any) -> None:
    """Has a scheduler look sampled tokens up among those that end a sequence. vLLM reads the list of each
    sequence through in each step, for longer than a small model computes if they are thousands."""
    add = scheduler.add_request

    def added(request: Any) -> None:
        asked = request.sampling_params
        if asked is not None and asked.stop_token_ids:
            asked.stop_token_ids = frozenset(asked.stop_token_ids)
        add(request)

    scheduler.add_request = added


class _Experts:
    """In the place of vLLM's AuxOutputSchedulerConnector, and of its shape."""

    def __init__(self) -> None:
        self._rows: dict[str, RoutedRows] = {}

    def note(self, requests: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """What a step's workers told of requests that have not ended."""
        for name, part in told.items():
            if name in requests:
                self._rows.setdefault(name, RoutedRows()).add(part.token_start, part.rows)

    def build_connector_meta(self, *_: Any) -> None:
        """Workers know from a request itself that it asks."""

    def take_output(self, request: Any, _: Any) -> np.ndarray | None:
        """What leaves with the tokens that a request has now; the last one was not read yet."""
        rows = self._rows.get(request.request_id)
        return None if rows is None else rows.take(request.num_tokens - 1)

    def request_finished(self, request: Any) -> None:
        """It has ended, or vLLM gives it up for others and begins it again later."""
        if request.is_finished():
            self._rows.pop(request.request_id, None)

    def reset(self) -> None:
        """Of what is cached nothing is kept here."""


def _pass_experts_on(scheduler: Any) -> None:
    experts = scheduler.aux_output_connector = _Experts()
    update = scheduler.update_from_output

    def noted(scheduled: Any, made: Any) -> Any:
        experts.note(scheduler.requests, made.aux_output_connector_output or {})
        return update(scheduled, made)

    scheduler.update_from_output = noted


def _limit_cache_hits(manager: Any) -> None:
    get_computed_blocks = manager.get_computed_blocks
    find_longest_cache_hit = manager.coordinator.find_longest_cache_hit
    limit: int | None = None

    def find(block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = max_cache_hit_length if limit is None else min(limit, max_cache_hit_length)
        return find_longest_cache_hit(block_hashes, most)

    def get(request: Any) -> Any:
        nonlocal limit
        limit = asked(request.sampling_params, CACHE_LIMIT_KEY)
        return get_computed_blocks(request)

    manager.coordinator.find_longest_cache_hit = find
    manager.get_computed_blocks = get
