"""What is wrong with a cluster although each of its settings is right.

Pure, but for whether files are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from services.common.contract.errors import InvalidRequest
from services.common.storage.location import check_location
from services.common.worlds import nodes, sharding
from services.launcher import plan

LEAST_SHARE = 0.05
"""Of a GPU's memory, for a trainer."""
_OF_SAMPLERS = (
    *("sampler_tp", "sampler_pp", "sampler_memory", "kv_cache_gib", "max_loras", "max_sequences"),
    *("max_batched_tokens", "kv_cache_dtype", "head_dtype", "quantization", "model_runner"),
    *("speculative_ngram_tokens", "routed_experts", "enforce_eager"),
)
"""Options of samplers and of nothing else."""


def mistakes(options: plan.Options, addresses: Mapping[str, list[str]]) -> list[str]:
    """What is wrong although each setting is right: sentences that say what to change.

    Args:
        addresses: of this machine, by interface.
    """
    found = []
    names = [model.name for model in options.models]
    found += [
        f"--model {name} is given twice; every base model needs a name of its own"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    try:
        check_location(options.checkpoint_store)
    except InvalidRequest as error:
        found.append(error.message)
    if (options.tls_cert is None) != (options.tls_key is None):
        found.append("--tls-cert and --tls-key go together")
    found += [
        f"{flag} {file}: there is no such file"
        for flag, file in (("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key))
        if file is not None and not Path(file).is_file()
    ]
    shared = sharding.Sharding(
        options.zero_replica_ranks, options.zero_prefetch_elements, options.zero_quantized_base == "yes"
    )
    found += sharding.mistakes(shared, options.zero_stage, options.trainer_ranks * options.trainer_nodes)
    found += _of_nodes(options, addresses)
    if not options.samplers:
        found += _of_no_sampler(options)
    if options.port == options.grpc_port:
        found.append("--port and --grpc-port must differ")
    taken = [listener.port for listener in plan.listeners(options) if listener.flag == "--metrics-port"]
    if taken and (taken[-1] > 65535 or options.port in taken or options.grpc_port in taken):
        found.append(
            f"--metrics-port {options.metrics_port} and the ports after it, one for each of {len(taken)} "
            "processes, must be free of --port and --grpc-port and at most 65535"
        )
    step, sequences = options.max_batched_tokens, options.max_sequences
    if step is not None and sequences is not None and step < sequences:
        found.append(
            f"--max-batched-tokens is {step} and --max-sequences {sequences}: a step computes a token of "
            "each sequence, so give the first at least the second"
        )
    if options.sampler_pp > 1 and options.speculative_ngram_tokens:
        found.append("--speculative-ngram-tokens does not go with --sampler-pp: leave one of them out")
    if options.sampler_pp > 1 and options.routed_experts == "yes":
        found.append("--routed-experts does not go with --sampler-pp: leave one of them out")
    quantised = f"--quantization {options.quantization}"
    if options.quantization != "auto" and options.dtype == "float32":
        found.append(f"{quantised} is for bfloat16, and --dtype says float32: leave one of them out")
    if options.device == "cpu":
        given = {
            "--sampler-memory": options.sampler_memory is not None,
            "--sampler-tp": options.sampler_tp > 1,
            "--sampler-pp": options.sampler_pp > 1,
            "--kv-cache-dtype fp8": options.kv_cache_dtype == "fp8",
            quantised: options.quantization != "auto",
            "--model-runner v2": options.model_runner == "v2",
        }
        found += [f"{flag} is for GPUs, and the models compute on the CPU" for flag in given if given[flag]]
    else:
        here = len(options.gpus)
        tp, pp = options.sampler_tp, options.sampler_pp
        wanted = {f"--trainer-ranks {options.trainer_ranks} needs as many": options.trainer_ranks}
        if pp == 1:
            wanted[f"--sampler-tp {tp} needs as many"] = tp
        else:
            wanted[f"--sampler-tp {tp} with --sampler-pp {pp} needs {tp * pp}"] = tp * pp
        found += [f"{said} GPUs, and here are {here}" for said, count in wanted.items() if count > here]
        if options.dtype == "float32" and options.samplers and options.max_loras:
            found.append(
                "--dtype float32 on GPUs is for samplers without adapters, as vLLM has it: leave it out, or "
                "give --max-loras 0 or --samplers 0"
            )
        if options.routed_experts == "yes" and options.model_runner == "v1":
            found.append("--routed-experts on GPUs needs --model-runner v2: leave one of them out")
        if not found:
            found += _of_shares(options)
    return found


def _of_no_sampler(options: plan.Options) -> list[str]:
    """What is given for samplers that there are none of."""
    unset = {each.name: each.default for each in fields(plan.Options)}
    given = [name for name in _OF_SAMPLERS if getattr(options, name) != unset[name]]
    return [
        f"--{name.replace('_', '-')} is for samplers, and --samplers is 0: leave it out" for name in given
    ]


def _of_shares(options: plan.Options) -> list[str]:
    """What is wrong with how trainers and samplers part a GPU."""
    shares = [share for share in plan.trainer_shares(options) if share is not None]
    found = []
    if any(share < LEAST_SHARE for share in shares):
        cure = "a lower --sampler-memory, or fewer --samplers" if options.samplers else "fewer --model"
        found.append(
            f"a trainer would have less than {LEAST_SHARE:.0%} of a GPU that it shares: give {cure}, or "
            "more GPUs"
        )
    if options.samplers and options.kv_cache_gib is not None:
        found += _of_keys_and_values(options.kv_cache_gib, options.sampler_memory, bool(shares))
    return found


def _of_keys_and_values(gib: float, memory: float | None, shared: bool) -> list[str]:
    """vLLM that is told what keys and values may have goes by no fraction of the GPU for them."""
    given = f"--kv-cache-gib {gib:g}"
    if memory is not None:
        has = (
            f"{given} has a sampler take that besides its weights, whatever --sampler-memory {memory:g} says"
        )
        return [
            f"{has}, and a trainer has the rest of its GPU: leave --kv-cache-gib out"
            if shared
            else f"{has}: leave one of them out"
        ]
    if shared:
        return [
            f"{given} on a GPU that a trainer shares says nothing of a sampler's weights: give "
            "--sampler-memory instead"
        ]
    return []


def _of_nodes(options: plan.Options, addresses: Mapping[str, list[str]]) -> list[str]:
    given = {
        "--trainer-rendezvous": options.trainer_rendezvous is not None,
        "--trainer-interface": options.trainer_interface is not None,
    }
    if options.trainer_nodes == 1:
        return [
            f"{flag} is for a trainer on several machines: give --trainer-nodes"
            for flag in given
            if given[flag]
        ]
    missing = [flag for flag in given if not given[flag]]
    if missing:
        return [f"--trainer-nodes {options.trainer_nodes} needs {' and '.join(missing)}"]
    if len(options.models) > 1:
        return [
            f"--trainer-nodes {options.trainer_nodes} is for one base model, and here are "
            f"{len(options.models)}"
        ]
    head = plan.nodes(options)
    return [] if head is None else nodes.mistakes(head, addresses, prefix="--trainer-")
