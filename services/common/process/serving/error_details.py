"""What a failed gRPC call tells programs: the details of `google.rpc.Status`.

Invariant: every error has an ErrorInfo, those of one field a BadRequest, those that pass by themselves a
RetryInfo. The whole fits into the trailing metadata that clients take unless told otherwise, 8 KiB.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from services.common.contract.errors import TinsmithError

DETAILS_METADATA = "grpc-status-details-bin"
"""Where gRPC's libraries look for it."""

DOMAIN = "tinsmith"

_MESSAGE_COST = 6000
"""Most bytes that the message may take on the wire, where it is twice: percent-encoded, and as base64."""


def status_of(error: TinsmithError, code: int) -> status_pb2.Status:
    """The status with its details.

    Args:
        code: number of the error's gRPC status.
    """
    message = _cut(error.message)
    status = status_pb2.Status(code=code, message=message)
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def _details(error: TinsmithError) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN, metadata=error.about)
    found: list[Message] = [info]
    if error.field:
        fault = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_cut(error.message, 600)
        )
        found.append(error_details_pb2.BadRequest(field_violations=[fault]))
    if error.retry_after:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromSeconds(error.retry_after)
        found.append(retry)
    return found


def _cut(message: str, most: int = _MESSAGE_COST) -> str:
    """As much of a message as may be sent."""
    cost = 0.0
    for at, character in enumerate(message):
        raw = character.encode(errors="replace")
        plain = len(raw) == 1 and 0x20 <= raw[0] <= 0x7E and character != "%"
        cost += (1 if plain else 3 * len(raw)) + 4 * len(raw) / 3
        if cost > most:
            return message[:at] + "..."
    return message
