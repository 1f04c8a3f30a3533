"""Names of all Redis keys.

Keys that one script touches share a hash tag ({model id}, {sampling session id} or {services}), but for the
account of what owners hold, which every acceptance, every result and every record changes in the same step,
and the lists of records. So this is one Redis, and not a Redis Cluster.
"""

from __future__ import annotations

PREFIX = "tinsmith"

# Channels.
DONE_CHANNEL = f"{PREFIX}:done"
"""Carries the request_id of every future that was just resolved."""
CANCEL_CHANNEL = f"{PREFIX}:cancel"
"""Carries the request_id of every sample that was just cancelled."""
SAMPLE_CHANNEL = f"{PREFIX}:samples"
"""Carries what samples that run are to do: go on with newer weights, or end with what they have come to."""
WORK_CHANNEL = f"{PREFIX}:work"
"""Carries the model_id of every model that just got work."""
PLACEMENT_CHANNEL = f"{PREFIX}:placements"
"""Carries what each gateway sent to which sampler of late."""

# Sets and indexes that span slots.
PENDING_MODELS = f"{PREFIX}:pending-models"
"""Sorted set of model ids that may have unfinished operations, by time of the last acceptance (s)."""
SESSION_LIFE = f"{PREFIX}:session-life"
"""Sorted set of the ids of all sessions that are not over, by the last sign of life (s)."""
PARKED_SESSIONS = f"{PREFIX}:parked-sessions"
"""Sorted set of session ids, by the last sign of life that they had when their models were parked."""
ENDED_SESSIONS = f"{PREFIX}:ended-sessions"
"""Sorted set of the ids of sessions that are over and still hold something, by when they ended (s)."""
ENDED_MODELS = f"{PREFIX}:ended-models"
"""Sorted set of the ids of models that are to be taken down, by when that was noted (s)."""
OVER_SESSIONS = f"{PREFIX}:over-sessions"
"""Sorted set of the ids of sessions that are over and not forgotten, by when they ended (s), or later."""
FORGET_LEASE = f"{PREFIX}:forget-lease"
"""The gateway that forgets sessions at present."""
RETENTION_LEASE = f"{PREFIX}:retention-lease"
"""The gateway that parks and ends sessions at present."""
CHECKPOINTS_DUE = f"{PREFIX}:checkpoints-due"
"""Sorted set of checkpoint versions that expire or whose files have to go, by when to look at them (s)."""
CHECKPOINT_SWEEP_LEASE = f"{PREFIX}:checkpoint-sweep-lease"
"""The gateway that looks at them at present."""
CONTRACT = f"{PREFIX}:contract"
"""Hash of the newest contract that was written here, and of the oldest that its release gets along with."""
CLUSTER_ID = f"{PREFIX}:cluster-id"
"""Written once; the data directory has a file that says the same."""
ORPHAN_SEARCH = f"{PREFIX}:orphan-search"
"""There while snapshots that no model goes with are looked for, and for a day after that."""
ORPHANED_MODELS = f"{PREFIX}:orphaned-models"
"""Sorted set of the models that have snapshots and no record, by when that was first seen (s)."""
CHECKPOINT_CLEANING = f"{PREFIX}:checkpoint-cleaning"
"""There while the checkpoint storage is being cleaned, and for a while after that."""
SNAPSHOT_SIZES = f"{PREFIX}:{{snapshots}}:sizes"
"""Hash of the unnamed sampler snapshots that are stored: "<model id>@<version>" -> "<bytes> <owner>"."""
SNAPSHOT_BYTES = f"{PREFIX}:{{snapshots}}:bytes"
"""Hash of what an owner's unnamed sampler snapshots come to in bytes, by owner."""
SNAPSHOTS_USED = f"{PREFIX}:{{snapshots}}:used"
"""Sorted set of the unnamed sampler snapshots, by when they were made or last sampled (s)."""
SNAPSHOTS_SUPERSEDED = f"{PREFIX}:{{snapshots}}:superseded"
"""Sorted set of snapshots that no inflight session answers from any more, by when to look at them (s)."""
SNAPSHOT_SWEEP_LEASE = f"{PREFIX}:snapshot-sweep-lease"
"""The gateway that keeps snapshots within their budgets at present."""
KEYS = f"{PREFIX}:{{keys}}:records"
"""Hash of the API keys that were made here: id -> JSON, without the key itself."""
KEYS_VERSION = f"{PREFIX}:{{keys}}:version"
"""Another one after each change of an API key."""
KEYS_USED = f"{PREFIX}:{{keys}}:used"
"""Hash of when API keys were last used, by id (s)."""
AUDIT_OWNERS = f"{PREFIX}:{{audit}}:owners"
"""Sorted set of the owners that have records of acts, by when the last one ended (s)."""
AUDIT_STRANGERS = f"{PREFIX}:{{audit}}:strangers"
"""Stream of the records of calls that were refused, of nobody who is known."""
AUDIT_SWEPT = f"{PREFIX}:{{audit}}:swept"
"""There for a minute after records of acts were swept."""
TOKEN_SECRET = f"{PREFIX}:{{keys}}:token-secret"
"""Key of the signatures of tokens that stand for API keys."""
DOWNLOAD_SECRET = f"{PREFIX}:download-secret"
"""Key of the signatures of download URLs."""
BASE_MODELS = f"{PREFIX}:{{services}}:base-models"
"""Hash of what is known of the base models: "<part>:<name>" -> JSON (known_models.py)."""
DRAINED = f"{PREFIX}:{{services}}:drained-seen"
"""Sorted set of the trainers and samplers ("<kind>:<id>") that an operator took out of service, by when they
were last alive, or drained (s)."""
HELD_BYTES = f"{PREFIX}:{{held}}:bytes"
"""Hash of what requests, results and records take: owner -> bytes, and more (`lua/held.lua`)."""
EXPIRING_BYTES = f"{PREFIX}:{{held}}:expiring"
"""Sorted set of those fields that end by themselves, by when (s)."""
WAITING_OPERATIONS = f"{PREFIX}:{{held}}:operations"
"""Hash of how many operations of an owner wait to run, over all its models, by owner."""
POISON = f"{PREFIX}:poison"
"""Hash of what was met and cannot be read: name -> "<count> <last time, s> <reason>"."""
OWNERS = f"{PREFIX}:owners"
"""Set of the owners that have sessions, or used something on days that are kept."""
SAMPLE_GATEWAYS = f"{PREFIX}:sample-gateways"
"""Set of gateway ids that may have unfinished samples."""


