"""What an error says is bounded, whatever a client put into it."""

from __future__ import annotations

from services.common.contract import errors
from services.common.contract.errors import MESSAGE_CHARS, InvalidRequest, Unavailable
from services.common.state.journal_records import error_result


def test_a_message_ends_after_two_thousand_characters() -> None:
    error = InvalidRequest("x" * 10_000_000)
    assert error.message == str(error)
    assert len(error.message) == MESSAGE_CHARS == 2000
    assert error.message.endswith("x...")
    assert len(errors.to_pb(ValueError("y" * 10_000)).message) == MESSAGE_CHARS
    assert len(error_result(errors.to_pb(error))) < 4096


def test_a_shorter_message_stays_as_it_is() -> None:
    for message in ("", "short", "z" * MESSAGE_CHARS):
        assert Unavailable(message).message == message


def test_a_message_that_another_service_sent_is_bounded_too() -> None:
    sent = errors.types_pb2.Error(
        category=errors.types_pb2.ERROR_CATEGORY_USER, code="gone", message="x" * 9999
    )
    assert len(errors.from_pb(sent).message) == MESSAGE_CHARS
