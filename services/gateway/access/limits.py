"""The bounds of what one request may ask for, and the checks that need nothing else.

Invariant: whatever a client sends is refused with a sentence before it costs memory or time in
proportion to a number that the client chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from services.common.contract.errors import InvalidRequest, LimitReached
from services.common.contract.sample_schema import MAX_SAMPLES

MIB = 1024 * 1024


@dataclass(frozen=True)
class OwnerLimits:
    """What one API key may have. Above it requests are refused until some of it is gone.

    What is kept is counted before it is made, and not with it: those that arrive at the same moment may come
    to a few more.

    Attributes:
        sessions: whose records are kept, those included that are over.
        models: the same of models.
        samplers: sampling clients of one session.
        checkpoints: named checkpoints and exports.
        checkpoint_bytes: what their files take; 0: half of the volume, or no bound where they are elsewhere.
        requests_per_second: to one gateway, over a while.
        burst_seconds: for so long one may send what it has not sent before.
        calls: at once, long polls included, of all keys together at one gateway; a key never holds more than
            is left for others.
        downloads: the same of downloads.
    """

    sessions: int = 50_000
    models: int = 20_000
    samplers: int = 100_000
    checkpoints: int = 10_000
    checkpoint_bytes: int = 0
    requests_per_second: int = 1000
    burst_seconds: int = 10
    calls: int = 8192
    downloads: int = 64

    def on_volume(self, nbytes: int) -> OwnerLimits:
        """The same where checkpoints are on a volume of so many bytes: one key leaves half to others."""
        return self if self.checkpoint_bytes else replace(self, checkpoint_bytes=nbytes // 2)

    def check_sessions(self, have: int) -> None:
        """Refuses one more session."""
        _check(have, self.sessions, "sessions", "--max-sessions", "those that are over are forgotten in time")

    def check_models(self, have: int) -> None:
        """Refuses one more model."""
        advice = "those of sessions that are over are forgotten in time"
        _check(have, self.models, "models", "--max-models", advice)

    def check_samplers(self, have: int) -> None:
        """Refuses one more sampling client of a session."""
        what = "sampling clients in this session"
        _check(have, self.samplers, what, "--max-samplers", "create a new session")

    def check_checkpoints(self, have: int, nbytes: int) -> None:
        """Refuses one more checkpoint."""
        advice = "delete some, or save with a ttl"
        _check(have, self.checkpoints, "checkpoints", "--max-checkpoints", advice)
        if self.checkpoint_bytes:
            _check(nbytes, self.checkpoint_bytes, "bytes of checkpoints", "--max-checkpoint-bytes", advice)


def _check(have: int, most: int, what: str, flag: str, advice: str) -> None:
    if have >= most:
        raise LimitReached(
            f"this API key has {have} {what}, and may have {most} ({flag}); {advice}", about={"limit": flag}
        )


@dataclass(frozen=True)
class Limits:
    """Bounds checked at the edges, before anything is accepted.

    Attributes:
        json_body_bytes: largest JSON body but a sample's. It is parsed while everything else waits.
        sample_body_bytes: largest JSON body of a sample, or of a forward of SDKs before 0.22. A prompt of 1M
            tokens is about 7 MB of JSON.
        training_body_bytes: largest forward_backward body as it arrives. The SDK cuts batches into
            chunks of about 5 MB; one single larger datum is sent alone.
        inflated_body_bytes: largest forward_backward body after decompression and after sparse
            tensors are made dense.
        operation_bytes: largest operation; with a margin below the 256 MiB that a gRPC message may have.
        grpc_message_bytes: largest message of a gRPC client.
        message_entries: entries of one repeated field of a protobuf message, before it is parsed.
        message_fields: fields of a protobuf message and all that it holds.
        datums: training examples in one request.
        prompt_tokens: of one sample, whatever the model's context is.
        samples: sequences of one sample request.
        waiting_sequences: sequences of all unfinished samples of this gateway; see `admission`.
        stop_strings: stop strings of one request. A sampler looks for each after every token.
        stop_tokens: stop tokens of one request.
        stop_string_chars: length of one stop string.
        lora_rank: largest adapter rank.
        metadata_bytes: JSON size of one user_metadata mapping.
        tags: tags of one session.
        tag_chars: length of a tag, display name, project id or SDK version.
        page_entries: entries of one page of a list.
        min_ttl_seconds: shortest life of a checkpoint that has a ttl.
        max_ttl_seconds: longest.
        owners: what one API key may have.
        stable_reinforce_as: the loss that runs where stable_reinforce is asked for; empty: that is refused.
    """

    json_body_bytes: int = MIB
    sample_body_bytes: int = 16 * MIB
    training_body_bytes: int = 64 * MIB
    inflated_body_bytes: int = 192 * MIB
    operation_bytes: int = 224 * MIB
    grpc_message_bytes: int = 32 * MIB
    message_entries: int = 4096
    message_fields: int = 2**18
    datums: int = 4096
    prompt_tokens: int = 2**22
    samples: int = MAX_SAMPLES
    waiting_sequences: int = 32_768
    stop_strings: int = 256
    stop_tokens: int = 4096
    stop_string_chars: int = 1024
    lora_rank: int = 256
    metadata_bytes: int = 64 * 1024
    tags: int = 64
    tag_chars: int = 256
    page_entries: int = 1000
    min_ttl_seconds: int = 3600
    max_ttl_seconds: int = 10 * 365 * 24 * 3600
    owners: OwnerLimits = field(default_factory=OwnerLimits)
    stable_reinforce_as: str = ""

    def check_ttl(self, ttl_seconds: int | None) -> None:
        """Refuses a lifetime that checkpoints cannot have. None = for ever."""
        if ttl_seconds is not None and not self.min_ttl_seconds <= ttl_seconds <= self.max_ttl_seconds:
            raise InvalidRequest(
                f"ttl_seconds must be {self.min_ttl_seconds} to {self.max_ttl_seconds}, not {ttl_seconds}; "
                "leave it out to keep the checkpoint for ever",
                field="ttl_seconds",
            )

    def check_page(self, offset: int, limit: int) -> None:
        """Refuses a page of a list that cannot be had."""
        if not 0 <= limit <= self.page_entries:
            raise InvalidRequest(f"limit must be 0 to {self.page_entries}, not {limit}", field="limit")
        if not 0 <= offset < 2**53:
            raise InvalidRequest(f"offset must be 0 or more, not {offset}", field="offset")

    def check_page_size(self, entries: int) -> None:
        """Refuses a size that no page of a list has."""
        if not 0 <= entries <= self.page_entries:
            message = f"page_size must be 0 to {self.page_entries}, not {entries}"
            raise InvalidRequest(message, field="page_size")

    def check_metadata(self, metadata: Mapping[str, object]) -> None:
        """Refuses metadata larger than what may be kept with an object."""
        if len(msgspec.json.encode(metadata)) > self.metadata_bytes:
            message = f"user_metadata is larger than {self.metadata_bytes} bytes; keep less in it"
            raise InvalidRequest(message, field="user_metadata")

    def check_tags(self, tags: Sequence[str]) -> None:
        """Refuses more or longer tags than a session may have."""
        if len(tags) > self.tags:
            raise InvalidRequest(f"{len(tags)} tags; use at most {self.tags}", field="tags")
        for tag in tags:
            self.check_labels(tag=tag)

    def check_labels(self, **labels: str) -> None:
        """Refuses a name or tag that is too long."""
        for name, value in labels.items():
            if len(value) > self.tag_chars:
                message = f"{name} has {len(value)} characters; use at most {self.tag_chars}"
                raise InvalidRequest(message, field="tags" if name == "tag" else name)


# Bodies up to this size have a room of their own.
SMALL_BODY_BYTES = 64 * 1024

# Work on a body larger than this runs in a thread, so that a heartbeat never waits for it.
THREAD_ABOVE_BYTES = 256 * 1024

# Longest wait of one retrieve_future call, below the SDK's read timeout of 45 s.
LONG_POLL_SECONDS = 40.0

# The same of retrieve_futures.
COMPLETIONS_POLL_SECONDS = 30.0

# Shortest wait of one that finds nothing. With a timeout of 0 the SDK tells which results it has, two times
# for a sample that it waits for alone, in the way of what its program sends next. While one is held it sends
# no other.
ACKNOWLEDGING_POLL_SECONDS = 0.05

# Longest wait of one gRPC GetResult call.
MAX_GET_RESULT_SECONDS = 60.0

# Longest life of one stream of WatchSamples.
MAX_WATCH_SECONDS = 600.0
