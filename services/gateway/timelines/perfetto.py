"""A timeline as a Perfetto trace, which https://ui.perfetto.dev shows.

Invariant: slices of one track follow each other or lie within one another, as Perfetto's track events have
to; a request is one slice from its acceptance to its result, with one in it from when it was handed to a
trainer or sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Loaded with the process, not when the first trace is asked for: it takes a fifth of a second, all of it
# without letting other threads run.
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from services.gateway.timelines.event import Event, lanes

_SEQUENCE = 1
_SESSION = 1


def trace_of(session_id: str, events: Sequence[Event]) -> bytes:
    """The serialized trace (`.pftrace`) of a session: a track for it, and below that one or more for each
    model and sampling session. Times are nanoseconds since 1970."""
    builder = TraceProtoBuilder()
    _track(builder.add_packet(), _SESSION, f"session {session_id}")
    for uuid, lane in enumerate(lanes(list(events)), start=_SESSION + 1):
        name = lane.object_id if lane.number == 0 else f"{lane.object_id} ({lane.number + 1})"
        _track(builder.add_packet(), uuid, name, parent=_SESSION)
        for event in lane.events:
            _request(builder, uuid, event)
    return builder.serialize()


def _track(packet: TracePacket, uuid: int, name: str, parent: int = 0) -> None:
    descriptor: TrackDescriptor = packet.track_descriptor
    descriptor.uuid, descriptor.name = uuid, name
    descriptor.child_ordering = TrackDescriptor.ChildTracksOrdering.LEXICOGRAPHIC
    if parent:
        descriptor.parent_uuid = parent


def _request(builder: TraceProtoBuilder, track: int, event: Event) -> None:
    # Clocks of two gateways may differ by more than a short request took.
    ended = max(event.ended, event.accepted)
    began = min(max(event.began, event.accepted), ended) if event.began else 0.0
    about = {
        "request_id": f"{event.object_id}:{event.seq_id}",
        "outcome": event.outcome,
        "trace_id": event.trace_id,
    }
    _begin(builder, track, event.accepted, event.kind, about)
    if began:
        _begin(builder, track, began, "runs", {})
        _end(builder, track, ended)
    _end(builder, track, ended)


def _begin(builder: TraceProtoBuilder, track: int, at: float, name: str, about: Mapping[str, str]) -> None:
    packet = _packet(builder, track, at, TrackEvent.TYPE_SLICE_BEGIN)
    packet.track_event.name = name
    for key, value in about.items():
        if value:
            note = packet.track_event.debug_annotations.add()
            note.name, note.string_value = key, value


def _end(builder: TraceProtoBuilder, track: int, at: float) -> None:
    _packet(builder, track, at, TrackEvent.TYPE_SLICE_END)


def _packet(builder: TraceProtoBuilder, track: int, at: float, kind: int) -> TracePacket:
    packet = builder.add_packet()
    packet.timestamp = int(at * 1e6) * 1000
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_event.type, packet.track_event.track_uuid = kind, track
    return packet
