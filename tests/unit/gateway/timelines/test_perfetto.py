"""The trace of a session, as Perfetto reads it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from services.gateway.timelines.event import Event
from services.gateway.timelines.perfetto import trace_of


class Slice(NamedTuple):
    track: str
    name: str
    depth: int
    began: int
    ended: int
    about: dict[str, str]


def read(raw: bytes) -> tuple[dict[str, str], list[Slice]]:
    """The parent of each track, by their names, and the slices, which have to lie within one another."""
    trace: Any = Trace.FromString(raw)
    described = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }
    parents = {
        one.name: described[one.parent_uuid].name for one in described.values() if one.HasField("parent_uuid")
    }
    slices, open_on = [], defaultdict(list)
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        assert packet.trusted_packet_sequence_id
        event = packet.track_event
        track = described[event.track_uuid].name
        stack = open_on[track]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            about = {note.name: note.string_value for note in event.debug_annotations}
            stack.append((event.name, packet.timestamp, about))
        else:
            assert event.type == TrackEvent.TYPE_SLICE_END
            name, began, about = stack.pop()
            assert began <= packet.timestamp
            slices.append(Slice(track, name, len(stack), began, packet.timestamp, about))
    assert not any(open_on.values())
    return parents, slices


def test_a_request_is_a_slice_with_one_in_it_for_when_it_was_carried_out() -> None:
    trained = Event("s:train:0", 3, "forward_backward", 100.0, 101.5, 102.0, "done", "ab" * 16)
    parents, slices = read(trace_of("s", [trained]))
    assert parents == {"s:train:0": "session s"}
    runs, whole = slices
    assert (runs.name, runs.depth, runs.began, runs.ended) == ("runs", 1, 101_500_000_000, 102_000_000_000)
    assert (whole.name, whole.depth, whole.began, whole.ended) == (
        "forward_backward",
        0,
        100_000_000_000,
        102_000_000_000,
    )
    assert whole.about == {"request_id": "s:train:0:3", "outcome": "done", "trace_id": "ab" * 16}


def test_what_was_never_carried_out_is_told_with_why() -> None:
    refused = Event("s:train:0", 3, "refused", 100.0, 0.0, 100.0, "bad_seq_id")
    _, slices = read(trace_of("s", [refused]))
    assert [(one.name, one.about["outcome"]) for one in slices] == [("refused", "bad_seq_id")]


def test_samples_that_run_together_have_tracks_of_their_own() -> None:
    events = [Event("s:sample:0", number, "sample", 10.0, 10.5, 12.0 + number) for number in range(3)]
    parents, slices = read(trace_of("s", events))
    assert list(parents) == ["s:sample:0", "s:sample:0 (2)", "s:sample:0 (3)"]
    assert len(slices) == 6


def test_a_session_without_requests_has_an_empty_trace() -> None:
    assert read(trace_of("s", [])) == ({}, [])


times = st.floats(1.0, 1e3)


@given(st.lists(st.tuples(times, st.one_of(st.just(0.0), times), times)))
def test_slices_lie_within_one_another_whatever_clocks_said(spans: list[tuple[float, float, float]]) -> None:
    events = [Event("s:train:0", number, "forward", *span) for number, span in enumerate(spans)]
    _, slices = read(trace_of("s", events))
    told = {one.about["request_id"] for one in slices if one.depth == 0}
    assert told == {f"s:train:0:{number}" for number in range(len(events))}
    on: dict[str, list[Slice]] = defaultdict(list)
    for one in slices:
        if one.depth == 0:
            on[one.track].append(one)
    for row in on.values():
        for before, after in pairwise(row):
            assert before.ended <= after.began
