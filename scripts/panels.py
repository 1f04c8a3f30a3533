"""What the Grafana dashboards of the chart show.

A panel is a row here: its title, its unit, and what it shows, by legend.
"""

from __future__ import annotations

Panel = tuple[str, str, dict[str, str]]


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Of a counter, a second."""
    chosen = f"{where}, " if where else ""
    grouped = f" by ({by})" if by else ""
    return f'sum{grouped} (rate({metric}{{{chosen}namespace=~"$namespace"}}[$__rate_interval]))'


def quantile(share: float, metric: str, by: str = "", where: str = "") -> str:
    """Of a histogram."""
    return (
        f"histogram_quantile({share}, {rate(metric + '_bucket', ', '.join(filter(None, ['le', by])), where)})"
    )


def mean(metric: str) -> str:
    """Of a histogram."""
    return f"{rate(metric + '_sum')} / {rate(metric + '_count')}"


def now(metric: str, by: str = "pod", how: str = "sum") -> str:
    """Of a gauge."""
    return f'{how} by ({by}) ({metric}{{namespace=~"$namespace"}})'


def share(used: str, most: str) -> str:
    """Of one gauge in another, where there is a bound."""
    return f"{now(used, 'namespace', 'max')} / ({now(most, 'namespace', 'max')} > 0)"


WAITED_FOR = 'script=~"accept|accept_sample|publish|publish_sample|completions"'
ACCEPTED = 'route=~"/api/v1/(forward_backward|forward|optim_step|asample)"'

HEALTH: dict[str, list[Panel]] = {
    "Requests": [
        ("HTTP requests", "reqps", {"{{status}}": rate("tinsmith_http_seconds_count", "status")}),
        (
            "Time to accept work",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_http_seconds", where=ACCEPTED),
                "p99": quantile(0.99, "tinsmith_http_seconds", where=ACCEPTED),
            },
        ),
        ("gRPC calls by outcome", "reqps", {"{{code}}": rate("tinsmith_rpc_seconds_count", "code")}),
    ],
    "Gateways": [
        ("Results that clients wait for", "short", {"{{pod}}": now("tinsmith_futures_waited_for")}),
        ("Memory of requests being accepted", "bytes", {"{{pod}}": now("tinsmith_request_bytes")}),
        ("Models led", "short", {"{{pod}}": now("tinsmith_models_led")}),
        (
            "Samples that wait or run, by class of owner",
            "short",
            {"{{owner_class}}": now("tinsmith_sample_sequences", "owner_class")},
        ),
        (
            "Samples' wait for their API key's turn, p99",
            "s",
            {"{{owner_class}}": quantile(0.99, "tinsmith_sample_turn_seconds", "owner_class")},
        ),
        (
            "Replays, leases lost, writes refused",
            "ops",
            {
                "operations sent again": rate("tinsmith_replayed_operations_total"),
                "leases lost": rate("tinsmith_leases_lost_total"),
                "writes under an old epoch": rate("tinsmith_fenced_writes_total"),
            },
        ),
        (
            "Models tried in vain, and lost",
            "ops",
            {
                "tries in vain": rate("tinsmith_models_tried_in_vain_total"),
                "models lost": rate("tinsmith_models_lost_total"),
            },
        ),
        (
            "Samples that wait for Redis",
            "ops",
            {"{{what}}": rate("tinsmith_sample_redis_failures_total", "what")},
        ),
        ("Memory of answers", "bytes", {"{{pod}}": now("tinsmith_answer_bytes")}),
        ("Callers refused", "reqps", {"{{code}}": rate("tinsmith_refused_callers_total", "code")}),
        ("Acts written down", "reqps", {"{{event}}": rate("tinsmith_audit_records_total", "event")}),
        (
            "Records of acts that Redis lacks",
            "short",
            {
                "wait": now("tinsmith_audit_waiting_records", "namespace"),
                "only in the log": rate("tinsmith_audit_dropped_total"),
            },
        ),
        (
            "Requests that timelines lack",
            "reqps",
            {"{{pod}}": rate("tinsmith_timeline_dropped_total", "pod")},
        ),
        (
            "Lines of the keys file that let nobody in",
            "short",
            {"{{pod}}": now("tinsmith_keys_file_wrong_lines")},
        ),
        (
            "Base models with different model runners",
            "short",
            {"most": now("tinsmith_mixed_runner_models", "namespace", "max")},
        ),
    ],
    "Redis": [
        (
            "Atomic steps",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_redis_script_seconds"),
                "p99": quantile(0.99, "tinsmith_redis_script_seconds"),
            },
        ),
        (
            "Atomic steps of requests and results, p99",
            "s",
            {"{{script}}": quantile(0.99, "tinsmith_redis_script_seconds", "script", WAITED_FOR)},
        ),
        (
            "Memory",
            "bytes",
            {
                "all": now("tinsmith_redis_used_bytes", "namespace", "max"),
                "requests, results, records": now("tinsmith_state_bytes", "namespace", "max"),
                "results": now("tinsmith_result_bytes", "namespace", "max"),
                "journals": now("tinsmith_journal_bytes", "namespace", "max"),
            },
        ),
        (
            "Share of what they may take",
            "percentunit",
            {
                "all, of maxmemory": share("tinsmith_redis_used_bytes", "tinsmith_redis_max_bytes"),
                "requests, results, records": share("tinsmith_state_bytes", "tinsmith_state_max_bytes"),
            },
        ),
        (
            "Failures of background work",
            "ops",
            {"{{work}}": rate("tinsmith_periodic_failures_total", "work")},
        ),
        (
            "Failures of background work in a row",
            "short",
            {"{{work}}": now("tinsmith_periodic_failures_in_a_row", "work", "max")},
        ),
    ],
    "Processes": [
        (
            "Share of time that loops stood still",
            "percentunit",
            {"{{pod}}": rate("tinsmith_loop_stalled_seconds_total", "pod")},
        ),
        # Those of the process that is scraped, not of its children, such as an engine.
        ("Memory of the main process", "bytes", {"{{pod}}": now("process_resident_memory_bytes")}),
        ("Models that are loaded", "short", {"{{pod}}": now("tinsmith_model_loaded", how="min")}),
        (
            "Time since the process started",
            "s",
            {"{{pod}}": f"time() - {now('process_start_time_seconds', how='max')}"},
        ),
        ("CPU of the main process, in cores", "short", {"{{pod}}": rate("process_cpu_seconds_total", "pod")}),
    ],
}

RUNS: dict[str, list[Panel]] = {
    "Training": [
        (
            "Operations",
            "ops",
            {"{{kind}} {{outcome}}": rate("tinsmith_operation_seconds_count", "kind, outcome")},
        ),
        ("Time of operations, p95", "s", {"{{kind}}": quantile(0.95, "tinsmith_operation_seconds", "kind")}),
        (
            "Wait of operations, p95",
            "s",
            {"{{kind}}": quantile(0.95, "tinsmith_operation_wait_seconds", "kind")},
        ),
        (
            "Tokens trained a second",
            "short",
            {"{{direction}}": rate("tinsmith_passed_tokens_total", "direction")},
        ),
        (
            "Passes",
            "s",
            {"p50": quantile(0.5, "tinsmith_pass_seconds"), "p95": quantile(0.95, "tinsmith_pass_seconds")},
        ),
        (
            "Tokens of a micro-batch",
            "short",
            {
                "p10": quantile(0.1, "tinsmith_micro_batch_tokens"),
                "p50": quantile(0.5, "tinsmith_micro_batch_tokens"),
                "at most, {{pod}}": now("tinsmith_micro_batch_limit_tokens", how="min"),
            },
        ),
        (
            "Wait of operations by class of owner, p95",
            "s",
            {"{{owner_class}}": quantile(0.95, "tinsmith_operation_wait_seconds", "owner_class")},
        ),
        ("Models in memory", "short", {"{{pod}}": now("tinsmith_models")}),
        (
            "Models evicted and reloaded",
            "ops",
            {
                "evicted": rate("tinsmith_models_evicted_total"),
                "reloaded": rate("tinsmith_models_reloaded_total"),
                "to the {{to}}": rate("tinsmith_adapters_moved_total", "to"),
            },
        ),
        (
            "Memory of adapters on each rank",
            "bytes",
            {
                "{{pod}}": now("tinsmith_adapter_bytes"),
                "{{pod}}, on the host": now("tinsmith_adapter_host_bytes"),
            },
        ),
        (
            "Models on their way, on the host",
            "bytes",
            {
                "to {{to}}": now("tinsmith_copy_bytes", "to"),
                "from a {{from}}": now("tinsmith_load_bytes", "from"),
            },
        ),
        ("Results kept for who asks again", "bytes", {"{{pod}}": now("tinsmith_kept_result_bytes")}),
        (
            "Page-locked memory of the host, by state",
            "bytes",
            {"{{state}}": now("tinsmith_page_locked_bytes", "state", "max")},
        ),
        (
            "Refusals of page-locked memory",
            "ops",
            {"{{pod}}": rate("tinsmith_page_locked_refused_total", "pod")},
        ),
        (
            "Moves of adapters that were refused memory",
            "ops",
            {"{{pod}}": rate("tinsmith_adapter_moves_refused_total", "pod")},
        ),
        (
            "Micro-batches that were refused memory",
            "ops",
            {
                "{{pod}}, in halves": rate("tinsmith_micro_batch_splits_total", "pod"),
                "{{pod}}, again with fewer blocks kept": rate("tinsmith_micro_batch_reruns_total", "pod"),
            },
        ),
        (
            "Durable snapshots that could not be written",
            "ops",
            {"{{pod}}": rate("tinsmith_durable_snapshot_failures_total", "pod")},
        ),
        (
            "Checkpoints that could not be read or written",
            "ops",
            {
                "{{pod}} read": rate("tinsmith_checkpoint_reads_failed_total", "pod"),
                "{{pod}} written": rate("tinsmith_checkpoint_writes_failed_total", "pod"),
            },
        ),
        (
            "Free bytes of the data directory's volume",
            "bytes",
            {"{{pod}}": now("tinsmith_volume_free_bytes", how="max")},
        ),
        (
            "Memory of each rank, by purpose",
            "bytes",
            {"{{purpose}}": now("tinsmith_memory_bytes", "purpose", "max")},
        ),
        (
            "Tokens on the busiest rank, over the mean",
            "short",
            {
                "busiest / mean": f"{rate('tinsmith_busiest_rank_tokens_total')} / "
                f"{rate('tinsmith_mean_rank_tokens_total')}"
            },
        ),
        (
            "Operations that wait or run, by class of owner",
            "short",
            {"{{owner_class}}": now("tinsmith_queued_operations", "owner_class")},
        ),
        (
            "Bytes of operations that wait or run",
            "bytes",
            {"{{pod}}": now("tinsmith_queued_operation_bytes")},
        ),
    ],
    "Weights": [
        (
            "Publishing",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_publish_seconds"),
                "p95": quantile(0.95, "tinsmith_publish_seconds"),
            },
        ),
        ("Bytes of snapshots", "Bps", {"{{way}}": rate("tinsmith_published_bytes_total", "way")}),
        (
            "Unnamed snapshots",
            "bytes",
            {"kept": now("tinsmith_snapshot_bytes", "namespace", "max")},
        ),
        (
            "Samplers left out, and groups not left",
            "ops",
            {
                "left out": rate("tinsmith_samplers_left_out_total"),
                "not left: {{why}}": rate("tinsmith_weight_groups_not_left_total", "why"),
            },
        ),
        ("Adapters in memory of samplers", "short", {"{{pod}}": now("tinsmith_adapters")}),
        (
            "Adapters that arrived, and made room",
            "ops",
            {
                "by {{way}}": rate("tinsmith_adapters_arrived_total", "way"),
                "evicted": rate("tinsmith_adapters_evicted_total"),
            },
        ),
    ],
    "Sampling": [
        ("Tokens sampled a second", "short", {"{{pod}}": rate("tinsmith_generated_tokens_total", "pod")}),
        (
            "Time of samples",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_sample_seconds"),
                "p95": quantile(0.95, "tinsmith_sample_seconds"),
            },
        ),
        (
            "Wait for weights",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_sample_wait_seconds"),
                "p95": quantile(0.95, "tinsmith_sample_wait_seconds"),
            },
        ),
        (
            "Wait of running samples for newer weights",
            "s",
            {
                "p50": quantile(0.5, "tinsmith_sample_update_seconds"),
                "p95": quantile(0.95, "tinsmith_sample_update_seconds"),
            },
        ),
        (
            "Newer versions than a sample's, when it ends",
            "short",
            {
                "mean": mean("tinsmith_sample_lag_versions"),
                "p95": quantile(0.95, "tinsmith_sample_lag_versions"),
            },
        ),
        ("Sequences in the engine", "short", {"{{pod}}": now("tinsmith_engine_sequences")}),
        ("Use of the KV cache", "percentunit", {"{{pod}}": now("vllm:kv_cache_usage_perc", how="max")}),
        (
            "Prefix hits and preemptions",
            "short",
            {
                "share of tokens found": f"{rate('vllm:prefix_cache_hits_total')} / "
                f"{rate('vllm:prefix_cache_queries_total')}",
                "preemptions": rate("vllm:num_preemptions_total"),
            },
        ),
    ],
}
