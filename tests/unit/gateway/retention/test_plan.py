"""When sessions are parked or ended, and how models are taken down: the decisions."""

from __future__ import annotations

import pytest

from services.gateway.retention.plan import (
    EndedModel,
    ModelStep,
    RetentionSettings,
    SessionStep,
    model_step,
    session_step,
)

SETTINGS = RetentionSettings(park_after=100, end_after=1000, snapshot_grace=50)


@pytest.mark.parametrize(
    ("silent", "parked", "step"),
    [
        (99, False, SessionStep.KEEP),
        (100, False, SessionStep.PARK),
        (100, True, SessionStep.KEEP),
        (999, False, SessionStep.PARK),
        (1000, True, SessionStep.END),
        (1000, False, SessionStep.END),
    ],
)
def test_a_silent_session_is_parked_once_and_ended_much_later(
    silent: float, parked: bool, step: SessionStep
) -> None:
    assert session_step(5.0, 5.0 if parked else None, 5.0 + silent, SETTINGS) is step


def test_a_session_that_came_back_after_it_was_parked_is_parked_again() -> None:
    assert session_step(300.0, 5.0, 450.0, SETTINGS) is SessionStep.PARK


def ended(**fields: object) -> EndedModel:
    state = {"noted_at": 0.0, "session_over": True, "closed": True, "pending": 0, "erased": False}
    return EndedModel(**(state | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "now", "step"),
    [
        (ended(closed=False, pending=1), 500, ModelStep.WAIT),
        (ended(closed=True, pending=1), 500, ModelStep.WAIT),
        (ended(closed=False), 0, ModelStep.CLOSE),
        (ended(), 4, ModelStep.WAIT),
        (ended(), 5, ModelStep.DELETE_STATE),
        (ended(erased=True), 49, ModelStep.WAIT),
        (ended(erased=True), 50, ModelStep.DELETE_SNAPSHOTS),
    ],
)
def test_a_model_of_an_ended_session_goes_step_by_step(
    model: EndedModel, now: float, step: ModelStep
) -> None:
    assert model_step(model, now, SETTINGS) is step


def test_an_unloaded_model_of_a_living_session_keeps_its_sampler_snapshots() -> None:
    assert model_step(ended(session_over=False), 500, SETTINGS) is ModelStep.DELETE_STATE
    assert model_step(ended(session_over=False, erased=True), 500, SETTINGS) is ModelStep.DROP


def test_an_open_model_of_a_living_session_is_left_alone() -> None:
    assert model_step(ended(session_over=False, closed=False), 500, SETTINGS) is ModelStep.DROP