def audit(owner: str, part: str) -> str:
    """Stream of the records of an owner's acts: "done", or "refused"."""
    return f"{PREFIX}:{{audit}}:of:{owner}:{part}"


def used(owner: str, day: str) -> str:
    """Hash of what an owner used on a day (YYYY-MM-DD, UTC): `lua/use.lua`."""
    return f"{PREFIX}:owner:{{{owner}}}:used:{day}"


def timeline(session_id: str) -> str:
    """List of what became of the last requests of a session."""
    return f"{PREFIX}:session:{{{session_id}}}:timeline"


def timelines_of(owner: str) -> str:
    """Sorted set of an owner's sessions that have a timeline, by when it was last added to (s)."""
    return f"{PREFIX}:owner:{{{owner}}}:timelines"


def session(session_id: str) -> str:
    """Session record."""
    return f"{PREFIX}:session:{{{session_id}}}"


def session_models(session_id: str) -> str:
    """Set of the ids of a session's models."""
    return f"{PREFIX}:session:{{{session_id}}}:models"


def session_samplers(session_id: str) -> str:
    """Set of the ids of a session's sampling sessions."""
    return f"{PREFIX}:session:{{{session_id}}}:samplers"


def session_idempotency(owner: str, key: str) -> str:
    """Session id made for a create_session idempotency key."""
    return f"{PREFIX}:session-key:{{{owner}:{key}}}"


def copying(model_id: str) -> str:
    """The gateway that makes the copy of a checkpoint which a run is to hold, for as long as it does."""
    return f"{PREFIX}:copying:{{{model_id}}}"


def owner_sessions(owner: str) -> str:
    """Sorted set of an owner's session ids by creation time."""
    return f"{PREFIX}:owner:{{{owner}}}:sessions"


def project_sessions(owner: str, project_id: str) -> str:
    """Sorted set of the ids of an owner's sessions in a project, by creation time."""
    return f"{PREFIX}:owner:{{{owner}}}:project:{project_id}"


def owner_checkpoints(owner: str) -> str:
    """Sorted set of the versions of an owner's checkpoints, by creation time."""
    return f"{PREFIX}:owner:{{{owner}}}:checkpoints"


def owner_expiring(owner: str) -> str:
    """Sorted set of those that expire, by when."""
    return f"{PREFIX}:owner:{{{owner}}}:expiring"


def owner_checkpoint_bytes(owner: str) -> str:
    """Hash version -> bytes of an owner's checkpoints; "total" is their sum."""
    return f"{PREFIX}:owner:{{{owner}}}:checkpoint-bytes"


def model(model_id: str) -> str:
    """Model record."""
    return f"{PREFIX}:model:{{{model_id}}}"


def owner_models(owner: str) -> str:
    """Sorted set of an owner's model ids by creation time."""
    return f"{PREFIX}:owner:{{{owner}}}:models"


def checkpoints(model_id: str) -> str:
    """Hash checkpoint id -> record of a model."""
    return f"{PREFIX}:model:{{{model_id}}}:checkpoints"


def model_samplers(model_id: str) -> str:
    """Sorted set of the ids of sampling sessions on a model's snapshots, by version."""
    return f"{PREFIX}:model:{{{model_id}}}:samplers"


