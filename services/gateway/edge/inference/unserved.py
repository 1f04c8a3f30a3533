"""Fields that are known and not served."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.common.contract.errors import InvalidRequest

Unserved = Mapping[str, tuple[tuple[object, ...], str]]
"""Field: (values that ask for nothing, what to do instead)."""


def refuse_unserved(body: msgspec.Struct, unserved: Unserved) -> None:
    """
    Raises:
        InvalidRequest: a field that is not served asks for something.
    """
    for name, (accepted, advice) in unserved.items():
        if getattr(body, name) not in accepted:
            raise InvalidRequest(f"{name} is not served: {advice}", "not_served")
