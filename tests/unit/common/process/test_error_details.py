"""The details of a failed call fit into what clients take, whatever the message is."""

from __future__ import annotations

from base64 import b64encode
from urllib.parse import quote

import pytest

from services.common.contract.errors import MESSAGE_CHARS, InvalidRequest, Overloaded
from services.common.process.serving.error_details import status_of


@pytest.mark.parametrize("character", ["x", "%", "ß", "語", "🙂"])
def test_message_and_details_together_stay_below_eight_kilobytes(character: str) -> None:
    error = InvalidRequest(character * MESSAGE_CHARS, "c" * 40, field="f" * 40)
    status = status_of(error, 3)
    assert len(status.message) > 300
    assert len(quote(status.message)) + len(b64encode(status.SerializeToString())) < 8000


def test_a_message_of_plain_text_is_whole() -> None:
    message = "x" * MESSAGE_CHARS
    assert status_of(Overloaded(message), 8).message == message
