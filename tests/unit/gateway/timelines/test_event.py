"""Rows of a timeline."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.timelines.event import Event, lanes


def event(object_id: str, seq_id: int, accepted: float, ended: float) -> Event:
    return Event(object_id, seq_id, "forward", accepted, accepted, ended)


def test_requests_that_follow_each_other_share_a_row() -> None:
    one, two = event("m", 1, 0, 2), event("m", 2, 2, 3)
    assert [lane.events for lane in lanes([two, one])] == [[one, two]]


def test_requests_that_were_under_way_together_lie_beside_each_other() -> None:
    events = [event("m", 1, 0, 5), event("m", 2, 1, 2), event("m", 3, 3, 4)]
    rows = lanes(events)
    assert [(lane.number, [one.seq_id for one in lane.events]) for lane in rows] == [(0, [1]), (1, [2, 3])]


def test_every_model_has_rows_of_its_own() -> None:
    rows = lanes([event("n", 1, 0, 5), event("m", 1, 1, 2)])
    assert [(lane.object_id, lane.number) for lane in rows] == [("m", 0), ("n", 0)]


@given(st.lists(st.tuples(st.sampled_from("mn"), st.integers(0, 50), st.integers(0, 20))))
def test_no_row_has_two_requests_at_the_same_time_and_none_is_lost(spans: list[tuple[str, int, int]]) -> None:
    events = [event(name, number, at, at + took) for number, (name, at, took) in enumerate(spans)]
    rows = lanes(events)
    for lane in rows:
        assert {one.object_id for one in lane.events} == {lane.object_id}
        for before, after in pairwise(lane.events):
            assert before.ended <= after.accepted
    assert sorted(one.seq_id for lane in rows for one in lane.events) == list(range(len(events)))
