"""Header fields of a request."""

from __future__ import annotations

from typing import Any

from services.gateway.edge.http.wire.fields import field_of


def test_the_first_field_of_a_name_is_the_one() -> None:
    scope: dict[str, Any] = {"headers": [(b"x-api-key", b"one"), (b"host", b"h\xe4"), (b"x-api-key", b"two")]}
    assert field_of(scope, b"x-api-key") == "one"
    assert field_of(scope, b"host") == "hä"
    assert field_of(scope, b"cookie") is None
