"""The bounds of what one request may ask for.

Invariant: whatever a client sends is refused with a sentence before it costs memory or time in
proportion to a number that the client chose.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Bounds checked at the edges, before anything is accepted.

    Attributes:
        json_body_bytes: largest JSON body. A prompt of 1M tokens is about 7 MB of JSON.
        training_body_bytes: largest forward_backward body as it arrives. The SDK cuts batches into
            chunks of about 5 MB; one single larger datum is sent alone.
        inflated_body_bytes: largest forward_backward body after decompression and after sparse
            tensors are made dense.
        operation_bytes: largest operation; with a margin below the 256 MiB that a gRPC message may have.
        pending_body_bytes: bytes of bodies being read or checked at once in this process.
        datums: training examples in one request.
        samples: sequences of one sample request.
        waiting_sequences: sequences of all unfinished samples of this gateway; see `admission`.
        waiting_sample_bytes: bytes of their requests.
        stop_items: stop strings or stop tokens of one request.
        stop_string_chars: length of one stop string.
        lora_rank: largest adapter rank.
        metadata_bytes: JSON size of one user_metadata mapping.
        tags: tags of one session.
        tag_chars: length of a tag, display name, project id or SDK version.
        page_entries: entries of one page of a list.
        min_ttl_seconds: shortest life of a checkpoint that has a ttl.
        max_ttl_seconds: longest.
    """

    json_body_bytes: int = 16 * MIB
    training_body_bytes: int = 64 * MIB
    inflated_body_bytes: int = 192 * MIB
    operation_bytes: int = 224 * MIB
    pending_body_bytes: int = 768 * MIB
    datums: int = 4096
    samples: int = 1024
    waiting_sequences: int = 32_768
    waiting_sample_bytes: int = 256 * MIB
    stop_items: int = 64
    stop_string_chars: int = 256
    lora_rank: int = 256
    metadata_bytes: int = 64 * 1024
    tags: int = 64
    tag_chars: int = 256
    page_entries: int = 1000
    min_ttl_seconds: int = 3600
    max_ttl_seconds: int = 10 * 365 * 24 * 3600


# Work on a body larger than this runs in a thread, so that a heartbeat never waits for it.
THREAD_ABOVE_BYTES = 256 * 1024

# Longest wait of one retrieve_future call, below the SDK's read timeout of 45 s.
LONG_POLL_SECONDS = 40.0

# The same of retrieve_futures.
COMPLETIONS_POLL_SECONDS = 30.0

# Longest wait of one gRPC GetResult call.
MAX_GET_RESULT_SECONDS = 60.0
