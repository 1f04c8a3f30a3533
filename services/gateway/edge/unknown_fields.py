"""Fields of protobuf messages that this service's contract does not have.

protobuf passes over them, so a client with a newer contract would believe that they took effect.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.common.contract.errors import InvalidRequest


def refuse_unknown(message: Message, where: str) -> None:
    """Looks at a message and at those that it holds one of; not at repeated ones, of which there may be many.

    Raises:
        InvalidRequest: there is a field that is not in the contract.
    """
    fields = UnknownFieldSet(message)
    numbers = sorted({fields[place].field_number for place in range(len(fields))})
    if numbers:
        raise InvalidRequest(
            f"{where} has protobuf fields {numbers} that this service does not know; it is older than its "
            "client",
            "unknown_field",
        )
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated:
            refuse_unknown(value, f"{where}.{field.name}")