def journal(model_id: str) -> str:
    """Hash seq_id -> serialized Operation, not yet covered by a durable snapshot."""
    return f"{PREFIX}:model:{{{model_id}}}:journal"


def journal_order(model_id: str) -> str:
    """Sorted set of the journal's seq_ids."""
    return f"{PREFIX}:model:{{{model_id}}}:journal-order"


def journal_pending(model_id: str) -> str:
    """Sorted set of the journal's seq_ids whose results are not published."""
    return f"{PREFIX}:model:{{{model_id}}}:journal-pending"


def journal_meta(model_id: str) -> str:
    """Hash of what is known of the journal as a whole: durable, location, floor, through, closed, sizes."""
    return f"{PREFIX}:model:{{{model_id}}}:journal-meta"


def queue_state(model_id: str) -> str:
    """Why a model's operations wait; absent when they run."""
    return f"{PREFIX}:model:{{{model_id}}}:queue-state"


def lease(model_id: str) -> str:
    """Holder of the dispatch lease."""
    return f"{PREFIX}:model:{{{model_id}}}:lease"


def epoch(model_id: str) -> str:
    """Fencing epoch of the dispatch lease; grows with every change of holder."""
    return f"{PREFIX}:model:{{{model_id}}}:epoch"


def future(object_id: str, seq_id: int) -> str:
    """Future of a request of a model or sampling session."""
    return f"{PREFIX}:future:{{{object_id}}}:{seq_id}"


def sampling_session(sampling_session_id: str) -> str:
    """Sampling session record."""
    return f"{PREFIX}:sampler:{{{sampling_session_id}}}"


def completions(sampling_session_id: str, clone: int) -> str:
    """Sorted set of a sampling client's resolved samples, "<seq_id>:<state>:<bytes>", by cursor; and "newest"
    under the highest one."""
    return f"{PREFIX}:sampler:{{{sampling_session_id}}}:done:{clone}"


def pending_samples(sampling_session_id: str) -> str:
    """Set of the seq_ids of a sampling session's samples that are not resolved."""
    return f"{PREFIX}:sampler:{{{sampling_session_id}}}:pending"


def inflight_version(model_id: str) -> str:
    """Version that a model's inflight sampling sessions answer from."""
    return f"{PREFIX}:model:{{{model_id}}}:inflight"


def gateway_samples(gateway_id: str) -> str:
    """Set of request ids of samples that a gateway is dispatching."""
    return f"{PREFIX}:gateway:{{{gateway_id}}}:samples"


def is_gateway_samples(name: str) -> bool:
    """Whether a key is one of `gateway_samples`."""
    return name.startswith(f"{PREFIX}:gateway:{{") and name.endswith("}:samples")


def gateway_probe(gateway_id: str) -> str:
    """What a gateway writes to find out whether it can."""
    return f"{PREFIX}:gateway:{{{gateway_id}}}:probe"


def services(kind: str) -> str:
    """Hash id -> record of the services of a kind that were announced of late."""
    return f"{PREFIX}:{{services}}:{kind}"


def services_seen(kind: str) -> str:
    """Sorted set of their ids, by when they were last announced (ms, the clock of Redis)."""
    return f"{PREFIX}:{{services}}:{kind}:seen"


def claim(kind: str, service_id: str) -> str:
    """The process that runs as a service of this id."""
    return f"{PREFIX}:claim:{kind}:{{{service_id}}}"


def weight_epoch(base_model: str) -> str:
    """Counter of a base model's weight groups."""
    return f"{PREFIX}:weights:{{{base_model}}}:epoch"


def weight_turn(base_model: str) -> str:
    """The trainer that sends weights to the samplers of a base model at present."""
    return f"{PREFIX}:weights:{{{base_model}}}:turn"


def weight_store(base_model: str, epoch_number: int) -> str:
    """Hash that holds the rendezvous of one weight group."""
    return f"{PREFIX}:weights:{{{base_model}}}:store:{epoch_number}"


def owner_snapshots(owner: str) -> str:
    """Sorted set of an owner's unnamed sampler snapshots, by when they were made or last sampled (s)."""
    return f"{PREFIX}:{{snapshots}}:owner:{owner}"


def coming_snapshots(owner: str) -> str:
    """Sorted set of an owner's unnamed sampler snapshots that are accepted, not made, by since when (s)."""
    return f"{PREFIX}:{{snapshots}}:coming:{owner}"


def model_snapshots(model_id: str) -> str:
    """Set of a model's unnamed sampler snapshots, as in the index of all."""
    return f"{PREFIX}:{{snapshots}}:model:{model_id}"


def let_go(model_id: str) -> str:
    """Hash of a model's snapshots that were deleted to make room: version -> when (s)."""
    return f"{PREFIX}:model:{{{model_id}}}:let-go"
