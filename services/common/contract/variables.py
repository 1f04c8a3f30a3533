"""The variables of the environment that begin with TINSMITH_: which there are, and what to say of others.

Invariant: OF_FLAGS has the variable of each flag of `tinsmith up`, gateway, trainer and sampler. They share
one environment, so each of them meets the others' variables, and a mistyped one is nobody's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

PREFIX = "TINSMITH_"

_OF_FLAGS = """
ACCESS_LOG ACTIVATION_CHECKPOINTING ADAPTER_HOST_GIB ADVERTISE_HOST API_KEYS_FILE BASE_MODELS
BURST_SECONDS CHECKPOINT_STORE DATA_DIR DEVICE DRAIN_SECONDS DTYPE ENFORCE_EAGER EXECUTE_TIMEOUT
FETCHED_RESULT_LIFE
FIRST_PROCESS_INDEX FORGET_AFTER FULL_SNAPSHOT_CACHE_GIB FULL_SNAPSHOT_STEPS GAP_TIMEOUT GATEWAYS
GPU_MEMORY_SHARE GPU_MEMORY_UTILIZATION GRPC_PORT HEAD_DTYPE HOST ID IDENTITY JOURNAL_BYTES
KV_CACHE_DTYPE KV_CACHE_GIB LOG_FORMAT MACHINE_SAMPLERS MAX_BATCHED_TOKENS MAX_BATCH_BYTES MAX_CALLS
MAX_CHECKPOINTS
MAX_CHECKPOINT_BYTES MAX_CONTEXT MAX_DATUMS MAX_DOWNLOADS MAX_FULL_MODELS MAX_GRPC_CONNECTIONS
MAX_HTTP_CONNECTIONS MAX_INFLATED_BYTES MAX_JSON_BYTES MAX_LORAS MAX_LORA_RANK MAX_MESSAGE_BYTES
MAX_METADATA_BYTES MAX_MODELS MAX_SAMPLERS MAX_SAMPLES MAX_SAMPLE_BYTES MAX_SEQUENCES MAX_SESSIONS
MEMORY_GIB MEMORY_MIB METRICS_PORT MICRO_BATCH_TOKENS MODEL MODEL_RUNNER MTLS NEAR_CLIENTS
OFFLOAD_OPTIMIZER OIDC_AUDIENCE OIDC_ISSUER OIDC_JWKS_URL OIDC_OWNER_CLAIM OIDC_ROLE_CLAIM OWNER_BYTES
OWNER_OPERATIONS PENDING_BYTES PENDING_OPERATIONS PIPELINE_PARALLEL_SIZE PORT PUBLIC_URL QUANTIZATION
REDIS_APPENDFSYNC REDIS_URL REQUESTS_PER_SECOND RESULT_LIFE ROUTED_EXPERTS SAMPLERS
SAMPLER_MEMORY
SAMPLER_PP SAMPLER_TP SESSION_END_AFTER SESSION_PARK_AFTER SNAPSHOT_BYTES SNAPSHOT_CACHE_GIB
SNAPSHOT_GRACE SNAPSHOT_OWNER_BYTES SPECULATIVE_NGRAM_TOKENS STABLE_REINFORCE_AS STALL_SECONDS
STATE_BYTES TENSOR_PARALLEL_SIZE TLS_CERT TLS_KEY TRAINER_INTERFACE TRAINER_NODES TRAINER_PATIENCE
TRAINER_RANKS TRAINER_RENDEZVOUS TRUSTED_PROXY WAITING_SEQUENCES WINDOW_BYTES WINDOW_OPERATIONS
ZERO_PREFETCH_ELEMENTS ZERO_QUANTIZED_BASE ZERO_REPLICA_RANKS ZERO_STAGE
"""
OF_FLAGS = tuple(_OF_FLAGS.split())
"""Without the prefix."""

OTHERS = (
    # Of processes, and of commands beside `up`.
    *("LOG_LEVEL", "FAILPOINTS", "ADDRESS", "PARENT", "REFUSALS", "WEIGHTS_INTERFACE"),
    # Of examples and of tests, which start clusters from their own environment.
    *("GRPC", "STATE", "WRITE_COMPATIBILITY", "WRITE_MATRIX", "WRITE_MODELS"),
)
"""Those that are of no flag, without the prefix."""

_LEAST_LIKENESS = 0.7
_OF_A_SERVICE = re.compile(
    r"TINSMITH(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_URL_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://.*")


def mistakes(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that nothing reads, with the one that was probably meant.

    Kubernetes tells every container of its namespace's services, in variables that begin with their names; of
    a service called tinsmith or tinsmith-gateway they begin like ours, and are no mistakes.
    """
    known = (*OF_FLAGS, *OTHERS)
    found = []
    for name in sorted(environment):
        word = name.removeprefix(PREFIX)
        if word in (name, *known) or _of_kubernetes(name, environment[name]):
            continue
        near = difflib.get_close_matches(word, known, n=1, cutoff=_LEAST_LIKENESS)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "`tinsmith up --help` lists them"
        found.append(f"{name} is no variable of Tinsmith; {hint}")
    return found


def _of_kubernetes(name: str, value: str) -> bool:
    if _OF_A_SERVICE.fullmatch(name):
        return True
    return name.endswith("_PORT") and _URL_OF_A_SERVICE.fullmatch(value) is not None
